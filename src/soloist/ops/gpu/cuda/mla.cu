#include "common.cuh"

// Gated MLA of a round in three kernels: absorb, attend over runs of the context, join and project.
//
// The first also writes the window's latents; the second reads each cached latent once for all heads. Where runs begin and
// end is told in ops/gpu/attention.py. Defined by the host: H heads, N channels of a query without position, DR with it, R
// of a latent, DV of a value, STEP between the channels of a pair (2 interleaved, 1 halves), HALVES of 8 window rows,
// STAGES of latents in shared memory, QUERY_TILES that a block takes at once.

constexpr int WIDTH = R + DR;
constexpr int TILE = 64;
constexpr int SHORT_RUNS = 128, PER_OCTAVE = 64, FIRST_OCTAVE = 13;

DEVICE int run_size(int run) { return run < SHORT_RUNS ? TILE : 2 * TILE << (run - SHORT_RUNS) / PER_OCTAVE; }

DEVICE int run_first(int run) {
  if (run < SHORT_RUNS) return run * TILE;
  return (TILE * SHORT_RUNS + (run - SHORT_RUNS) % PER_OCTAVE * 2 * TILE) << (run - SHORT_RUNS) / PER_OCTAVE;
}

DEVICE int run_of(int position) {
  if (position < TILE * SHORT_RUNS) return position / TILE;
  const int octave = 31 - __clz(position) - FIRST_OCTAVE;
  return SHORT_RUNS + octave * PER_OCTAVE + ((position - (TILE * SHORT_RUNS << octave)) >> octave) / (2 * TILE);
}

constexpr int ABSORBING = 4;  // warps of an absorbing block, 16 latent channels each
constexpr int CHUNKS_OF_R = R / (ABSORBING * OUTS);

constexpr int HALF = DR / 2;

// One turned pair of channels.
DEVICE void turn(const u16* from, u16* to, int pair, float c, float s) {
  const int one = pair * STEP, other = one + (STEP == 2 ? 1 : HALF);
  const float a = wide(fresh(from + one)), b = wide(fresh(from + other));
  to[one] = narrow(a * c - b * s), to[other] = narrow(b * c + a * s);
}

// Window row t's entry into the cache.
DEVICE void enter(int t, const u16* kv, i64 kv_row, const u16* norm, float eps, const float* cos, const float* sin, u16* entry) {
  __shared__ float sums[ABSORBING];
  constexpr int THREADS = ABSORBING * 32, EACH = R / THREADS;
  const int tid = threadIdx.x;
  const u16* row = kv + t * kv_row;
  float value[EACH], sum = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; i++) value[i] = wide(fresh(row + tid + i * THREADS));
  if (tid < HALF) turn(row + R, entry + R, tid, cos[t * HALF + tid], sin[t * HALF + tid]);
#pragma unroll
  for (int i = 0; i < EACH; i++) sum = fmaf(value[i], value[i], sum);
  sum = warp_sum(sum);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  const float scale = rsqrtf((sums[0] + sums[1] + sums[2] + sums[3]) / R + eps);
#pragma unroll
  for (int i = 0; i < EACH; i++) entry[tid + i * THREADS] = narrow(rounded(value[i] * scale) * wide(norm[tid + i * THREADS]));
}

// Blocks 0 .. H * CHUNKS_OF_R - 1 make the latent part of the queries out [T, H, WIDTH]. Two more a window row enter its latent
// into the cache and turn its queries' other part.
extern "C" __global__ void __launch_bounds__(ABSORBING * 32)
absorb(const u16* q, i64 q_row, i64 q_head, const u16* kv, i64 kv_row, const u16* norm, float eps, const u16* up_key,
       const float* cos, const float* sin, u16* latents, const i64* page, const i64* offset, u16* out, int T, int P) {
  const int extra = int(blockIdx.x) - H * CHUNKS_OF_R, t = extra / 2;
  if (extra >= 0) {
    const i64 position = page[t] * P + offset[t];  // some kernels old, as the rotation is
    depend();
    if (extra % 2) {
      enter(t, kv, kv_row, norm, eps, cos, sin, latents + position * WIDTH);
    } else {
#pragma unroll 4
      for (int i = threadIdx.x; i < H * HALF; i += ABSORBING * 32) {
        const int pair = i % HALF, head = i / HALF;
        turn(q + t * q_row + head * q_head + N, out + i64(t * H + head) * WIDTH + R, pair, cos[t * HALF + pair], sin[t * HALF + pair]);
      }
    }
    return;
  }
  const int head = blockIdx.x / CHUNKS_OF_R, lane = threadIdx.x & 31, g = lane >> 2, pair = lane & 3;
  const int first = (blockIdx.x % CHUNKS_OF_R * ABSORBING + (threadIdx.x >> 5)) * OUTS;
  const u16* row = up_key + i64(head * R + first + g) * N + pair * 8;
  uint4 w[N / 32][2];
#pragma unroll
  for (int j = 0; j < N / 32; j++) w[j][0] = stream16(row + j * 32), w[j][1] = stream16(row + 8 * N + j * 32);
  depend();
  float acc[HALVES][2][4] = {};
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int t = half * ROWS + g;
#pragma unroll
    for (int j = 0; j < N / 32; j++) {
      const u16* from = q + head * q_head + t * q_row + j * 32 + pair * 8;
      multiply(acc[half], w[j][0], w[j][1], t < T ? fresh16(from) : make_uint4(0, 0, 0, 0));
    }
  }
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = half * ROWS + 2 * pair + (i & 1), r = first + g + (i >> 1) * 8;
      if (row < T) out[i64(row * H + head) * WIDTH + r] = narrow(acc[half][0][i] + acc[half][1][i]);
    }
  }
}

constexpr int STRIDE = WIDTH + 8;  // in shared memory: rows 16 bytes on, so that eight of them share no bank
constexpr int QUERIES = 16;
constexpr int SCORES = TILE + 4;
constexpr int THREADS = 256;
constexpr int COLUMNS = R / 8;     // of the latent that a warp sums
constexpr int VECTORS = WIDTH / 8;

DEVICE void matrices(u32 (&m)[4], const u16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(u32(__cvta_generic_to_shared(row))) : "memory");
}

DEVICE void matrices_transposed(u32 (&m)[4], const u16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(u32(__cvta_generic_to_shared(row))) : "memory");
}

// Latents of the positions position .. position + 63 that lie in from .. to - 1; behind `to`, where zeros are wanted, zeros.
DEVICE void load_tile(u16* tile, const u16* latents, int position, int from, int to, bool zeros) {
  for (int i = threadIdx.x; i < TILE * VECTORS; i += THREADS) {
    const int row = i / VECTORS, column = i % VECTORS * 8, at = position + row;
    if (at >= from && at < to) copy16(tile + row * STRIDE + column, latents + i64(at) * WIDTH + column);
    else if (zeros && at >= to) *(uint4*)(tile + row * STRIDE + column) = make_uint4(0, 0, 0, 0);
  }
  commit();
}

// What 16 query rows have gathered of a run. A lane keeps rows g and g + 8; all warps keep the same m and total.
struct Softmax {
  float m[2], total[2], acc[COLUMNS / 8][4];

  DEVICE void clear() {
    m[0] = m[1] = -INF, total[0] = total[1] = 0.f;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;
  }

  // Take in one tile, its scores [2][16][SCORES] in powers of two.
  DEVICE void add(const float* scores, const u16* tile) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    float p[2][TILE / 4], keep[2];
#pragma unroll
    for (int side = 0; side < 2; side++) {
      float most = m[side];
#pragma unroll
      for (int i = 0; i < TILE / 8; i++) {
        const float* two = scores + (g + side * 8) * SCORES + i * 8 + 2 * q;
        const float2 a = *(const float2*)two, b = *(const float2*)(two + QUERIES * SCORES);
        p[side][2 * i] = a.x + b.x, p[side][2 * i + 1] = a.y + b.y;
        most = fmaxf(most, fmaxf(a.x + b.x, a.y + b.y));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float anchor = most == -INF ? 0.f : most;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < TILE / 4; i++) sum += p[side][i] = exp2f(p[side][i] - anchor);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      keep[side] = exp2f(m[side] - anchor);
      total[side] = fmaf(total[side], keep[side], sum);
      m[side] = most;
    }
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) acc[n][0] *= keep[0], acc[n][1] *= keep[0], acc[n][2] *= keep[1], acc[n][3] *= keep[1];
#pragma unroll
    for (int j = 0; j < TILE / 16; j++) {
      const u32 a0 = pack(p[0][4 * j], p[0][4 * j + 1]), a1 = pack(p[1][4 * j], p[1][4 * j + 1]);
      const u32 a2 = pack(p[0][4 * j + 2], p[0][4 * j + 3]), a3 = pack(p[1][4 * j + 2], p[1][4 * j + 3]);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n += 2) {
        u32 b[4];
        matrices_transposed(b, tile + (j * 16 + (lane & 15)) * STRIDE + warp * COLUMNS + n * 8 + (lane >> 4) * 8);
        mma(acc[n], a0, a1, a2, a3, b[0], b[1]);
        mma(acc[n + 1], a0, a1, a2, a3, b[2], b[3]);
      }
    }
  }
};

// Half of the columns' share in the scores of the warp's 16 positions for 16 query rows: scores [2][16][SCORES], whose two
// halves are to be added; -inf where a row does not see a position.
DEVICE void score(float* scores, const u16* queries, const u16* tile, int position, int first_row, int num_rows, int start, float scale) {
  constexpr int STEPS = WIDTH / 16, FIRST_HALF = (STEPS + 1) / 2;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int base = warp % 4 * 16, half = warp / 4;
  float acc[2][4] = {};
#pragma unroll 6
  for (int step = half * FIRST_HALF; step < (half ? STEPS : FIRST_HALF); step++) {
    u32 k[4], a[4];
    matrices(k, tile + (base + (lane & 7) + (lane >> 4) * 8) * STRIDE + step * 16 + (lane >> 3 & 1) * 8);
    matrices(a, queries + (lane & 15) * STRIDE + step * 16 + (lane >> 4) * 8);
    mma(acc[0], a[0], a[1], a[2], a[3], k[0], k[1]);
    mma(acc[1], a[0], a[1], a[2], a[3], k[2], k[3]);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = g + (i >> 1 & 1) * 8, column = base + i / 4 * 8 + 2 * q + (i & 1);
    const bool visible = first_row + row < num_rows && position + column <= start + (first_row + row) / H;
    scores[(half * QUERIES + row) * SCORES + column] = visible ? acc[i / 4][i % 4] * scale : -INF;
  }
}

constexpr int TILE_SCORES = 2 * QUERIES * SCORES;  // of one tile of query rows

// Blocks (run, some of the groups of QUERY_TILES tiles of 16 query rows): parts [runs, T * H, R], logs [runs, T * H], in powers
// of two. A tile of latents serves a whole group.
extern "C" __global__ void __launch_bounds__(THREADS, QUERY_TILES == 1 ? 2 : 1)
attend(const u16* q, const u16* latents, const i64* start_at, u16* parts, float* logs, float scale, int T) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int GROUP = QUERY_TILES * QUERIES;
  u16* tiles = (u16*)shared;                       // [STAGES][TILE][STRIDE]
  u16* queries = tiles + STAGES * TILE * STRIDE;   // [GROUP][STRIDE]
  float* scores = (float*)(queries + GROUP * STRIDE);  // [QUERY_TILES][TILE_SCORES]
  const int run = blockIdx.x, begin = run_first(run), start = int(*start_at), end = start + T, num_rows = T * H;
  load_tile(tiles, latents, begin, 0, start, false);  // entries of earlier rounds, while the kernel ahead still runs
  depend();
  if (begin >= end) return;
  if (begin + TILE > start) load_tile(tiles, latents, begin, start, end, true);
  const int count = (min(run_size(run), end - begin) + TILE - 1) / TILE;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q4 = lane & 3;
  int stage = 0;
  bool loaded = true;  // the first tile, in the current stage
  for (int first_row = blockIdx.y * GROUP; first_row < num_rows; first_row += gridDim.y * GROUP) {
    for (int i = threadIdx.x; i < GROUP * VECTORS; i += THREADS) {
      const int row = i / VECTORS, column = i % VECTORS * 8;
      u16* to = queries + row * STRIDE + column;
      if (first_row + row < num_rows) copy16(to, q + i64(first_row + row) * WIDTH + column);
      else *(uint4*)to = make_uint4(0, 0, 0, 0);
    }
    commit();
    if (!loaded) load_tile(tiles + stage * TILE * STRIDE, latents, begin, 0, end, true);
    Softmax softmax[QUERY_TILES];
#pragma unroll
    for (int k = 0; k < QUERY_TILES; k++) softmax[k].clear();
    for (int i = 0; i < count; i++) {
      const int position = begin + i * TILE;
      const u16* tile = tiles + stage * TILE * STRIDE;
      if (STAGES > 1 && i + 1 < count) {
        load_tile(tiles + (stage ^ 1) * TILE * STRIDE, latents, position + TILE, 0, end, true);
        copied<1>();
      } else {
        copied<0>();
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < QUERY_TILES; k++) {
        score(scores + k * TILE_SCORES, queries + k * QUERIES * STRIDE, tile, position, first_row + k * QUERIES, num_rows, start, scale);
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < QUERY_TILES; k++) softmax[k].add(scores + k * TILE_SCORES, tile);
      __syncthreads();
      if (i + 1 < count) stage ^= 1;
    }
    loaded = count == 1;
#pragma unroll
    for (int side = 0; side < 2 * QUERY_TILES; side++) {
      const Softmax& made = softmax[side / 2];
      const int row = first_row + g + side * 8;
      const bool some = made.total[side % 2] > 0.f;
      const float share = some ? 1.f / made.total[side % 2] : 0.f;
      if (row < num_rows) {
        const i64 at = i64(run) * num_rows + row;
        if (warp == 0 && q4 == 0) logs[at] = some ? made.m[side % 2] + log2f(made.total[side % 2]) : -INF;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
          const u32 two = pack(made.acc[n][side % 2 * 2] * share, made.acc[n][side % 2 * 2 + 1] * share);
          *(u32*)(parts + at * R + warp * COLUMNS + n * 8 + 2 * q4) = two;
        }
      }
    }
  }
}

// A cluster of blocks joins a head: each takes a slice of the latent's columns, over all runs and for all values.
constexpr int SLICES = 4;
constexpr int SLICE = R / SLICES;
constexpr int LANES = SLICE / 8;          // that take 8 latent channels each
constexpr int JOINING = THREADS / LANES;  // groups of them, each on runs of its own
constexpr int HELD = 8;                   // runs of a group that are on their way before their weights are known
constexpr int MOST_RUNS = 1536;
constexpr int EACH = (DV + THREADS / LANES - 1) / (THREADS / LANES);
constexpr int OWN = (DV + SLICES - 1) / SLICES;  // values whose sum a block ends

// Blocks (head, slice, window row): out [T, H * DV], the sum over all runs that the row sees, projected and gated.
extern "C" __global__ void __cluster_dims__(1, SLICES, 1) __launch_bounds__(THREADS)
project(const u16* parts, const float* logs, const u16* up_value, i64 up_head, const u16* gates, i64 gate_row, const i64* start_at,
        u16* out, int T) {
  __shared__ float weights[MOST_RUNS], sums[JOINING][SLICE + 4], context[SLICE], most[THREADS / 32], totals[THREADS / 32];
  __shared__ float inbox[SLICES][OWN];
  const int head = blockIdx.x, slice = blockIdx.y, t = blockIdx.z, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int group = tid / LANES, r8 = tid % LANES * 8, column = slice * SLICE + r8;
  cluster_arrive();
  uint4 w[EACH];
#pragma unroll
  for (int v = 0; v < EACH; v++) {
    const int value = v * (THREADS / LANES) + group;
    w[v] = value < DV ? stream16(up_value + head * up_head + i64(value) * R + column) : make_uint4(0, 0, 0, 0);
  }
  const int runs = run_of(int(*start_at) + t) + 1, row = t * H + head;
  const float gate = wide(fresh(gates + t * gate_row + head));  // some kernels old
  depend();

  uint4 part[HELD];
  const auto fetch = [&](int begin) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int run = begin + group + k * JOINING;
      part[k] = run < runs ? fresh16(parts + (i64(run) * T * H + row) * R + column) : make_uint4(0, 0, 0, 0);
    }
  };
  fetch(0);
  float highest = -INF;
  for (int run = tid; run < runs; run += THREADS) {
    const float log = fresh(logs + i64(run) * T * H + row);
    weights[run] = log;
    highest = fmaxf(highest, log);
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  if (lane == 0) most[warp] = highest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) highest = fmaxf(highest, most[i]);
  float total = 0.f;
  for (int run = tid; run < runs; run += THREADS) total += weights[run] = exp2f(weights[run] - highest);
  total = warp_sum(total);
  if (lane == 0) totals[warp] = total;
  __syncthreads();

  float acc[8] = {};
#pragma unroll 1
  for (int begin = 0; begin < runs; begin += HELD * JOINING) {
    if (begin) fetch(begin);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const int run = begin + group + k * JOINING;
      const float weight = run < runs ? weights[run] : 0.f;
      const u32 pairs[4] = {part[k].x, part[k].y, part[k].z, part[k].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        acc[2 * i] = fmaf(weight, low(pairs[i]), acc[2 * i]);
        acc[2 * i + 1] = fmaf(weight, high(pairs[i]), acc[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sums[group][r8 + i] = acc[i];
  __syncthreads();
  total = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) total += totals[i];
  for (int r = tid; r < SLICE; r += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < JOINING; i++) sum += sums[i][r];
    context[r] = rounded(sum / total);
  }
  __syncthreads();

  cluster_wait();  // the others have begun, so their shared memory is theirs
#pragma unroll
  for (int v = 0; v < EACH; v++) {
    const u32 pairs[4] = {w[v].x, w[v].y, w[v].z, w[v].w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(high(pairs[i]), context[r8 + 2 * i + 1], fmaf(low(pairs[i]), context[r8 + 2 * i], sum));
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    const int value = v * (THREADS / LANES) + group;
    if (tid % LANES == 0 && value < DV) send(&inbox[slice][value % OWN], value / OWN, sum);
  }
  cluster_arrive();
  cluster_wait();
  const int value = slice * OWN + tid;
  if (tid >= OWN || value >= DV) return;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < SLICES; i++) sum += inbox[i][tid];
  out[i64(row) * DV + value] = narrow(rounded(sum) * rounded(sigmoid(gate)));
}
