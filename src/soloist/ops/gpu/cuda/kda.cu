// KDA of a round between its projections, in one kernel: short conv, norms of q and k, gates, delta rule, a state a row.
//
// A block owns 16 value channels of one head, a warp 4 of them: lane l holds keys l, l + 32, l + 64, l + 96 of their state.
// Every block of a head repeats the convolution of q and k, which is cheaper than a kernel boundary. The state and the conv
// inputs of earlier rounds are loaded before `depend`.
//
// Defined by the host: H heads of 128 channels.

constexpr int DIM = 128;
constexpr int VALUES = 16;
constexpr int A = H * DIM;
constexpr int C = 3 * A;
constexpr int KEYS = DIM / 32;

struct Taps {
  float4 weight;
  float oldest, older, old;

  // The last three inputs of a channel before the window; positions before the sequence hold zeros.
  DEVICE void load(const u16* history, const float* weights, int channel, int start, int R) {
    weight = *(const float4*)(weights + channel * 4);
    oldest = wide(fresh(history + i64((start - 3 + R) % R) * C + channel));
    older = wide(fresh(history + i64((start - 2 + R) % R) * C + channel));
    old = wide(fresh(history + i64((start - 1 + R) % R) * C + channel));
  }

  // SiLU of the taps' sum, rounded as a stored tensor would be.
  DEVICE float convolve(float now) {
    const float y = oldest * weight.x + older * weight.y + old * weight.z + now * weight.w;
    oldest = older, older = old, old = now;
    return rounded(y * sigmoid(y));
  }
};

// a += b c
DEVICE void add(float4& a, float4 b, float c) {
  a.x = fmaf(b.x, c, a.x), a.y = fmaf(b.y, c, a.y), a.z = fmaf(b.z, c, a.z), a.w = fmaf(b.w, c, a.w);
}

DEVICE float4 sum_lanes(float4 v) { return make_float4(warp_sum(v.x), warp_sum(v.y), warp_sum(v.z), warp_sum(v.w)); }

constexpr int MOST_ROWS = 16;
constexpr int RAW = 3 * DIM + VALUES;  // bf16 inputs of a row: q, k, f of the head, v of the block

struct Row {
  float q[DIM], k[DIM], decay[DIM], v[VALUES], q_squares[DIM / 32], k_squares[DIM / 32];
};

extern "C" __global__ void __launch_bounds__(DIM)
kda(const u16* x, const float* conv, const float* rates, const float* biases, u16* history, float* states, const i64* start_at,
    const i64* live_at, const i64* counting, float* o, int T, int R, int slots, i64 x_stride, float lower_bound, float q_scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  Row* rows = (Row*)shared;            // [T]
  u16* raw = (u16*)(rows + T);         // [T][RAW]
  __shared__ float betas[MOST_ROWS];
  const int head = blockIdx.x, block = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int channel = head * DIM + tid, v_first = head * DIM + block * VALUES;
  const int start = int(*start_at), live = int(*live_at);
  const bool has_value = tid < VALUES;

  float4 state[KEYS];
  const int cell = lane * DIM + block * VALUES + warp * 4;
#pragma unroll
  for (int i = 0; i < KEYS; i++) *(uint4*)&state[i] = fresh16(states + i64(live * H + head) * DIM * DIM + cell + i * 32 * DIM);
  Taps q_taps, k_taps, v_taps;
  q_taps.load(history, conv, channel, start, R);
  k_taps.load(history, conv, A + channel, start, R);
  if (has_value) v_taps.load(history, conv, 2 * A + v_first + tid, start, R);
  const float rate = rates[head], bias = biases[channel];
  const int place = start % R;
  if (counting) T = min(T, int(*counting));  // the others' rows mean nothing
  depend();

  // All rows' inputs at once, then all that does not depend on the state, then the recurrence, in which warps go alone.
  for (int i = tid; i < T * (RAW / 8); i += DIM) {
    const int t = i / (RAW / 8), at = i % (RAW / 8) * 8;
    const int from = at < 2 * DIM ? at / DIM * A + head * DIM + at % DIM : at < 3 * DIM ? 3 * A + head * DIM + at % DIM : 2 * A + v_first + at % DIM;
    copy16(raw + t * RAW + at, x + t * x_stride + from);
  }
  commit();
  if (tid < T) betas[tid] = sigmoid(wide(fresh(x + tid * x_stride + 5 * A + head)));
  copied<0>();
  __syncthreads();
  for (int t = 0, at = place; t < T; t++, at = at + 1 == R ? 0 : at + 1) {
    const u16* in = raw + t * RAW;
    u16* past = history + i64(at) * C;
    if (block == 0) past[channel] = in[tid], past[A + channel] = in[DIM + tid];
    if (has_value) past[2 * A + v_first + tid] = in[3 * DIM + tid];
    const float q = q_taps.convolve(wide(in[tid])), k = k_taps.convolve(wide(in[DIM + tid]));
    rows[t].q[tid] = q, rows[t].k[tid] = k;
    rows[t].decay[tid] = __expf(lower_bound * sigmoid((wide(in[2 * DIM + tid]) + bias) * rate));
    if (has_value) rows[t].v[tid] = v_taps.convolve(wide(in[3 * DIM + tid]));
    const float q_square = warp_sum(q * q), k_square = warp_sum(k * k);
    if (lane == 0) rows[t].q_squares[warp] = q_square, rows[t].k_squares[warp] = k_square;
  }
  __syncthreads();
  for (int t = 0, slot = live; t < T; t++) {
    if (++slot == slots) slot = 0;
    const Row& row = rows[t];
    const float* qq = row.q_squares;
    const float* kk = row.k_squares;
    const float q_norm = rsqrtf(qq[0] + qq[1] + qq[2] + qq[3] + 1e-6f) * q_scale;
    const float k_norm = rsqrtf(kk[0] + kk[1] + kk[2] + kk[3] + 1e-6f);
    float4 seen = make_float4(0.f, 0.f, 0.f, 0.f);
    float key[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      key[i] = row.k[lane + i * 32] * k_norm;
      const float decay = row.decay[lane + i * 32];
      state[i].x *= decay, state[i].y *= decay, state[i].z *= decay, state[i].w *= decay;
      add(seen, state[i], key[i]);
    }
    seen = sum_lanes(seen);
    const float beta = betas[t];
    const float* value = row.v + warp * 4;
    const float4 error = make_float4((value[0] - seen.x) * beta, (value[1] - seen.y) * beta, (value[2] - seen.z) * beta,
                                     (value[3] - seen.w) * beta);
    float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
    float4* to = (float4*)(states + i64(slot * H + head) * DIM * DIM + cell);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      const float query = row.q[lane + i * 32] * q_norm;
      add(state[i], error, key[i]);
      add(out, state[i], query);
      to[i * 32 * DIM / 4] = state[i];
    }
    out = sum_lanes(out);
    if (lane == 0) *(float4*)(o + (i64(t) * H + head) * DIM + block * VALUES + warp * 4) = out;
  }
}
