#include "common.cuh"
#include "ring.cuh"

// A round's mixture of experts in three kernels: router and shared expert, routed experts up, all experts down.
//
// No sort and no atomics on global memory: every block repeats the choice of experts from the router's logits, which is
// cheaper than a kernel boundary. The distinct experts of all rows, in ascending order, are the items of the second and
// third kernel; each is read once, whatever number of rows chose it. Rows that did not choose an item have weight 0 there.
//
// Defined by the host: D inputs, F hidden values of an expert, E experts, GROUPS, TOP_GROUPS, TOP_K, SIGMOID, HAS_BIAS,
// NORMALISE, SCALING, SHARED (whether an expert of F hidden values takes every row), WIDE_ROUTER (fp32), HALVES of 8 rows,
// DOWN_ROWS outputs of a down block.

constexpr int PER_WARP = (D / 32 + WARPS - 1) / WARPS;  // of a row's columns by 32, for the router
constexpr int STRIDE = D + 32;  // of x in shared memory, in bf16: 64 bytes on, so that two rows share no bank
constexpr int PARTIAL = HALVES * ROWS * OUTS;
constexpr int LOGITS = 8;  // experts of one router block
constexpr int PER_LANE = E < 32 ? 1 : E / 32;
constexpr int GROUP_LANES = E / GROUPS / PER_LANE;

DEVICE u32 sortable(float x) {
  const u32 bits = __float_as_uint(x);
  return bits ^ (int(bits) < 0 ? ~0u : 1u << 31);
}

// Router weights, one column; read once.
DEVICE float router_weight(const void* w, i64 at) {
#if WIDE_ROUTER
  float x;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(x) : "l"((const float*)w + at));
  return x;
#else
  u16 x;
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(x) : "l"((const u16*)w + at));
  return wide(x);
#endif
}

// 8 router logits of every row, fp32; the first block also writes the new residual stream and its norm's scale [T].
DEVICE void router_block(int block, const u16* residual, const u16* branch, const u16* norm, const void* router, u16* stream,
                         float* scales, float* logits, int T, float eps, u16* rows, float* partials, float* squares) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = warp * PER_WARP * 32;
  float w[LOGITS][PER_WARP], weight[PER_WARP];
#pragma unroll
  for (int j = 0; j < PER_WARP; j++) {
    const int column = first + j * 32 + lane;
    const bool inside = column < D;
    weight[j] = inside ? wide(norm[column]) : 0.f;
#pragma unroll
    for (int e = 0; e < LOGITS; e++) {
      const int expert = block * LOGITS + e;
      w[e][j] = inside && expert < E ? router_weight(router, i64(expert) * D + column) : 0.f;
    }
  }
  Norm<D, true, false, HALVES * ROWS> entering;
  depend();
  entering.enter(rows, STRIDE, squares, residual, D, branch, block ? nullptr : stream, T);
  meet();
  for (int t = 0; t < T; t++) {
    float sums[LOGITS] = {};
#pragma unroll
    for (int j = 0; j < PER_WARP; j++) {
      const int column = first + j * 32 + lane;
      if (column >= D) continue;
      const float x = wide(rows[t * STRIDE + column]) * weight[j];
#pragma unroll
      for (int e = 0; e < LOGITS; e++) sums[e] = fmaf(w[e][j], x, sums[e]);
    }
    // Lanes share the 8 sums out: after three exchanges each holds a quarter of one.
#pragma unroll
    for (int half = LOGITS / 2, step = 16; half; half >>= 1, step >>= 1) {
      const bool upper = lane & step;
#pragma unroll
      for (int e = 0; e < half; e++) {
        const float sent = upper ? sums[e] : sums[e + half];
        sums[e] = (upper ? sums[e + half] : sums[e]) + __shfl_xor_sync(~0u, sent, step);
      }
    }
    sums[0] += __shfl_xor_sync(~0u, sums[0], 2);
    sums[0] += __shfl_xor_sync(~0u, sums[0], 1);
    if ((lane & 3) == 0) partials[(warp * HALVES * ROWS + t) * LOGITS + lane / 4] = sums[0];
  }
  meet();
  for (int i = threadIdx.x; i < T * LOGITS; i += CONSUMERS) {
    const int t = i / LOGITS, e = i % LOGITS, expert = block * LOGITS + e;
    const float scale = rsqrtf(sum_partials<WARPS, HALVES * ROWS>(squares, t) / D + eps);
    if (expert < E) logits[i64(t) * E + expert] = sum_partials<WARPS, HALVES * ROWS * LOGITS>(partials, i) * scale;
    if (block == 0 && e == 0) scales[t] = scale;
  }
}

// 8 hidden values of one gated expert for every row, from its partial sums.
DEVICE void store_hidden(u16* h, const float* partials, int unit, int T, float limit, const float* scales) {
  for (int i = threadIdx.x; i < 8 * T; i += CONSUMERS) {
    const int t = i / 8, j = i % 8;
    const float scale = scales[t];
    const float gate = sum_partials<WARPS, PARTIAL>(partials, t * OUTS + 2 * j) * scale;
    const float up = sum_partials<WARPS, PARTIAL>(partials, t * OUTS + 2 * j + 1) * scale;
    h[i64(t) * F + unit * 8 + j] = narrow(swiglu(gate, up, limit));
  }
}

// Row r of a unit of 8 hidden values in a stacked [gate; up] weight [2F, D]: gate and up rows by turns.
DEVICE const u16* gated_row(const u16* weight, int unit, int r) { return weight + i64(unit * 8 + r / 2 + r % 2 * F) * D; }

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)
router(const u16* residual, const u16* branch, const u16* norm, const void* router, const u16* shared_weight, u16* stream,
       float* scales, float* logits, u16* h, int depth, int T, float eps, float limit) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) unsigned long long barriers[2 * MOST_SLOTS];
  Ring<OUTS> ring;
  float* partials = (float*)(shared + depth * ring.SLOT);  // [2][WARPS][PARTIAL]
  float* squares = partials + 2 * WARPS * PARTIAL;         // [WARPS][HALVES * ROWS]
  float* own = squares + WARPS * HALVES * ROWS;            // [HALVES * ROWS] scales
  u16* rows = (u16*)(own + HALVES * ROWS);                 // [T][STRIDE]
  constexpr int BLOCKS = (E + LOGITS - 1) / LOGITS;
  if (blockIdx.x < BLOCKS) {
    if (!asks()) router_block(blockIdx.x, residual, branch, norm, router, stream, scales, logits, T, eps, rows, partials, squares);
    return;
  }
  Tiles<D, OUTS, HALVES> tiles;
  tiles.first = blockIdx.x - BLOCKS, tiles.step = gridDim.x, tiles.count = tiles.first + 1;
  ring.begin(shared, barriers, depth);
  __syncthreads();
  if (asks()) {
    auto row_of = [&](int unit, int r) { return gated_row(shared_weight, unit, r); };
    tiles.ask(ring, row_of);
    return;
  }
  Norm<D, true, true, HALVES * ROWS> entering;
  entering.begin(norm);
  depend();
  entering.enter(rows, STRIDE, squares, residual, D, branch, nullptr, T);
  meet();
  for (int t = threadIdx.x; t < T; t += CONSUMERS) own[t] = rsqrtf(sum_partials<WARPS, HALVES * ROWS>(squares, t) / D + eps);
  auto finish = [&](int unit, const float* sums) { store_hidden(h, sums, unit, T, limit, own); };
  tiles.run<false>(ring, rows, STRIDE, T, partials, finish);
}

// A lane's selection biases, its experts being the PER_LANE from lane * PER_LANE on; the same for every row.
DEVICE void load_bias(float (&bias)[PER_LANE], const float* biases) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) bias[j] = HAS_BIAS && lane * PER_LANE < E ? biases[lane * PER_LANE + j] : 0.f;
}

// A lane's logits of a row; -inf for the rows behind the last and for lanes without experts.
DEVICE void load_logits(float (&logit)[PER_LANE], const float* logits, int t, int T) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) logit[j] = t < T && lane * PER_LANE < E ? fresh(logits + i64(t) * E + lane * PER_LANE + j) : -INF;
}

// One warp chooses the experts of a row: bits of `used` [E / 32], and, where wanted, weights share [E].
DEVICE void choose(const float (&logit)[PER_LANE], const float (&bias)[PER_LANE], u32* used, float* share) {
  const int lane = threadIdx.x & 31;
  const bool real = lane * PER_LANE < E;
  float score[PER_LANE];
  u32 key[PER_LANE];
  float best = -INF, second = -INF;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) score[j] = logit[j];
#if SIGMOID
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) score[j] = sigmoid(score[j]);
#else
  float most = -INF, sum = 0.f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) most = fmaxf(most, score[j]);
#pragma unroll
  for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) sum += score[j] = __expf(score[j] - most);
  sum = warp_sum(sum);
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) score[j] /= sum;
#endif
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const float choice = score[j] + bias[j];
    second = fmaxf(second, fminf(best, choice));
    best = fmaxf(best, choice);
    key[j] = real ? sortable(choice) : 0;
  }
  if (GROUPS > 1) {
#pragma unroll
    for (int step = 1; step < GROUP_LANES; step <<= 1) {
      const float its_best = __shfl_xor_sync(~0u, best, step), its_second = __shfl_xor_sync(~0u, second, step);
      second = fmaxf(fminf(best, its_best), fmaxf(second, its_second));
      best = fmaxf(best, its_best);
    }
    u32 rank = real ? sortable(best + second) : 0;
    bool kept = false;
#pragma unroll
    for (int i = 0; i < TOP_GROUPS; i++) {
      const int lead = __ffs(__ballot_sync(~0u, rank == __reduce_max_sync(~0u, rank))) - 1;
      if (lane / GROUP_LANES == lead / GROUP_LANES) kept = true, rank = 0;
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) key[j] = kept ? key[j] : 0;
  }
  u32 chosen = 0;
#pragma unroll 1
  for (int i = 0; i < TOP_K; i++) {
    u32 mine = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) mine = max(mine, key[j]);
    const u32 top = __reduce_max_sync(~0u, mine);
    if (top == 0) break;
    const bool leads = __ffs(__ballot_sync(~0u, mine == top)) - 1 == lane;
    bool open = leads;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      if (open && key[j] == top) key[j] = 0, chosen |= 1u << j, open = false;
    }
  }
  float total = 0.f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int expert = lane * PER_LANE + j;
    if (chosen >> j & 1) atomicOr(used + expert / 32, 1u << expert % 32), total += score[j];
  }
  if (!share) return;
  total = NORMALISE ? warp_sum(total) + 1e-20f : 1.f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    if (real) share[lane * PER_LANE + j] = chosen >> j & 1 ? score[j] / total * SCALING : 0.f;
  }
}

struct Items {
  u32 used[(E + 31) / 32];
  int count;
  u16 expert[E];
};

// Rows of the window that count: all, or the first that the round found worth verifying.
DEVICE int counted(const i64* rows, int T) { return rows ? min(T, int(*rows)) : T; }

// Before `choose_all`.
DEVICE void clear(Items& items) {
  if (threadIdx.x < (E + 31) / 32) items.used[threadIdx.x] = 0;
}

// All rows' choices, and from them the items. logit: of row `warp`, loaded before; shares [rows][E] or null.
DEVICE void choose_all(Items& items, float* shares, const float* logits, float (&logit)[PER_LANE], const float (&bias)[PER_LANE], int T) {
  for (int t = threadIdx.x >> 5; t < T; t += WARPS) {
    choose(logit, bias, items.used, shares ? shares + t * E : nullptr);
    load_logits(logit, logits, t + WARPS, T);
  }
  meet();
  for (int e = threadIdx.x; e < E; e += CONSUMERS) {
    int before = 0;
#pragma unroll
    for (int word = 0; word < (E + 31) / 32; word++) {
      if (word < e / 32) before += __popc(items.used[word]);
    }
    const u32 word = items.used[e / 32];
    before += __popc(word & ((1u << e % 32) - 1));
    const int is_used = word >> e % 32 & 1;
    if (is_used) items.expert[before] = e;
    if (e == E - 1) items.count = before + is_used;
  }
  meet();
}

constexpr int UNITS = F / 8;  // of 8 hidden values that an expert has

// Blocks make units of 8 hidden values by turns: h [items, T, F].
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)
up(const u16* stream, const u16* norm, const float* scales, const float* logits, const float* biases, const i64* counting,
   const u16* weight, u16* h, int depth, int T, float limit) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) unsigned long long barriers[2 * MOST_SLOTS];
  __shared__ Items items;
  Ring<OUTS> ring;
  float* partials = (float*)(shared + depth * ring.SLOT);  // [2][WARPS][PARTIAL]
  float* squares = partials + 2 * WARPS * PARTIAL;         // of no use here
  float* own = squares + WARPS * HALVES * ROWS;            // [HALVES * ROWS] scales
  u16* rows = (u16*)(own + HALVES * ROWS);                 // [T][STRIDE]
  Tiles<D, OUTS, HALVES> tiles;
  tiles.first = blockIdx.x, tiles.step = gridDim.x;
  ring.begin(shared, barriers, depth);
  clear(items);
  __syncthreads();
  if (asks()) {
    __syncthreads();  // the items are known
    tiles.count = items.count * UNITS;
    auto row_of = [&](int tile, int r) { return gated_row(weight + i64(items.expert[tile / UNITS]) * 2 * F * D, tile % UNITS, r); };
    tiles.ask(ring, row_of);
    return;
  }
  Norm<D, false, true, HALVES * ROWS> entering;
  float bias[PER_LANE], logit[PER_LANE];
  entering.begin(norm);
  load_bias(bias, biases);
  depend();
  const int live = counted(counting, T);
  load_logits(logit, logits, threadIdx.x >> 5, live);
  if (threadIdx.x < T) own[threadIdx.x] = fresh(scales + threadIdx.x);
  entering.enter(rows, STRIDE, squares, stream, D, nullptr, nullptr, T);
  choose_all(items, nullptr, logits, logit, bias, live);
  __syncthreads();
  tiles.count = items.count * UNITS;
  auto finish = [&](int tile, const float* sums) {
    store_hidden(h + i64(tile / UNITS) * T * F, sums, tile % UNITS, T, limit, own);
  };
  tiles.run<false>(ring, rows, STRIDE, T, partials, finish);
}

constexpr int DOWN_PIECES = (F + PIECE - 1) / PIECE;  // of an item
constexpr int AHEAD = DOWN_PIECES * HALVES == 1 ? 5 : DOWN_PIECES * HALVES == 2 ? 3 : 1;  // items whose h is in registers

// DOWN_ROWS outputs over all experts in ascending order, the shared one first. The logits are two kernels old, so they may be
// read before `depend`: every kernel triggers after its own wait.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)
down(const float* logits, const float* biases, const i64* counting, const u16* weight, const u16* h, const u16* shared_weight,
     const u16* shared_h, u16* y, int depth, int T) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) unsigned long long barriers[2 * MOST_SLOTS];
  __shared__ Items items;
  Ring<DOWN_ROWS> ring;
  float* partials = (float*)(shared + depth * ring.SLOT);  // [WARPS][PARTIAL]
  float* shares = partials + WARPS * PARTIAL;              // [HALVES * ROWS][E]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3;
  const int out = blockIdx.x * DOWN_ROWS;
  ring.begin(shared, barriers, depth);
  clear(items);
  __syncthreads();
  if (asks()) {
    auto ask = [&](const u16* expert) {
      const u16* row = lane < DOWN_ROWS && out + lane < D ? expert + i64(out + lane) * F : nullptr;
#pragma unroll 1
      for (int piece = 0; piece < DOWN_PIECES; piece++) ring.ask(row ? row + piece * PIECE : nullptr, piece_columns(F, piece) * 2);
    };
    if (SHARED) ask(shared_weight);
    __syncthreads();  // the items are known
    for (int i = 0; i < items.count; i++) ask(weight + i64(items.expert[i]) * D * F);
    return;
  }
  const int live = counted(counting, T);
  float bias[PER_LANE], logit[PER_LANE];
  load_logits(logit, logits, warp, live);
  load_bias(bias, biases);
  choose_all(items, shares, logits, logit, bias, live);
  __syncthreads();
  const int count = items.count + SHARED;
  depend();

  float acc[HALVES][4] = {};
  uint4 x[AHEAD][DOWN_PIECES][HALVES][EACH];
  const auto load = [&](int i, uint4 (&to)[DOWN_PIECES][HALVES][EACH]) {
    const u16* from = SHARED && i == 0 ? shared_h : h + i64(i - SHARED) * T * F;
#pragma unroll
    for (int piece = 0; piece < DOWN_PIECES; piece++) load_x<true>(to[piece], from, F, i < count ? T : 0, F, piece);
  };
#pragma unroll
  for (int k = 0; k < AHEAD; k++) load(k, x[k]);
#pragma unroll 1
  for (int begin = 0; begin < count; begin += AHEAD) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int i = begin + k;
      if (i < count) {
        float sums[HALVES][2][4] = {};
#pragma unroll
        for (int piece = 0; piece < DOWN_PIECES; piece++) {
          multiply_piece<DOWN_ROWS>(sums, ring.take(), x[k][piece], F, piece);
          ring.release();
        }
        load(i + AHEAD, x[k]);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
#pragma unroll
          for (int n = 0; n < 4; n++) {
            const int t = half * ROWS + 2 * q + (n & 1);
            const float share = SHARED && i == 0 ? 1.f : t < live ? shares[t * E + items.expert[i - SHARED]] : 0.f;
            acc[half][n] = fmaf(share, sums[half][0][n] + sums[half][1][n], acc[half][n]);
          }
        }
      }
    }
  }
  float all[HALVES][2][4] = {};
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
#pragma unroll
    for (int n = 0; n < 4; n++) all[half][0][n] = acc[half][n];
  }
  store_partial(partials + warp * PARTIAL, all);
  meet();
  for (int i = threadIdx.x; i < DOWN_ROWS * T; i += CONSUMERS) {
    const int t = i / DOWN_ROWS, row = i % DOWN_ROWS;
    if (out + row < D) y[i64(t) * D + out + row] = narrow(sum_partials<WARPS, PARTIAL>(partials, t * OUTS + row));
  }
}
