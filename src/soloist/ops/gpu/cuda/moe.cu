// A round's mixture of experts in three kernels: router and shared expert, routed experts up, all experts down.
//
// No sort and no atomics on global memory: every block repeats the choice of experts from the router's logits, which is
// cheaper than a kernel boundary. The distinct experts of all rows, in ascending order, are the items of the second and
// third kernel; each is read once, whatever number of rows chose it. Rows that did not choose an item have weight 0 there.
//
// Defined by the host: D inputs, F hidden values of an expert, E experts, GROUPS, TOP_GROUPS, TOP_K, SIGMOID, HAS_BIAS,
// NORMALISE, SCALING, SHARED (whether an expert of F hidden values takes every row), WIDE_ROUTER (fp32), HALVES of 8 rows;
// STAGE, STAGES and DEPTH of the up product, see Tiles.

constexpr int WARPS = 8;
constexpr int CHUNKS = D / 32;
constexpr int PER_WARP = (CHUNKS + WARPS - 1) / WARPS;
constexpr int STRIDE = D + 32;
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
                         float* scales, float* logits, int T, float eps, float* partials, float* squares) {
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
  depend();
  for (int t = 0; t < T; t++) {
    float sums[LOGITS] = {}, square = 0.f;
#pragma unroll
    for (int j = 0; j < PER_WARP; j++) {
      const int column = first + j * 32 + lane;
      if (column >= D) continue;
      const i64 at = i64(t) * D + column;
      const u16 stored = narrow(wide(fresh(residual + at)) + wide(fresh(branch + at)));
      if (block == 0) stream[at] = stored;
      const float s = wide(stored), x = s * weight[j];
      square = fmaf(s, s, square);
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
    square = warp_sum(square);
    if ((lane & 3) == 0) partials[(warp * HALVES * ROWS + t) * LOGITS + lane / 4] = sums[0];
    if (lane == 0) squares[warp * HALVES * ROWS + t] = square;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < T * LOGITS; i += WARPS * 32) {
    const int t = i / LOGITS, e = i % LOGITS, expert = block * LOGITS + e;
    const float scale = rsqrtf(sum_partials<WARPS, HALVES * ROWS>(squares, t) / D + eps);
    if (expert < E) logits[i64(t) * E + expert] = sum_partials<WARPS, HALVES * ROWS * LOGITS>(partials, i) * scale;
    if (block == 0 && e == 0) scales[t] = scale;
  }
}

// 8 hidden values of one gated expert for every row, from its partial sums.
DEVICE void store_hidden(u16* h, const float* partials, int unit, int T, float limit, const float* scales) {
  for (int i = threadIdx.x; i < 8 * T; i += WARPS * 32) {
    const int t = i / 8, j = i % 8;
    const float scale = scales[t];
    const float gate = sum_partials<WARPS, PARTIAL>(partials, t * OUTS + 2 * j) * scale;
    const float up = sum_partials<WARPS, PARTIAL>(partials, t * OUTS + 2 * j + 1) * scale;
    h[i64(t) * F + unit * 8 + j] = narrow(swiglu(gate, up, limit));
  }
}

// Rows of a stacked [gate; up] weight [2F, D] for lane group g: one gate and one up row by turns.
DEVICE void gated_rows(const u16* weight, int unit, const u16*& row0, const u16*& row1) {
  const int g = (threadIdx.x & 31) >> 2;
  row0 = weight + i64(unit * 8 + g / 2 + (g & 1) * F) * D;
  row1 = row0 + i64(4) * D;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
router(const u16* residual, const u16* branch, const u16* norm, const void* router, const u16* shared_weight, u16* stream,
       float* scales, float* logits, u16* h, int T, float eps, float limit) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* partials = (float*)shared;             // [WARPS][PARTIAL]
  float* squares = partials + WARPS * PARTIAL;  // [WARPS][HALVES * ROWS]
  float* own = squares + WARPS * HALVES * ROWS;  // [HALVES * ROWS] scales
  u16* rows = (u16*)(own + HALVES * ROWS);
  constexpr int BLOCKS = (E + LOGITS - 1) / LOGITS;
  if (blockIdx.x < BLOCKS) {
    router_block(blockIdx.x, residual, branch, norm, router, stream, scales, logits, T, eps, partials, squares);
    return;
  }
  const int unit = blockIdx.x - BLOCKS, warp = threadIdx.x >> 5, first = warp * PER_WARP;
  const u16 *row0, *row1;
  gated_rows(shared_weight, unit, row0, row1);
  uint4 w[PER_WARP][2];
  load_chunks(w, row0, row1, first, CHUNKS);
  depend();
  enter_norm<PER_WARP * 32, true>(rows, rows + T * STRIDE, STRIDE, squares + warp * HALVES * ROWS, residual, D, branch, norm, nullptr, T, first * 32, D);
  float acc[HALVES][2][4] = {};
  multiply_chunks<false>(acc, w, rows, STRIDE, T, first, CHUNKS);
  store_partial(partials + warp * PARTIAL, acc);
  __syncthreads();
  for (int t = threadIdx.x; t < T; t += WARPS * 32) own[t] = rsqrtf(sum_partials<WARPS, HALVES * ROWS>(squares, t) / D + eps);
  __syncthreads();
  store_hidden(h, partials, unit, T, limit, own);
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

// All rows' choices, and from them the items. logit: of row `warp`, loaded before; shares [rows][E] or null.
DEVICE void choose_all(Items& items, float* shares, const float* logits, float (&logit)[PER_LANE], const float (&bias)[PER_LANE], int T) {
  if (threadIdx.x < (E + 31) / 32) items.used[threadIdx.x] = 0;
  __syncthreads();
  for (int t = threadIdx.x >> 5; t < T; t += WARPS) {
    choose(logit, bias, items.used, shares ? shares + t * E : nullptr);
    load_logits(logit, logits, t + WARPS, T);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += WARPS * 32) {
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
  __syncthreads();
}

constexpr int UNITS = F / 8;  // of 8 hidden values that an expert has

// Blocks make units of 8 hidden values by turns: h [items, T, F].
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
up(const u16* stream, const u16* norm, const float* scales, const float* logits, const float* biases, const i64* counting,
   const u16* weight, u16* h, int T, float limit) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* partials = (float*)shared;  // [2][WARPS][PARTIAL]
  float* squares = partials + 2 * WARPS * PARTIAL;  // of no use here
  float* own = squares + WARPS * HALVES * ROWS;     // [HALVES * ROWS] scales
  u16* rows = (u16*)(own + HALVES * ROWS);
  __shared__ Items items;
  const int warp = threadIdx.x >> 5, first = warp * STAGE * STAGES * 32;
  float bias[PER_LANE], logit[PER_LANE];
  load_bias(bias, biases);
  depend();
  load_logits(logit, logits, warp, counted(counting, T));
  if (threadIdx.x < T) own[threadIdx.x] = fresh(scales + threadIdx.x);
  enter_norm<STAGE * STAGES * 32, false>(rows, nullptr, STRIDE, squares + warp * HALVES * ROWS, stream, D, nullptr, norm, nullptr, T, first, D);
  choose_all(items, nullptr, logits, logit, bias, counted(counting, T));
  auto rows_of = [&](int tile, const u16*& row0, const u16*& row1) {
    gated_rows(weight + i64(items.expert[tile / UNITS]) * 2 * F * D, tile % UNITS, row0, row1);
  };
  auto finish = [&](int tile, const float* sums) {
    store_hidden(h + i64(tile / UNITS) * T * F, sums, tile % UNITS, T, limit, own);
  };
  Tiles<WARPS, CHUNKS, STAGE, STAGES, DEPTH, HALVES> tiles;
  tiles.first = blockIdx.x, tiles.step = gridDim.x, tiles.count = items.count * UNITS;
  tiles.begin(rows_of);
  tiles.run<false>(rows, STRIDE, T, partials, rows_of, finish);
}

constexpr int DOWN_CHUNKS = F / 32;
constexpr int DOWN_PER_WARP = (DOWN_CHUNKS + WARPS - 1) / WARPS;
constexpr int SLOT = WARPS * DOWN_PER_WARP * 2 * 32 * 16;  // bytes of one item's weights in the ring
constexpr int SLOTS = SLOT * 10 <= 163840 ? 10 : 163840 / SLOT;  // one row's items, the shared one too, and one more
constexpr int AHEAD = DOWN_PER_WARP * HALVES <= 2 ? 9 : DOWN_PER_WARP * HALVES <= 4 ? 4 : 2;  // items whose h is in registers

// A lane copies the weights that it will multiply, so nobody has to wait for another.
DEVICE void fetch_item(unsigned char* slot, const u16* weight) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const u16* row0 = weight + i64(blockIdx.x * OUTS + g) * F;
#pragma unroll
  for (int j = 0; j < DOWN_PER_WARP; j++) {
    const int chunk = warp * DOWN_PER_WARP + j;
    if (chunk < DOWN_CHUNKS) {
      unsigned char* to = slot + ((chunk * 2) * 32 + lane) * 16;
      copy16(to, row0 + chunk * 32 + q * 8);
      copy16(to + 32 * 16, row0 + i64(8) * F + chunk * 32 + q * 8);
    }
  }
}

// 16 outputs over all experts in ascending order, the shared one first. The logits are two kernels old, so they may be read
// before `depend`: every kernel triggers after its own wait.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
down(const float* logits, const float* biases, const i64* counting, const u16* weight, const u16* h, const u16* shared_weight,
     const u16* shared_h, u16* y, int T) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* partials = (float*)(shared + SLOTS * SLOT);
  float* shares = partials + WARPS * PARTIAL;  // [HALVES * ROWS][E]
  __shared__ Items items;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  if (SHARED) fetch_item(shared, shared_weight);
  commit();
  const int live = counted(counting, T);
  float bias[PER_LANE], logit[PER_LANE];
  load_logits(logit, logits, warp, live);
  load_bias(bias, biases);
  choose_all(items, shares, logits, logit, bias, live);
  const int count = items.count + SHARED;
  auto fetch = [&](int i) {
    if (i < count) fetch_item(shared + i % SLOTS * SLOT, weight + i64(items.expert[i - SHARED]) * D * F);
    commit();
  };
  if (!SHARED) fetch(0);
#pragma unroll 1
  for (int i = 1; i < SLOTS; i++) fetch(i);
  depend();

  float acc[HALVES][4] = {};
#pragma unroll 1
  for (int begin = 0; begin < count; begin += AHEAD) {
    uint4 x[AHEAD][HALVES][DOWN_PER_WARP];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int i = begin + k;
      const u16* from = SHARED && i == 0 ? shared_h : h + i64(i - SHARED) * T * F;
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
#pragma unroll
        for (int j = 0; j < DOWN_PER_WARP; j++) {
          const int t = half * ROWS + g, chunk = warp * DOWN_PER_WARP + j;
          const bool inside = i < count && t < T && chunk < DOWN_CHUNKS;
          x[k][half][j] = inside ? fresh16(from + i64(t) * F + chunk * 32 + q * 8) : make_uint4(0, 0, 0, 0);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int i = begin + k;
      if (i < count) {
        copied<SLOTS - 1>();
        const unsigned char* slot = shared + i % SLOTS * SLOT;
        float own[HALVES][2][4] = {};
#pragma unroll
        for (int j = 0; j < DOWN_PER_WARP; j++) {
          const int chunk = warp * DOWN_PER_WARP + j;
          if (chunk < DOWN_CHUNKS) {
            const uint4* at = (const uint4*)slot + (chunk * 2) * 32 + lane;
            const uint4 w0 = at[0], w1 = at[32];
#pragma unroll
            for (int half = 0; half < HALVES; half++) multiply(own[half], w0, w1, x[k][half][j]);
          }
        }
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
#pragma unroll
          for (int n = 0; n < 4; n++) {
            const int t = half * ROWS + 2 * q + (n & 1);
            const float share = SHARED && i == 0 ? 1.f : t < live ? shares[t * E + items.expert[i - SHARED]] : 0.f;
            acc[half][n] = fmaf(share, own[half][0][n] + own[half][1][n], acc[half][n]);
          }
        }
        fetch(i + SLOTS);
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
  __syncthreads();
  for (int i = threadIdx.x; i < OUTS * T; i += WARPS * 32) {
    const int t = i / OUTS, out = i % OUTS;
    y[i64(t) * D + blockIdx.x * OUTS + out] = narrow(sum_partials<WARPS, PARTIAL>(partials, i));
  }
}
