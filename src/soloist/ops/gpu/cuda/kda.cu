#include "common.cuh"

// KDA of a round between its projections, in one kernel: short conv, norms of q and k, gates, delta rule, a state a row.
//
// A block owns 16 value channels of one head. Every block of a head repeats the convolution of q and k, which is cheaper
// than a kernel boundary. What does not depend on the state is made first, by pairs of warps, a row each. In the recurrence
// a warp goes alone with 8 values: four lanes hold two each of a key, so that together they write a whole sector of 32 bytes
// of every key, and lane group j holds the keys 32 i + 4 j + c. The state and the conv inputs of earlier rounds are loaded
// before `depend`.
//
// Defined by the host: H heads of 128 channels.

constexpr int DIM = 128;
constexpr int VALUES = 16;
constexpr int A = H * DIM;
constexpr int C = 3 * A;
constexpr int PAIRS = 4;     // of warps; a pair takes every fourth row
constexpr int THREADS = PAIRS * 64;
constexpr int OWN = 8;       // values of a warp in the recurrence
constexpr int GROUPS = 8;    // of its lanes
constexpr int PIECES = DIM / GROUPS / 4;  // of 4 keys, that a lane holds
constexpr int PAST = 3;      // inputs before the window that the convolution sees
constexpr int MOST_ROWS = 16;
constexpr int RAW = 3 * DIM + VALUES;  // bf16 inputs of a row: q, k, f of the head, v of the block

struct Row {
  float qk[2][DIM], decay[DIM], v[VALUES], out[GROUPS][VALUES];
};

// SiLU of the taps' sum, rounded as a stored tensor would be.
DEVICE float convolve(float4 weight, float oldest, float older, float old, float now) {
  const float y = oldest * weight.x + older * weight.y + old * weight.z + now * weight.w;
  return rounded(y * sigmoid(y));
}

// Four channels of a row, whose inputs lie behind those of the three rows before it.
DEVICE float4 convolve4(const float4 (&weights)[4], const u16* in) {
  const uint2 oldest = *(const uint2*)(in - 3 * RAW), older = *(const uint2*)(in - 2 * RAW), old = *(const uint2*)(in - RAW);
  const uint2 now = *(const uint2*)in;
  return make_float4(convolve(weights[0], low(oldest.x), low(older.x), low(old.x), low(now.x)),
                     convolve(weights[1], high(oldest.x), high(older.x), high(old.x), high(now.x)),
                     convolve(weights[2], low(oldest.y), low(older.y), low(old.y), low(now.y)),
                     convolve(weights[3], high(oldest.y), high(older.y), high(old.y), high(now.y)));
}

// The lane's two values of its 16 keys.
struct State {
  float2 at[PIECES][4];

  DEVICE void load(const float* cell) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float* from = cell + (i * GROUPS * 4 + c) * DIM;
        asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(at[i][c].x), "=f"(at[i][c].y) : "l"(from));
      }
    }
  }

  // One row: the state after it goes to `cell`, the lane's part of what the query reads is returned.
  DEVICE float2 step(const Row& row, float2 value, float beta, float* cell) {
    const int first = (threadIdx.x & 31) / 4 * 4;
    float key[PIECES][4], query[PIECES][4], decay[PIECES][4];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      *(float4*)decay[i] = *(const float4*)(row.decay + i * GROUPS * 4 + first);
      *(float4*)key[i] = *(const float4*)(row.qk[1] + i * GROUPS * 4 + first);
      *(float4*)query[i] = *(const float4*)(row.qk[0] + i * GROUPS * 4 + first);
    }
    float2 seen = make_float2(0.f, 0.f), out = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        at[i][c].x *= decay[i][c], at[i][c].y *= decay[i][c];
        seen.x = fmaf(at[i][c].x, key[i][c], seen.x), seen.y = fmaf(at[i][c].y, key[i][c], seen.y);
      }
    }
#pragma unroll
    for (int step = 16; step >= 4; step >>= 1) {
      seen.x += __shfl_xor_sync(~0u, seen.x, step), seen.y += __shfl_xor_sync(~0u, seen.y, step);
    }
    const float2 error = make_float2((value.x - seen.x) * beta, (value.y - seen.y) * beta);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        at[i][c].x = fmaf(error.x, key[i][c], at[i][c].x), at[i][c].y = fmaf(error.y, key[i][c], at[i][c].y);
        out.x = fmaf(at[i][c].x, query[i][c], out.x), out.y = fmaf(at[i][c].y, query[i][c], out.y);
        *(float2*)(cell + (i * GROUPS * 4 + c) * DIM) = at[i][c];
      }
    }
    return out;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
kda(const u16* x, const float* conv, const float* rates, const float* biases, u16* history, float* states, const i64* start_at,
    const i64* live_at, const i64* counting, float* o, int T, int R, int slots, i64 x_stride, float lower_bound, float q_scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  Row* rows = (Row*)shared;                // [T]
  u16* raw = (u16*)(rows + T);             // [PAST + T][RAW]
  __shared__ float betas[MOST_ROWS];
  const int head = blockIdx.x, block = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int first = head * DIM, v_first = first + block * VALUES;
  const int start = int(*start_at), live = int(*live_at);

  const int pair = (lane & 3) * 2, own = warp * OWN + pair;
  const int cell = lane / 4 * 4 * DIM + block * VALUES + own;
  State state;
  if (warp < VALUES / OWN) state.load(states + i64(live * H + head) * DIM * DIM + cell);
  for (int i = tid; i < PAST * (RAW / 8); i += THREADS) {
    const int row = i / (RAW / 8), at = i % (RAW / 8) * 8;
    const u16* past = history + i64((start - PAST + row + R) % R) * C;
    if (at < 2 * DIM) copy16(raw + row * RAW + at, past + at / DIM * A + first + at % DIM);
    if (at >= 3 * DIM) copy16(raw + row * RAW + at, past + 2 * A + v_first + at % DIM);
  }

  // Of a pair, one warp takes q and the other k, four channels a lane, and each half of the decays and values.
  const int side = warp & 1, four = lane * 4, two = side * (DIM / 2) + lane * 2, v = side * (VALUES / 2) + lane;
  const bool has_value = lane < VALUES / 2;
  float4 weights[4], v_weight = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < 4; i++) weights[i] = *(const float4*)(conv + i64(side * A + first + four + i) * 4);
  if (has_value) v_weight = *(const float4*)(conv + i64(2 * A + v_first + v) * 4);
  const float rate = rates[head];
  const float2 bias = *(const float2*)(biases + first + two);
  const int place = start % R;
  if (counting) T = min(T, int(*counting));  // the others' rows mean nothing
  depend();

  for (int i = tid; i < T * (RAW / 8); i += THREADS) {
    const int t = i / (RAW / 8), at = i % (RAW / 8) * 8;
    const int from = at < 2 * DIM ? at / DIM * A + first + at % DIM : at < 3 * DIM ? 3 * A + first + at % DIM : 2 * A + v_first + at % DIM;
    copy16(raw + (PAST + t) * RAW + at, x + t * x_stride + from);
  }
  commit();
  if (tid < T) betas[tid] = sigmoid(wide(fresh(x + tid * x_stride + 5 * A + head)));
  copied<0>();
  __syncthreads();
  for (int t = warp / 2; t < T; t += PAIRS) {
    const u16* in = raw + (PAST + t) * RAW;
    u16* past = history + i64((place + t) % R) * C;
    Row& row = rows[t];
    float4 y = convolve4(weights, in + side * DIM + four);
    const float squares = warp_sum(y.x * y.x + y.y * y.y + y.z * y.z + y.w * y.w);
    const u32 f = *(const u32*)(in + 2 * DIM + two);
    *(float2*)(row.decay + two) = make_float2(__expf(lower_bound * sigmoid((low(f) + bias.x) * rate)),
                                              __expf(lower_bound * sigmoid((high(f) + bias.y) * rate)));
    if (has_value) {
      const u16* value = in + 3 * DIM + v;
      row.v[v] = convolve(v_weight, wide(value[-3 * RAW]), wide(value[-2 * RAW]), wide(value[-RAW]), wide(*value));
      past[2 * A + v_first + v] = *value;
    }
    if (block == 0) *(uint2*)(past + side * A + first + four) = *(const uint2*)(in + side * DIM + four);
    const float norm = rsqrtf(squares + 1e-6f) * (side ? 1.f : q_scale);
    *(float4*)(row.qk[side] + four) = make_float4(y.x * norm, y.y * norm, y.z * norm, y.w * norm);
  }
  __syncthreads();
  if (warp < VALUES / OWN) {
    for (int t = 0, slot = live; t < T; t++) {
      if (++slot == slots) slot = 0;
      Row& row = rows[t];
      const float2 value = *(const float2*)(row.v + own);
      *(float2*)(row.out[lane / 4] + own) = state.step(row, value, betas[t], states + i64(slot * H + head) * DIM * DIM + cell);
    }
  }
  __syncthreads();
  for (int i = tid; i < T * VALUES; i += THREADS) {
    const int t = i / VALUES, value = i % VALUES;
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) sum += rows[t].out[j][value];
    o[(i64(t) * H + head) * DIM + block * VALUES + value] = sum;
  }
}
