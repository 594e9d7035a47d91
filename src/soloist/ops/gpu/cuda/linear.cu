#include "common.cuh"
#include "ring.cuh"

// A skinny product with what stands before and after it. See ring.cuh.
//
// Defined by the host: K inputs, TILE_ROWS weight rows of a tile, HALVES of 8 window rows, PROLOGUE, DIRECT (x stays in global
// memory), BRANCH, BIAS, PAIRS, WIDE_OUT, HEAD channels (a power of two) of a gated head.

#define PLAIN 0
#define NORM 1   // x is the residual stream
#define GATED 2  // x is a head-wise output in fp32, gate its gate

constexpr int STRIDE = K + 32;  // of x in shared memory, in bf16: 64 bytes on, so that two rows share no bank
constexpr int PARTIAL = HALVES * ROWS * OUTS;
constexpr int VECTORS = (K / 8 + CONSUMERS - 1) / CONSUMERS;

DEVICE void enter_plain(u16* rows, const u16* from, i64 stride, int T) {
  for (int t = 0; t < T; t++) {
    for (int column = threadIdx.x * 8; column < K; column += CONSUMERS * 8) copy16(rows + t * STRIDE + column, from + t * stride + column);
  }
  commit();
  copied<0>();
}

// Eight channels of a head and their gate; HEAD / 8 lanes side by side have a head.
struct Gated {
  uint4 o[2], gate;

  DEVICE void load(const float* from, const u16* gates, bool inside) {
    const uint4 none = make_uint4(0, 0, 0, 0);
    o[0] = inside ? fresh16(from) : none, o[1] = inside ? fresh16(from + 4) : none, gate = inside ? fresh16(gates) : none;
  }

  DEVICE uint4 value(uint4 norm, float eps) const {
    const u32 os[8] = {o[0].x, o[0].y, o[0].z, o[0].w, o[1].x, o[1].y, o[1].z, o[1].w};
    const u32 gates[4] = {gate.x, gate.y, gate.z, gate.w}, norms[4] = {norm.x, norm.y, norm.z, norm.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(__uint_as_float(os[i]), __uint_as_float(os[i]), sum);
#pragma unroll
    for (int step = HEAD / 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    const float scale = rsqrtf(sum / HEAD + eps);
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[i] = pack(__uint_as_float(os[2 * i]) * scale * low(norms[i]) * sigmoid(low(gates[i])),
                    __uint_as_float(os[2 * i + 1]) * scale * high(norms[i]) * sigmoid(high(gates[i])));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};

// The norm's weight [HEAD] for a thread's channels, which are the same of every head.
DEVICE uint4 head_weight(const u16* norm) { return *(const uint4*)(norm + threadIdx.x * 8 % HEAD); }

DEVICE void enter_gated(u16* rows, const float* o, const u16* gate, i64 gate_stride, uint4 weight, float eps, int T) {
  constexpr int TOGETHER = 4;  // rows whose loads are on their way at once
#pragma unroll 1
  for (int v = 0; v < VECTORS; v++) {
    const int column = (v * CONSUMERS + threadIdx.x) * 8;
    const bool inside = column < K;
#pragma unroll 1
    for (int begin = 0; begin < T; begin += TOGETHER) {
      Gated part[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const i64 t = begin + i;
        part[i].load(o + t * K + column, gate + t * gate_stride + column, inside && t < T);
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const uint4 value = part[i].value(weight, eps);
        if (inside && begin + i < T) *(uint4*)(rows + (begin + i) * STRIDE + column) = value;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)
linear(const void* x, const u16* branch, const u16* norm, const u16* gate, const u16* weight, const u16* bias, void* y,
       u16* stream, int depth, int T, int N, i64 x_stride, i64 gate_stride, i64 y_stride, float eps, float limit) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ __align__(8) unsigned long long barriers[2 * MOST_SLOTS];
  Ring<TILE_ROWS> ring;
  float* partials = (float*)(shared + depth * ring.SLOT);  // [2][WARPS][PARTIAL]
  float* squares = partials + 2 * WARPS * PARTIAL;         // [WARPS][HALVES * ROWS]
  u16* rows = (u16*)(squares + WARPS * HALVES * ROWS);     // [T][STRIDE]
  constexpr int UNITS = PAIRS ? TILE_ROWS / 2 : TILE_ROWS;
  const int width = PAIRS ? N / 2 : N;

  Tiles<K, TILE_ROWS, HALVES> tiles;
  tiles.first = blockIdx.x, tiles.step = gridDim.x, tiles.count = (width + UNITS - 1) / UNITS;
  ring.begin(shared, barriers, depth);
  __syncthreads();
  if (asks()) {
    auto row_of = [&](int tile, int r) -> const u16* {
      const int unit = tile * UNITS + (PAIRS ? r / 2 : r);  // of a pair, gate and up rows by turns
      return unit < width ? weight + i64(unit + (PAIRS ? r % 2 * width : 0)) * K : nullptr;
    };
    tiles.ask(ring, row_of);
    return;
  }
  auto finish = [&](int tile, const float* sums) {
    for (int i = threadIdx.x; i < UNITS * T; i += CONSUMERS) {
      const int t = i / UNITS, unit = i % UNITS, out = tile * UNITS + unit;
      if (out >= width) continue;
      const float scale = PROLOGUE == NORM ? rsqrtf(sum_partials<WARPS, HALVES * ROWS>(squares, t) / K + eps) : 1.f;
      float value;
      if (PAIRS) {
        const float up = sum_partials<WARPS, PARTIAL>(sums, t * OUTS + 2 * unit + 1) * scale;
        value = swiglu(sum_partials<WARPS, PARTIAL>(sums, t * OUTS + 2 * unit) * scale, up, limit);
      } else {
        value = sum_partials<WARPS, PARTIAL>(sums, t * OUTS + unit) * scale;
        if (BIAS) value += wide(bias[out]);
      }
      if (WIDE_OUT) ((float*)y)[t * y_stride + out] = value;
      else ((u16*)y)[t * y_stride + out] = narrow(value);
    }
  };
  if (DIRECT) {
    depend();
    tiles.run<true>(ring, (const u16*)x, x_stride, T, partials, finish);
    return;
  }
  if (PROLOGUE == NORM) {
    Norm<K, BRANCH, true, HALVES * ROWS> entering;
    entering.begin(norm);
    depend();
    entering.enter(rows, STRIDE, squares, (const u16*)x, x_stride, branch, blockIdx.x ? nullptr : stream, T);
  } else if (PROLOGUE == GATED) {
    const uint4 weight = head_weight(norm);
    depend();
    enter_gated(rows, (const float*)x, gate, gate_stride, weight, eps, T);
  } else {
    depend();
    enter_plain(rows, (const u16*)x, x_stride, T);
  }
  meet();
  tiles.run<false>(ring, rows, STRIDE, T, partials, finish);
}
