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

DEVICE float4 sum_lanes(float4 v) { return make_float4(warp_sum(v.x), warp_sum(v.y), warp_sum(v.z), warp_sum(v.w)); }

extern "C" __global__ void __launch_bounds__(DIM)
kda(const u16* x, const float* conv, const float* rates, const float* biases, u16* history, float* states, const i64* start_at,
    const i64* live_at, const i64* counting, float* o, int T, int R, int slots, i64 x_stride, float lower_bound, float q_scale) {
  __shared__ float qs[2][DIM], ks[2][DIM], decays[2][DIM], vs[2][VALUES], squares[2][2][DIM / 32];
  const int head = blockIdx.x, block = blockIdx.y, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int channel = head * DIM + tid, v_channel = head * DIM + block * VALUES + tid;
  const int start = int(*start_at), live = int(*live_at);
  int place = start % R, slot = live;  // of the row at hand
  const bool has_value = tid < VALUES;

  float4 state[KEYS];
  const int cell = lane * DIM + block * VALUES + warp * 4;
#pragma unroll
  for (int i = 0; i < KEYS; i++) *(uint4*)&state[i] = fresh16(states + i64(live * H + head) * DIM * DIM + cell + i * 32 * DIM);
  Taps q_taps, k_taps, v_taps;
  q_taps.load(history, conv, channel, start, R);
  k_taps.load(history, conv, A + channel, start, R);
  if (has_value) v_taps.load(history, conv, 2 * A + v_channel, start, R);
  const float rate = rates[head], bias = biases[channel];
  depend();

  u16 q_raw = fresh(x + channel), k_raw = fresh(x + A + channel), f_raw = fresh(x + 3 * A + channel), b_raw = fresh(x + 5 * A + head);
  u16 v_raw = has_value ? fresh(x + 2 * A + v_channel) : u16(0);
  if (counting) T = min(T, int(*counting));  // the others' rows mean nothing
  for (int t = 0; t < T; t++) {
    const int side = t & 1;
    const float beta = sigmoid(wide(b_raw));
    u16* row = history + i64(place) * C;
    if (++place == R) place = 0;
    if (++slot == slots) slot = 0;
    if (block == 0) row[channel] = q_raw, row[A + channel] = k_raw;
    if (has_value) row[2 * A + v_channel] = v_raw;
    const float q = q_taps.convolve(wide(q_raw)), k = k_taps.convolve(wide(k_raw));
    qs[side][tid] = q, ks[side][tid] = k;
    decays[side][tid] = __expf(lower_bound * sigmoid((wide(f_raw) + bias) * rate));
    if (has_value) vs[side][tid] = v_taps.convolve(wide(v_raw));
    if (t + 1 < T) {  // the next row is on its way meanwhile
      const u16* next = x + (t + 1) * x_stride;
      q_raw = fresh(next + channel), k_raw = fresh(next + A + channel), f_raw = fresh(next + 3 * A + channel), b_raw = fresh(next + 5 * A + head);
      if (has_value) v_raw = fresh(next + 2 * A + v_channel);
    }
    const float q_square = warp_sum(q * q), k_square = warp_sum(k * k);
    if (lane == 0) squares[side][0][warp] = q_square, squares[side][1][warp] = k_square;
    __syncthreads();

    const float* q_sums = squares[side][0];
    const float* k_sums = squares[side][1];
    const float q_norm = rsqrtf(q_sums[0] + q_sums[1] + q_sums[2] + q_sums[3] + 1e-6f) * q_scale;
    const float k_norm = rsqrtf(k_sums[0] + k_sums[1] + k_sums[2] + k_sums[3] + 1e-6f);
    float4 seen = make_float4(0.f, 0.f, 0.f, 0.f);
    float key[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      key[i] = ks[side][lane + i * 32] * k_norm;
      const float decay = decays[side][lane + i * 32];
      state[i].x *= decay, state[i].y *= decay, state[i].z *= decay, state[i].w *= decay;
      seen.x += state[i].x * key[i], seen.y += state[i].y * key[i], seen.z += state[i].z * key[i], seen.w += state[i].w * key[i];
    }
    seen = sum_lanes(seen);
    const float* value = vs[side] + warp * 4;
    const float4 error = make_float4((value[0] - seen.x) * beta, (value[1] - seen.y) * beta, (value[2] - seen.z) * beta,
                                     (value[3] - seen.w) * beta);
    float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
    float4* to = (float4*)(states + i64(slot * H + head) * DIM * DIM + cell);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
      const float query = qs[side][lane + i * 32] * q_norm;
      state[i].x += key[i] * error.x, state[i].y += key[i] * error.y, state[i].z += key[i] * error.z, state[i].w += key[i] * error.w;
      out.x += state[i].x * query, out.y += state[i].y * query, out.z += state[i].z * query, out.w += state[i].w * query;
      to[i * 32 * DIM / 4] = state[i];
    }
    out = sum_lanes(out);
    if (lane == 0) *(float4*)(o + (i64(t) * H + head) * DIM + block * VALUES + warp * 4) = out;
  }
}
