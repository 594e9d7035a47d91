// What the kernels share: bf16 arithmetic, streamed loads, programmatic dependent launch, and the skinny product.
//
// Compiled without contraction: a multiplication and an addition are one instruction where `fmaf` stands, and nowhere else.
// The compiler would decide anew in every copy of an unrolled loop, and a row's bits would depend on which copy serves it.
//
// The product: a block owns 16 outputs, its warps share the inputs out, each a run of chunks of 32 columns. Lane (g, q) of
// a warp, g = lane / 4 and q = lane % 4, holds columns 8q .. 8q + 7 of weight rows g and g + 8, 16 bytes each, just as
// they lie in memory. mma.m16n8k16 wants other columns in these registers; as the inputs are taken in the same
// order, the sum is the same. Its 8 columns are window rows, so eight rows cost what one costs, and none sees another.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define INF __int_as_float(0x7f800000)
constexpr int OUTS = 16;
constexpr int ROWS = 8;

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float wide(u16 x) { return __uint_as_float(u32(x) << 16); }

DEVICE u32 pack(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

DEVICE u16 narrow(float x) { return u16(pack(x, 0.f)); }
DEVICE float rounded(float x) { return wide(narrow(x)); }
DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// Weights are read once: past the first-level cache, and early. Not as constants (.nc): those ptxas moves below the wait.
DEVICE uint4 stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Whatever a kernel of this round wrote is read past the first-level cache: kernels overlap, so a line may be there from before.
DEVICE uint4 fresh16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

DEVICE float fresh(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p));
  return x;
}

DEVICE u16 fresh(const u16* p) {
  u16 x;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(p));
  return x;
}

DEVICE void depend() {
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Blocks of a cluster (compute capability 9.0) wait for each other, and write into each other's shared memory.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// To the place `to` of the block number `rank` of the cluster.
DEVICE void send(float* to, int rank, float x) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(u32(__cvta_generic_to_shared(to))), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// acc += w x over one chunk: w of rows g and g + 8, x of window row g. Two accumulators halve the chain of dependent products.
DEVICE void multiply(float (&acc)[2][4], uint4 w0, uint4 w1, uint4 x) {
  mma(acc[0], w0.x, w1.x, w0.y, w1.y, x.x, x.y);
  mma(acc[1], w0.z, w1.z, w0.w, w1.w, x.z, x.w);
}

// Chunks first .. first + Count - 1 of two weight rows; zeros beyond the last chunk and for rows that are not there (null).
template <int Count>
DEVICE void load_chunks(uint4 (&w)[Count][2], const u16* row0, const u16* row1, int first, int chunks) {
#pragma unroll
  for (int j = 0; j < Count; j++) {
    const int column = (first + j) * 32 + (threadIdx.x & 3) * 8;
    const bool inside = first + j < chunks;
    w[j][0] = inside && row0 ? stream16(row0 + column) : make_uint4(0, 0, 0, 0);
    w[j][1] = inside && row1 ? stream16(row1 + column) : make_uint4(0, 0, 0, 0);
  }
}

// The warp's part of a tile into partial [window rows][16 outputs].
template <int Halves>
DEVICE void store_partial(float* partial, const float (&acc)[Halves][2][4]) {
  const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < Halves; half++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int t = half * ROWS + 2 * q + (i & 1), out = g + (i >> 1) * 8;
      partial[t * OUTS + out] = acc[half][0][i] + acc[half][1][i];
    }
  }
}

template <int Warps, int Stride>
DEVICE float sum_partials(const float* partials, int at) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < Warps; w++) sum += partials[w * Stride + at];
  return sum;
}

// SiLU(gate) * up, both held below `limit` where it is positive.
DEVICE float swiglu(float gate, float up, float limit) {
  gate *= sigmoid(gate);
  if (limit > 0.f) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return gate * up;
}

// 8 values of the residual stream after the branch, rounded as they are stored.
DEVICE uint4 add8(uint4 a, uint4 b) {
  return make_uint4(pack(low(a.x) + low(b.x), high(a.x) + high(b.x)), pack(low(a.y) + low(b.y), high(a.y) + high(b.y)),
                    pack(low(a.z) + low(b.z), high(a.z) + high(b.z)), pack(low(a.w) + low(b.w), high(a.w) + high(b.w)));
}

DEVICE uint4 times8(uint4 a, uint4 b) {
  return make_uint4(pack(low(a.x) * low(b.x), high(a.x) * high(b.x)), pack(low(a.y) * low(b.y), high(a.y) * high(b.y)),
                    pack(low(a.z) * low(b.z), high(a.z) * high(b.z)), pack(low(a.w) * low(b.w), high(a.w) * high(b.w)));
}

DEVICE float squares8(uint4 a) {
  const u32 pairs[4] = {a.x, a.y, a.z, a.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) sum = fmaf(high(pairs[i]), high(pairs[i]), fmaf(low(pairs[i]), low(pairs[i]), sum));
  return sum;
}

// Copies to shared memory that no register waits for. A lane may read what it copied itself after `copied`.
DEVICE void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending>
DEVICE void copied() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// acc += the warp's chunks times x [rows][stride], in global memory or in shared.
template <bool Global, int Count, int Halves>
DEVICE void multiply_chunks(float (&acc)[Halves][2][4], const uint4 (&w)[Count][2], const u16* x, i64 stride, int T, int first, int chunks) {
  const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < Halves; half++) {
    const int t = half * ROWS + g;
#pragma unroll
    for (int j = 0; j < Count; j++) {
      if (first + j < chunks) {
        const u16* from = x + t * stride + (first + j) * 32 + q * 8;
        const uint4 value = t >= T ? make_uint4(0, 0, 0, 0) : Global ? fresh16(from) : *(const uint4*)from;
        multiply(acc[half], w[j][0], w[j][1], value);
      }
    }
  }
}
