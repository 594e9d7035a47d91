// Weights on their way: one warp asks for pieces of weight rows, eight warps multiply them.
//
// The copy engine brings a piece, up to 512 columns of up to 16 rows, into a slot of a ring in shared memory: no register
// waits for it, and a block has as many bytes on their way as its ring holds. The asking warp runs ahead of everything: the
// slots fill while the kernel ahead still works and while the others stage x. Each slot has two barriers: `full` counts the
// bytes that came, `empty` the warps that are done with them.

constexpr int WARPS = 8;              // that multiply
constexpr int CONSUMERS = WARPS * 32;
constexpr int PIECE = 512;                 // columns of a slot
constexpr int ROW_BYTES = PIECE * 2 + 64;  // of a slot's row: 64 bytes on, so that two rows share no bank
constexpr int MOST_SLOTS = 16;
constexpr int EACH = PIECE / 32 / WARPS;   // chunks of a piece that a warp multiplies

// The multiplying warps wait for each other; the asking warp goes its own way.
DEVICE void meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
DEVICE bool asks() { return threadIdx.x >= CONSUMERS; }

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

DEVICE void wait_for(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  } while (!done);
}

// Columns that a piece has of rows of so many.
DEVICE int piece_columns(int columns, int piece) { return min(PIECE, columns - piece * PIECE); }

template <int Rows>
struct Ring {
  static constexpr int SLOT = Rows * ROW_BYTES;
  unsigned char* slots;
  u32 full, empty;
  int depth, slot;
  u32 phase;

  // To be followed by __syncthreads. barriers [2 * MOST_SLOTS] and slots in shared memory.
  DEVICE void begin(unsigned char* slots_, unsigned long long* barriers, int depth_) {
    slots = slots_, depth = depth_, slot = 0, phase = 0;
    full = shared_address(barriers), empty = full + MOST_SLOTS * 8;
    if (threadIdx.x == 0) {
      for (int i = 0; i < depth; i++) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + i * 8) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + i * 8), "n"(WARPS) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
  }

  DEVICE void turn() {
    if (++slot == depth) slot = 0, phase ^= 1;
  }

  // The asking warp: lane r brings `bytes` of row r, where it has one. A weight is read once a round: first to leave the cache.
  DEVICE void ask(const u16* row, int bytes) {
    wait_for(empty + slot * 8, phase ^ 1);
    const u32 all = __popc(__ballot_sync(~0u, row != nullptr)) * bytes, bar = full + slot * 8;
    if ((threadIdx.x & 31) == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(all) : "memory");
    __syncwarp();
    if (row) {
      i64 policy;
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                   ::"r"(shared_address(slots) + slot * SLOT + (threadIdx.x & 31) * ROW_BYTES), "l"(row), "r"(bytes), "r"(bar), "l"(policy)
                   : "memory");
    }
    turn();
  }

  // A multiplying warp: the next piece, once it is there; and that the warp is done with it.
  DEVICE const unsigned char* take() {
    wait_for(full + slot * 8, phase);
    return slots + slot * SLOT;
  }

  DEVICE void release() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + slot * 8) : "memory");
    turn();
  }
};

// The warp's chunk j of a piece: its first column in the piece.
DEVICE int chunk_column(int j) { return ((threadIdx.x >> 5) * EACH + j) * 32; }

// The warp's x of a piece, from rows in shared memory or in global; zeros behind the last row and the last column.
template <bool Global, int Halves>
DEVICE void load_x(uint4 (&x)[Halves][EACH], const u16* rows, i64 stride, int T, int columns, int piece) {
  const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < Halves; half++) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const int t = half * ROWS + g, chunk = piece * PIECE + chunk_column(j);
      const u16* from = rows + t * stride + chunk + q * 8;
      x[half][j] = t >= T || chunk >= columns ? make_uint4(0, 0, 0, 0) : Global ? fresh16(from) : *(const uint4*)from;
    }
  }
}

// acc += a slot's rows times x. In the place of rows that a slot does not have another is multiplied; nobody takes their sums.
template <int Rows, int Halves>
DEVICE void multiply_piece(float (&acc)[Halves][2][4], const unsigned char* slot, const uint4 (&x)[Halves][EACH], int columns, int piece) {
  const int g = (threadIdx.x & 31) >> 2, q = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    if (piece * PIECE + chunk_column(j) < columns) {
      const unsigned char* at = slot + (chunk_column(j) + q * 8) * 2;
      const uint4 w0 = *(const uint4*)(at + g * ROW_BYTES), w1 = *(const uint4*)(at + min(g + 8, Rows - 1) * ROW_BYTES);
#pragma unroll
      for (int half = 0; half < Halves; half++) multiply(acc[half], w0, w1, x[half][j]);
    }
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

// Tiles of up to 16 weight rows that a block makes one after the other: first, first + step, .. below `count`.
template <int Columns, int Rows, int Halves>
struct Tiles {
  static constexpr int PIECES = (Columns + PIECE - 1) / PIECE;
  static constexpr int PARTIAL = Halves * ROWS * OUTS;
  int first, step, count;

  // The asking warp. row_of(tile, r) tells where weight row r < Rows of a tile is, null where there is none.
  template <class RowOf>
  DEVICE void ask(Ring<Rows>& ring, RowOf& row_of) {
    const int lane = threadIdx.x & 31;
    for (int tile = first; tile < count; tile += step) {
      const u16* row = lane < Rows ? row_of(tile, lane) : nullptr;
#pragma unroll 1
      for (int piece = 0; piece < PIECES; piece++) ring.ask(row ? row + piece * PIECE : nullptr, piece_columns(Columns, piece) * 2);
    }
  }

  // Multiply by x [T][stride] and hand each tile's sums [warps][PARTIAL] to finish(tile, sums). partials: room for two.
  template <bool Global, class Finish>
  DEVICE void run(Ring<Rows>& ring, const u16* rows, i64 stride, int T, float* partials, Finish& finish) {
    uint4 x[Halves][EACH], next[Halves][EACH];
    if (Global) load_x<Global>(next, rows, stride, T, Columns, 0);
    int side = 0;
    for (int tile = first; tile < count; tile += step, side ^= 1) {
      float acc[Halves][2][4] = {};
#pragma unroll 1
      for (int piece = 0; piece < PIECES; piece++) {
        if (Global) {
#pragma unroll
          for (int half = 0; half < Halves; half++) {
#pragma unroll
            for (int j = 0; j < EACH; j++) x[half][j] = next[half][j];
          }
          load_x<Global>(next, rows, stride, T, Columns, piece + 1 < PIECES ? piece + 1 : 0);
        } else {
          load_x<Global>(x, rows, stride, T, Columns, piece);
        }
        multiply_piece<Rows>(acc, ring.take(), x, Columns, piece);
        ring.release();
      }
      float* sums = partials + side * WARPS * PARTIAL;
      store_partial(sums + (threadIdx.x >> 5) * PARTIAL, acc);
      meet();
      finish(tile, sums);
    }
  }
};

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

// Rows of the residual stream enter: rows [T][stride] in shared memory, the sum with the branch, as it is stored, times the
// norm's weight where Weighted, and the parts of its squares' sums, squares [WARPS][Squares]; a norm's scale is applied to
// the product. `stream` (null but in one block) takes the new stream. The weights may be loaded before the wait.
template <int Columns, bool Branch, bool Weighted, int Squares>
struct Norm {
  static constexpr int VECTORS = (Columns / 8 + CONSUMERS - 1) / CONSUMERS;
  static constexpr int TOGETHER = VECTORS == 1 ? 4 : VECTORS == 2 ? 2 : 1;  // rows whose loads are on their way at once
  uint4 weight[VECTORS];

  DEVICE int column(int v) { return (v * CONSUMERS + threadIdx.x) * 8; }

  DEVICE void begin(const u16* norm) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) weight[v] = column(v) < Columns ? *(const uint4*)(norm + column(v)) : make_uint4(0, 0, 0, 0);
  }

  DEVICE void enter(u16* rows, int stride, float* squares, const u16* residual, i64 residual_stride, const u16* branch, u16* stream, int T) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int begin = 0; begin < T; begin += TOGETHER) {
      uint4 sum[TOGETHER][VECTORS], added[TOGETHER][VECTORS];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
          const bool inside = begin + i < T && column(v) < Columns;
          sum[i][v] = inside ? fresh16(residual + (begin + i) * residual_stride + column(v)) : make_uint4(0, 0, 0, 0);
          if (Branch) added[i][v] = inside ? fresh16(branch + i64(begin + i) * Columns + column(v)) : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const int t = begin + i;
        if (t >= T) break;
        float square = 0.f;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
          if (column(v) >= Columns) continue;
          uint4 s = sum[i][v];
          if (Branch) s = add8(s, added[i][v]);
          if (Branch && stream) *(uint4*)(stream + i64(t) * Columns + column(v)) = s;
          square += squares8(s);
          *(uint4*)(rows + t * stride + column(v)) = Weighted ? times8(s, weight[v]) : s;
        }
        square = warp_sum(square);
        if (lane == 0) squares[warp * Squares + t] = square;
      }
    }
  }
};

// SiLU(gate) * up, both held below `limit` where it is positive.
DEVICE float swiglu(float gate, float up, float limit) {
  gate *= sigmoid(gate);
  if (limit > 0.f) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return gate * up;
}
