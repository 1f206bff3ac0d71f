// What the kernels of weights in layout "tiled_64x64" share: decoding, bulk copies into shared memory and their barriers.
// Put behind grouped_mm.cuh and in front of tiled_mma.cu or tiled_wgmma.cu by kernels/cuda_configs.py.
//
// One warp of a block (the producer) has the copy engine fill a ring of stages, far ahead of the other warps (the
// consumers), also across tiles. Of each stage, the barrier `full` opens when its bytes have come, `empty` when all
// consumers are done with it. The layout is that of `to_tiled` in nvfp4_layouts.py.
//
// While the tensor cores multiply, any other instruction takes about two cycles (measured; probably for the registers'
// bandwidth). So what a consumer does beside decoding counts: its stages are long, and it computes few addresses.

constexpr int kBlock = 64;             // rows and k of a block of weights
constexpr int kBlockCodes = 2048 / 16, kBlockScales = 256 / 16;  // of a block, in units of 16 bytes

#ifndef CUDA_EMULATOR
typedef uint64_t Barrier;  // an mbarrier in shared memory

DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

typedef uint32_t BarrierAt;  // its address
DEVICE BarrierAt barrier_at(void* barrier) { return shared_address(barrier); }

DEVICE void init_barrier(BarrierAt barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(BarrierAt barrier) { asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void arrive_and_expect(BarrierAt barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void wait(BarrierAt barrier, int parity) {  // until the phase of this parity is over
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra end;\nbra again;\nend:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// How the L2 cache keeps what is copied: as usual, or as the first to go, so that what is read once does not drive out, and
// have written to memory, what others have left there.
typedef uint64_t CachePolicy;
DEVICE CachePolicy cache_policy(bool read_once) {
  CachePolicy policy;
  if (!read_once) return 0x1000000000000000;  // as if there were none; createpolicy's evict_normal is another, and slower
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Asynchronous; `bytes` and both addresses are multiples of 16.
DEVICE void copy_bulk(void* to_shared, const void* from, int bytes, BarrierAt barrier, CachePolicy policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to_shared)),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// A view of a matrix of 16-bit numbers (rows, K) as boxes of 64 k by some rows; the driver makes it.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Asynchronous: a box from (row, k) on to [rows][64 k] with 128-byte swizzle; zeros where the matrix has ended.
DEVICE void copy_box(void* to_shared, const TensorMap* map, int k, int row, BarrierAt barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to_shared)),
               "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}
DEVICE void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Gives registers of the warpgroup back, or takes more.
template <int REGISTERS>
DEVICE void shrink_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void grow_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// True for one thread of a warp that is here as a whole. ptxas knows that it is one: it need not see to it that copies are
// issued for each thread that is there.
DEVICE bool is_elected() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// The barrier `id` (1 to 15) of `threads` threads, warps of which meet there.
DEVICE void meet(int id, int threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// A flag that a block raises, when others are to see what its warp has written, and another waits for and takes down.
DEVICE void raise_flag(int* flag) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}
DEVICE void take_flag(int* flag) {
  int raised;
  do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  while (raised == 0);
  *flag = 0;
}
DEVICE float load_other(const float* p) {  // what another block has written
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(p) : "memory");
  return value;
}

// Products with the low (high) half of `scale`; the multiplier takes a half by itself.
template <bool BF16, bool HIGH>
DEVICE uint32_t multiply_by_half(uint32_t pair, uint32_t scale) {
  uint32_t out;
  if constexpr (BF16 && HIGH) asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.bf16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  else if constexpr (BF16) asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.bf16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  else if constexpr (HIGH) asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.f16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  else asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.f16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  return out;
}

// Lane l gives the address of row l % 8 of matrix l / 8, eight 16-bit numbers; out[j] is the lane's pair of matrix j: row
// g, columns 2 t and 2 t + 1.
DEVICE void load_matrices(uint32_t (&out)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}
#endif

// The stages of a ring, taken in turn, each of BYTES: where the next begins, and the parity of how often the ring has come
// round. All else of a stage follows from where it begins; there is nothing to be computed from its number.
template <int STAGES, int BYTES>
struct Ring {
  int begin = 0, parity = 0;
  METHOD void advance() {
    begin += BYTES;
    if (begin == STAGES * BYTES) begin = 0, parity ^= 1;
  }
};

// What a stage is of: tile `at`; no more is to come where at.expert is negative. For tiled_mma.cu also how often 64 k
// of its K are this block's, and how many blocks share it that do what is in front of them; -1: another does the end.
struct alignas(16) Work {
  Tile at;
  int subs, share;
};

// What a stage ends with.
struct alignas(16) StageEnd {
  Work work;
  Barrier full, empty;
};

// `end`: of the first stage.
template <int STAGES, int BYTES>
DEVICE void init_ring(uint8_t* end, int consumers) {
  for (int i = 0; i < STAGES; ++i) {
    StageEnd* const stage = reinterpret_cast<StageEnd*>(end + i * BYTES);
    init_barrier(barrier_at(&stage->full), 1);
    init_barrier(barrier_at(&stage->empty), consumers);
  }
}

// Once a stage is free, says what it will be of and how many bytes will come.
DEVICE void announce(StageEnd* stage, int parity, const Work& work, int bytes) {
  wait(barrier_at(&stage->empty), parity ^ 1);
  stage->work = work;
  arrive_and_expect(barrier_at(&stage->full), bytes);
}
constexpr Work kNoWork = {{-1, 0, 0, 0}, 0, 0};

// In one piece and through a const pointer: read otherwise, ptxas no longer finds that all threads of a warp are at the same
// stage, and computes where it lies for each of them (20 instructions more for 64 k of a warpgroup by wgmma).
DEVICE Work read_work(const StageEnd* stage) { return stage->work; }

// ---- decoding ----

// A pair of codes where a bf16 has its sign and exponent, everything else zero, times the low or high half of a pair of
// scales -> two 16-bit floats, 2**-8 of the values. For fp16 the exponent moves up by three bits.
template <bool BF16, bool HIGH>
DEVICE uint32_t scale_pair(uint32_t pair, uint32_t scales) {
  if constexpr (!BF16) pair += 7 * (pair & 0x01C001C0);
  return multiply_by_half<BF16, HIGH>(pair, scales);
}

// The pair of scales of the even (odd) step of a word, 8 bits at bit 4 of each half once it is rotated left by 8 (by 0) -> two
// 16-bit floats, times 2**118 (bf16) or 2**6 (fp16). 5 bits of exponent and 3 of mantissa stand where a 16-bit float has the
// lowest of its exponent; `top`: 0x70007000.
template <bool BF16>
DEVICE uint32_t decode_scales_of_step(uint32_t word, bool odd, uint32_t top) {
  if constexpr (BF16) return ((odd ? word : rotate_left(word, 8)) & 0x0FF00FF0) | top;
  else return (odd ? word << 3 : rotate_left(word, 11)) & 0x7F807F80;
}

// Two words of codes and their word of scales -> the left operands of two steps of 16 k.
template <bool BF16>
DEVICE void decode_steps(uint32_t (&first)[4], uint32_t (&second)[4], uint32_t even, uint32_t odd, uint32_t scales, uint32_t top) {
  unpack_words(first, second, even, odd);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t(&a)[4] = step ? second : first;
    const uint32_t scale = decode_scales_of_step<BF16>(scales, step, top);  // of rows g and g + 8
    a[0] = scale_pair<BF16, false>(a[0], scale);
    a[1] = scale_pair<BF16, true>(a[1], scale);
    a[2] = scale_pair<BF16, false>(a[2], scale);
    a[3] = scale_pair<BF16, true>(a[3], scale);
  }
}

// ---- tiles ----

// The same as count_tiles, by one warp, without a barrier: each lane counts for neighbouring experts.
DEVICE void count_tiles_by_warp(const Arguments& args, int height, int* tile_start, int* row_start) {
  const int lane = threadIdx.x % 32, each = (args.experts + 31) / 32;
  const int first = min(lane * each, args.experts), last = min(first + each, args.experts);
  int sum = 0, start = first > 0 && first < last ? row_end(args, first - 1) : 0;
  for (int base = first; base < last; base += 4) {  // loads that do not wait for each other
    int ends[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ends[i] = row_end(args, min(base + i, last - 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i >= last) break;
      sum += tiles_between(start, ends[i], height);
      row_start[base + i + 1] = start = ends[i];
      tile_start[base + i + 1] = sum;
    }
  }
  int before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  before -= sum;
  for (int e = first; e < last; ++e) tile_start[e + 1] += before;
  if (lane == 0) tile_start[0] = row_start[0] = 0;
}

// What a block does, one after the other: tiles, of which LAST for each block go to whichever gets to them, so that a faster
// block does more and all are done at about the same time. They are no more because the answer takes long, and because
// blocks that keep in step find in the L2 cache what others have read. A block asks ahead. All lanes of the producer call it.
//
// SHARED: where blocks would be left without work for the time of kWorthSharing stages, all do the same amount instead. The
// tiles that are too few to give each block one more, and as many as there are blocks, come first: all their K in a row is
// cut into a piece for each block (stream-K). Where there are fewer tiles than blocks, each is cut into as many pieces as
// all can have. A block begins with the end of its piece, which another needs that has the end of the tile: it hardly ever
// waits then.
template <bool SHARED, int LAST>
struct Units {
  int tile_m, tile_n;       // of the tile, whose number is tile_m * tiles_n + tile_n
  int first, last, before;  // of its K, stages from `first` to in front of `last`, behind those of so many blocks

  // Divisions take long: those for the first tile are done while offsets come from memory.
  METHOD Units(int tiles_n, int stages) : tiles_n(tiles_n), stages(stages) { take(blockIdx.x, 0, stages); }

  // `counter` counts how many have been asked for, zero before and after.
  METHOD void begin(int* counter, int tiles_m) {
    const int blocks = gridDim.x, block = blockIdx.x;
    asked = counter, tiles = tiles_m * tiles_n, whole = block, fixed = max(tiles / blocks - LAST, 1) * blocks;
    ask();
    if constexpr (SHARED) {
      const int count = tiles_to_share();
      shared = count * stages, from = cut(block), to = cut(block + 1);
      if (count > 0) {
        whole = count + block - blocks, fixed = tiles;
        return advance();
      }
    }
    if (!any()) advance();
  }
  METHOD bool any() const { return whole < tiles; }
  METHOD int share() const { return last < stages ? -1 : before; }
  METHOD Tile find(const Arguments& args, const int* tile_start, const int* row_start, int height) const {
    return tile_at(args.experts, tile_start, row_start, tile_m, tile_n, tiles_n, height);
  }
  METHOD void advance() {
    const int blocks = gridDim.x, block = blockIdx.x;
    if constexpr (SHARED)
      if (from < to) {
        const int tile = (to - 1) / stages, begin = tile * stages;
        take(tile, max(from - begin, 0), to - begin);
        if (first > 0 && last == stages) before = block - begin * sharers / shared;
        to = begin;
        return;
      }
    whole += blocks;
    if (whole >= fixed) {
      order = __shfl_sync(0xffffffffu, order, 0);
      whole = fixed + order;
      if (any()) ask();
      // Every block asks until it gets none; this one is the last to.
      else if (order + 1 == max(tiles - fixed, 0) + blocks && threadIdx.x % 32 == 0) *asked = 0;
    }
    take(whole, 0, stages);
  }

 private:
  static constexpr int kWorthSharing = 2;  // measured: what sharing takes
  const int tiles_n, stages;
  int *asked, tiles, whole, fixed, order;
  int sharers, shared, from, to;  // the last three are stages of all tiles that are shared

  METHOD void take(int tile, int from_stage, int to_stage) {
    tile_m = tile / tiles_n, tile_n = tile % tiles_n;
    first = from_stage, last = to_stage, before = 0;
  }
  METHOD int tiles_to_share() {
    const int blocks = gridDim.x, rest = tiles % blocks;
    sharers = blocks;
    if (tiles > 0 && tiles < blocks) sharers = min(blocks / tiles, stages) * tiles;
    const int saved = tiles < blocks ? stages - stages * tiles / sharers : (blocks - rest) * stages / blocks;
    return rest == 0 || saved < kWorthSharing ? 0 : min(tiles, rest + blocks);
  }
  METHOD int cut(int block) const { return min(block, sharers) * shared / sharers; }  // where its piece begins
  METHOD void ask() {
    if (threadIdx.x % 32 == 0) order = atomicAdd(asked, 1);
  }
};

// Where blocks share a tile, each but the last leaves its sums, and a flag for each warp: zero, before and after. Blocks start
// in the order of their numbers, so that whom one waits for is there.
//   sums [blocks][groups][R * C * 4][128]; flags [blocks][groups][4]
template <int R, int C>
DEVICE void leave_sums(const Arguments& args, float (&acc)[R][C][4], int group, int groups) {
  const int slot = blockIdx.x * groups + group;
  float* const to = args.sums + slot * (R * C * 512) + threadIdx.x % 128;
  for_each_sum(acc, [&](float& sum, int i) { to[i * 128] = sum; });
  __syncwarp();
  if (threadIdx.x % 32 == 0) raise_flag(args.sums_left + 4 * slot + threadIdx.x / 32 % 4);
}

// Adds what the `share` blocks in front of this one have left.
template <int R, int C>
DEVICE void add_sums(const Arguments& args, float (&acc)[R][C][4], int group, int groups, int share) {
  const int slot = (blockIdx.x - share) * groups + group, warp = threadIdx.x / 32 % 4;
  for (int i = threadIdx.x % 32; i < share; i += 32) take_flag(args.sums_left + 4 * (slot + i * groups) + warp);
  __syncwarp();
  const float* const from = args.sums + slot * (R * C * 512) + threadIdx.x % 128;
#pragma unroll 4  // loads that do not wait for each other
  for (int i = 0; i < share; ++i)
    for_each_sum(acc, [&](float& sum, int at) { sum += load_other(from + (i * groups * R * C * 4 + at) * 128); });
}

// Block `block` of the 64-row blocks of a tile, as a number among those of its expert: with SwiGLU gate and up take
// turns. Blocks that do not exist are read from the last that does, and not stored.
template <bool SWIGLU>
DEVICE int block_of_expert(const Arguments& args, int first_feature, int block) {
  const int blocks = args.n / kBlock;
  if constexpr (SWIGLU) return min(first_feature / kBlock + block / 2, blocks / 2 - 1) + (block % 2 ? blocks / 2 : 0);
  else return min(first_feature / kBlock + block, blocks - 1);
}

// Copies of a tile's weights, up to SUBS times 64 k of its BLOCKS blocks of rows at a time, from `sub` on.
template <bool SWIGLU, int BLOCKS, int SUBS>
struct WeightCopies {
  const uint8_t *codes[BLOCKS], *scales[BLOCKS];
  CachePolicy policy;

  METHOD WeightCopies(const Arguments& args, int expert, int first_feature, int sub) : policy(cache_policy(args.read_once)) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const int row_block = block_of_expert<SWIGLU>(args, first_feature, block);
      const int64_t from = (static_cast<int64_t>(expert) * (args.n / kBlock) + row_block) * (args.k / kBlock) + sub;
      codes[block] = args.qdata + from * (16 * kBlockCodes);
      scales[block] = args.scale + from * (16 * kBlockScales);
    }
  }

  // The next `count`, to [BLOCKS][SUBS] of each.
  METHOD void operator()(uint4* to_codes, uint4* to_scales, int count, BarrierAt barrier) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      copy_bulk(to_codes + block * SUBS * kBlockCodes, codes[block], count * 16 * kBlockCodes, barrier, policy);
      copy_bulk(to_scales + block * SUBS * kBlockScales, scales[block], count * 16 * kBlockScales, barrier, policy);
      codes[block] += SUBS * 16 * kBlockCodes, scales[block] += SUBS * 16 * kBlockScales;
    }
  }
};
