// A skinny product with what stands before and after it. See common.cuh.
//
// Defined by the host: K inputs, WARPS, STAGE chunks in STAGES pieces, DEPTH pieces on their way, HALVES of 8 window rows,
// PROLOGUE, DIRECT (x stays in global memory), BRANCH, BIAS, PAIRS, WIDE_OUT, HEAD channels (a power of two) of a gated head.

#define PLAIN 0
#define NORM 1   // x is the residual stream
#define GATED 2  // x is a head-wise output in fp32, gate its gate

constexpr int CHUNKS = K / 32;
constexpr int COLUMNS = STAGE * STAGES * 32;  // of a warp
constexpr int STRIDE = K + 32;  // of x in shared memory, in bf16: 64 bytes on, so that two rows share no bank
constexpr int PARTIAL = HALVES * ROWS * OUTS;

DEVICE void enter_plain(u16* x, const u16* from, i64 stride, int T, int first) {
  const int lane = threadIdx.x & 31;
  for (int t = 0; t < T; t++) {
#pragma unroll
    for (int v = 0; v < COLUMNS; v += 32 * 8) {
      const int column = first + v + lane * 8;
      if (v + lane * 8 < COLUMNS && column < K) copy16(x + t * STRIDE + column, from + t * stride + column);
    }
  }
  commit();
  copied<0>();
  __syncwarp();
}

// Rows are staged four at a time: o [4][K] fp32 and gate [4][K].
DEVICE void enter_gated(u16* x, float* os, u16* gates, const float* o, const u16* gate, i64 gate_stride, const u16* norm, float eps,
                        int T, int first) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int v = 0; v < COLUMNS; v += 32 * 8) {
    const int column = first + v + lane * 8;
    const bool inside = v + lane * 8 < COLUMNS;
    const uint4 n = inside ? *(const uint4*)(norm + column % HEAD) : make_uint4(0, 0, 0, 0);
    const u32 ns[4] = {n.x, n.y, n.z, n.w};
    for (int begin = 0; begin < T; begin += 4) {
      const int end = min(T - begin, 4);
      for (int t = 0; inside && t < end; t++) {
        copy16(os + t * K + column, o + i64(begin + t) * K + column);
        copy16(os + t * K + column + 4, o + i64(begin + t) * K + column + 4);
        copy16(gates + t * K + column, gate + (begin + t) * gate_stride + column);
      }
      commit();
      copied<0>();
      for (int t = 0; t < end; t++) {
        alignas(16) float value[8] = {};
        uint4 z = make_uint4(0, 0, 0, 0);
        if (inside) {
          *(float4*)value = *(const float4*)(os + t * K + column);
          *(float4*)(value + 4) = *(const float4*)(os + t * K + column + 4);
          z = *(const uint4*)(gates + t * K + column);
        }
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(value[i], value[i], sum);
#pragma unroll
        for (int step = HEAD / 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        const float scale = rsqrtf(sum / HEAD + eps);
        const u32 zs[4] = {z.x, z.y, z.z, z.w};
        u32 out[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          out[i] = pack(value[2 * i] * scale * low(ns[i]) * sigmoid(low(zs[i])),
                        value[2 * i + 1] * scale * high(ns[i]) * sigmoid(high(zs[i])));
        }
        if (inside) *(uint4*)(x + (begin + t) * STRIDE + column) = make_uint4(out[0], out[1], out[2], out[3]);
      }
    }
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 512 / (WARPS * 32))
linear(const void* x, const u16* branch, const u16* norm, const u16* gate, const u16* weight, const u16* bias, void* y,
       u16* stream, int T, int N, i64 x_stride, i64 gate_stride, i64 y_stride, float eps,
       float limit) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* partials = (float*)shared;                 // [2][WARPS][PARTIAL]
  float* squares = partials + 2 * WARPS * PARTIAL;  // [WARPS][HALVES * ROWS]
  u16* rows = (u16*)(squares + WARPS * HALVES * ROWS);  // [T][STRIDE], and behind it what the prologue stages
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, first = warp * COLUMNS;
  constexpr int UNITS = PAIRS ? OUTS / 2 : OUTS;
  const int width = PAIRS ? N / 2 : N;

  auto rows_of = [&](int tile, const u16*& row0, const u16*& row1) {
    int one = tile * OUTS + g, other = one + 8;
    bool has_one = one < N, has_other = other < N;
    if (PAIRS) {  // gate and up rows by turns
      const int unit = tile * UNITS + g / 2;
      one = unit + (g & 1) * width, other = one + 4;
      has_one = unit < width, has_other = unit + 4 < width;
    }
    row0 = has_one ? weight + i64(one) * K : nullptr;
    row1 = has_other ? weight + i64(other) * K : nullptr;
  };
  auto finish = [&](int tile, const float* sums) {
    for (int i = threadIdx.x; i < UNITS * T; i += WARPS * 32) {
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
  Tiles<WARPS, CHUNKS, STAGE, STAGES, DEPTH, HALVES> tiles;
  tiles.first = blockIdx.x, tiles.step = gridDim.x, tiles.count = (width + UNITS - 1) / UNITS;
  tiles.begin(rows_of);
  depend();
  if (DIRECT) {
    tiles.run<true>((const u16*)x, x_stride, T, partials, rows_of, finish);
    return;
  }
  if (PROLOGUE == PLAIN) {
    enter_plain(rows, (const u16*)x, x_stride, T, first);
  } else if (PROLOGUE == NORM) {
    enter_norm<COLUMNS, BRANCH>(rows, rows + T * STRIDE, STRIDE, squares + warp * HALVES * ROWS, (const u16*)x, x_stride, branch, norm,
                                blockIdx.x ? nullptr : stream, T, first, K);
  } else {
    float* os = (float*)(rows + T * STRIDE);
    enter_gated(rows, os, (u16*)(os + min(T, 4) * K), (const float*)x, gate, gate_stride, norm, eps, T, first);
  }
  tiles.run<false>(rows, STRIDE, T, partials, rows_of, finish);
}
