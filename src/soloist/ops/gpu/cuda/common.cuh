// What the kernels share: bf16 arithmetic, streamed loads, programmatic dependent launch, and the step of a skinny product.
//
// Compiled without contraction: a multiplication and an addition are one instruction where `fmaf` stands, and nowhere else.
// The compiler would decide anew in every copy of an unrolled loop, and a row's bits would depend on which copy serves it.
//
// The step: 16 weight rows times 32 columns, by a warp. Lane (g, q), g = lane / 4 and q = lane % 4, holds columns 8q .. 8q + 7
// of weight rows g and g + 8, 16 bytes each, just as they lie in memory. mma.m16n8k16 wants other columns in these registers;
// as the inputs are taken in the same order, the sum is the same. Its 8 columns are window rows, so eight rows cost what one
// costs, and none sees another.

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

// Copies to shared memory that no register waits for. A lane may read what it copied itself after `copied`.
DEVICE void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending>
DEVICE void copied() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}
