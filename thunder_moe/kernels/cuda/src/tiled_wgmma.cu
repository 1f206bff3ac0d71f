// Grouped GEMM of many 16-bit rows per expert with packed weights in layout "tiled_64x64", by wgmma (SM90).
// Compiled at run time by kernels/cuda/nvrtc.py behind wgmma.cuh and tile_scheduler.cuh; tests/emulator/cuda_emulator.h runs it
// on a CPU.
//
// Bound by the tensor cores: while they multiply one block of 64 k of a warpgroup's rows, the warpgroup decodes the next.

// out[row] = the token of slot row_slot[row].
__global__ void __launch_bounds__(256) gather_rows(const GatherArguments args) {
  await_previous_kernel();
  const int units = args.k / 8;
  const int64_t items = static_cast<int64_t>(rows_to_gather(args)) * units;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; item < items; item += static_cast<int64_t>(gridDim.x) * 256) {
    const int row = static_cast<int>(item / units), unit = static_cast<int>(item - static_cast<int64_t>(row) * units);
    const int64_t from = static_cast<int64_t>(slot_of_row(args.row_slot, row, args.rows) / args.top_k) * units + unit;
    reinterpret_cast<uint4*>(args.out)[item] = reinterpret_cast<const uint4*>(args.x)[from];
  }
}

// Arguments with a LoRA adapter, whose product is added.
struct LowRankGemmArguments {
  TensorMap x, inner;  // of gemm.x and of rows (M, rank), in boxes of a tile's tokens
  GemmArguments gemm;
  const uint16_t* b;   // (E, N, rank)
  int rank;            // a multiple of 8
};

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

// The left operands of an adapter, RANK blocks of 16 k: R blocks of a warp's 16 rows of b. Rows past the last are read from the last.
template <int R, int RANK>
DEVICE void load_adapter(uint32_t (&b)[RANK][R][4], const LowRankGemmArguments& args, int expert, int n0, int g, int t) {
#pragma unroll
  for (int block = 0; block < RANK; ++block)
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = min(n0 + 64 * r + g + i % 2 * 8, args.gemm.n - 1), k = 16 * block + i / 2 * 8 + 2 * t;
        const uint16_t* const from = args.b + (static_cast<int64_t>(expert) * args.gemm.n + n) * args.rank + k;
        b[block][r][i] = k < args.rank ? *reinterpret_cast<const uint32_t*>(from) : 0;
      }
}

// A thread's part of the 16 rows that a warp of a warpgroup multiplies of a block of 64 by 64 weights.
struct RowsOfBlock {
  template <bool SWIGLU, int BLOCKS, int K_BLOCKS>
  using Copies = WeightCopies<SWIGLU, BLOCKS, K_BLOCKS>;
  TiledCodes code;
  TiledScales scale;

  // Bytes from the beginning of a block's codes and scales; warp: of the warpgroup.
  static METHOD int codes_at(int warp, int lane) { return (warp * (kBlockCodes / 64) + lane) * 16; }
  static METHOD int scales_at(int warp, int g) { return (warp * 8 + g) * (kBlockScales / 32); }
  METHOD void load(const uint8_t* codes, const uint8_t* scales) {
    code = load_codes(reinterpret_cast<const uint4*>(codes));
    scale = *reinterpret_cast<const TiledScales*>(scales);
  }
  // The left operands of two steps of 16 k, of the first or second 32 k.
  template <bool BF16>
  METHOD void decode(uint32_t (&first)[4], uint32_t (&second)[4], int half, int, uint32_t top) {
    decode_part<BF16>(first, second, code, scale, half, top);
  }
};

// Persistent. SCALED: there is a slot_scale; C: blocks of 8 tokens of a tile, at most; R: blocks of 64 weight rows of a
// warpgroup (SwiGLU: one of gate, one of up); WG: consumer warpgroups, one more is the producer; K_BLOCKS: blocks of 64 k of a
// stage, K is a multiple of a stage; STREAM_K: thread blocks may share tiles; RANK: blocks of 16 of an adapter's rank. The adapter
// is one more stage, of its inner rows.
template <bool BF16, bool SWIGLU, bool SCALED, int C, int R, int WG, int K_BLOCKS, bool STREAM_K, int STAGES, int RANK, class Block, class Arguments>
DEVICE void multiply_tiled(const Arguments& all) {
  static_assert(RANK == 0 || (!SWIGLU && !SCALED && !STREAM_K), "an adapter is added to the GEMM alone");
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  constexpr int kTokens = 8 * C, kBlocks = WG * R;
  constexpr int kTileRows = 64 * WG * (SWIGLU ? 1 : R);  // output features
  // Byte offsets in a stage: tokens [K_BLOCKS][kTokens][64] at 0, the codes and scales, both [kBlocks][K_BLOCKS] blocks, the
  // footer.
  constexpr int kTokenBytes = 128 * kTokens, kCodes = K_BLOCKS * kTokenBytes, kScales = kCodes + kBlocks * K_BLOCKS * kBlockCodes;
  constexpr int kEnd = kScales + kBlocks * K_BLOCKS * kBlockScales;
  constexpr int kStage = (kEnd + sizeof(StageFooter) + 1023) / 1024 * 1024;  // for the swizzle
  constexpr int kNoStage = STAGES * kStage - kEnd;  // an offset with a footer and nothing else, see `before`
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage], the footer of kNoStage, with SCALED scales of rows [WG][256]
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ volatile uint32_t scale_top;  // volatile, so that the compiler does not know its value

  const GemmArguments& args = all.gemm;
  uint8_t* const memory = reinterpret_cast<uint8_t*>(align_shared(unaligned, 1024));
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that the compiler knows it is uniform
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int stages_k = args.k / (kBlock * K_BLOCKS);
  TileScheduler<STREAM_K, 6> scheduler((features + kTileRows - 1) / kTileRows, stages_k);
  if (warp == 0) count_tiles_by_warp(args, kTokens, tile_start, row_start);
  if (threadIdx.x == 128 * WG) {
    prefetch_tensor_map(&all.x);
    scale_top = 0x70007000;
    init_pipeline<STAGES, kStage>(memory + kEnd, 4 * WG);
    init_pipeline<1, kStage>(memory + kNoStage + kEnd, 4 * WG);
    fence_mbarrier_init();
  }
  __syncthreads();
  PipelineState<STAGES, kStage> stage;
  auto footer = [&] { return reinterpret_cast<StageFooter*>(memory + stage.begin + kEnd); };

  if (warp >= 4 * WG) {
    shrink_registers<(WG == 1 ? 56 : WG == 2 ? 40 : 32)>();
    if (warp != 4 * WG) return;
    const bool elected = elect_one();
    for (scheduler.begin(args.tile_counter, tile_start[args.num_experts]); scheduler.valid(); scheduler.advance()) {
      const Tile at = scheduler.find(args, tile_start, row_start, kTokens);
      // With STREAM_K, of the stages from `first` to `last` only.
      const int first_k = STREAM_K ? scheduler.first * K_BLOCKS * kBlock : 0, last_k = STREAM_K ? scheduler.last * K_BLOCKS * kBlock : args.k;
      const WorkItem work = {at, STREAM_K ? scheduler.last - scheduler.first : 0, STREAM_K ? scheduler.contributors() : 0};
      typename Block::template Copies<SWIGLU, kBlocks, K_BLOCKS> copy(args, at.expert, at.tile_n * kTileRows, first_k / kBlock);
      if (elected)
#pragma unroll 1
        for (int k = first_k; k < last_k; k += K_BLOCKS * kBlock) {
          acquire_stage(footer(), stage.parity, work, kEnd);
          uint8_t* const to = memory + stage.begin;
          const MbarrierAddress full = mbarrier_address(&footer()->full);
#pragma unroll
          for (int k_block = 0; k_block < K_BLOCKS; ++k_block) tma_load_box(to + k_block * kTokenBytes, &all.x, k + k_block * kBlock, at.row0, full);
          copy(reinterpret_cast<uint4*>(to + kCodes), reinterpret_cast<uint4*>(to + kScales), K_BLOCKS, full);
          stage.advance();
        }
      if constexpr (RANK > 0)
        if (elected) {
          acquire_stage(footer(), stage.parity, work, kTokenBytes);
          tma_load_box(memory + stage.begin, &all.inner, 0, at.row0, mbarrier_address(&footer()->full));
          stage.advance();
        }
      __syncwarp();
    }
    if (elected) acquire_stage(footer(), stage.parity, kEndOfWork, 0);
    return;
  }

  grow_registers<(WG == 1 ? 256 - 56 : WG == 2 ? 232 : WG == 3 ? 160 : 112)>();
  const int g = lane / 4, t = lane % 4, warpgroup = warp / 4;
  // Where this thread reads in the first stage.
  const uint8_t* const codes = memory + kCodes + warpgroup * R * K_BLOCKS * kBlockCodes + Block::codes_at(warp % 4, lane);
  const uint8_t* const scales = memory + kScales + warpgroup * R * K_BLOCKS * kBlockScales + Block::scales_at(warp % 4, g);
  MatrixDescriptor tokens = matrix_descriptor(reinterpret_cast<const uint4*>(memory));  // of the stage
  float* const row_scale = reinterpret_cast<float*>(memory + STAGES * kStage + sizeof(StageFooter)) + 256 * warpgroup;
  const uint32_t top = scale_top;  // from memory, so that it stays in a register
  for (;;) {
    mbarrier_wait(mbarrier_address(&footer()->full), stage.parity);
    const WorkItem work = read_work_item(footer());
    const Tile& at = work.tile;
    if (at.expert < 0) return;
    const int turns = STREAM_K ? work.k_blocks : stages_k;
    const int n0 = at.tile_n * kTileRows + warpgroup * (SWIGLU ? 64 : 64 * R) + warp % 4 * 16;
    RowFactors<R> rows;  // loaded early, used in the epilogue
    rows.template load<SWIGLU, 64>(args, at.expert, n0, g);
    float own_scale[2];  // of two of the tile's rows, likewise
    if constexpr (SCALED)
#pragma unroll
      for (int i = 0; i < 2; ++i) own_scale[i] = scale_of_row(args, at.row0 + threadIdx.x % 128 + 128 * i, at.end);

    // All k of the work item and the tile's first 8 * N tokens. `a` double-buffers the left operands of 64 rows by kSteps * 16 k, as registers
    // allow: one half is multiplied while the other is decoded. Tokens beyond the tile's end are multiplied, and not stored.
    auto multiply_tokens = [&](auto number) {
      constexpr int N = decltype(number)::value;
      constexpr int kSteps = R * N <= (WG < 3 ? 28 : WG == 3 ? 12 : 4) && R * K_BLOCKS % 2 == 0 ? 4 : 2, kPieces = 4 / kSteps;
      constexpr bool kEarly = RANK * R == 1;  // as registers allow
      uint32_t adapter[RANK > 0 ? RANK : 1][R][4];
      if constexpr (kEarly) load_adapter<R, RANK>(adapter, all, at.expert, n0, g, t);
      float acc[R][N][4] = {};
      keep_apart<N>();
      uint32_t a[2][kSteps][4];
      Block loaded;
      auto load = [&](int block) {  // of the stage, k slowest: R blocks of rows per 64 k
        const int at = block % R * K_BLOCKS + block / R;
        loaded.load(codes + stage.begin + at * kBlockCodes, scales + stage.begin + at * kBlockScales);
      };
      auto decode = [&](int i) {  // piece i of the loaded block
        if (kSteps == 4 || i % 2 == 0) loaded.template decode<BF16>(a[i % 2][0], a[i % 2][1], 0, warp, top);
        if (kSteps == 4 || i % 2 == 1) loaded.template decode<BF16>(a[i % 2][kSteps - 2], a[i % 2][kSteps - 1], 1, warp, top);
      };
      auto release = [&](int begin) {  // the stage at that offset
        __syncwarp();
        if (lane == 0) mbarrier_arrive(mbarrier_address(&reinterpret_cast<StageFooter*>(memory + begin + kEnd)->empty));
      };
      load(0);
      decode(0);
      int before = kNoStage;  // the offset of the stage before this one
      for (int turn = 1; turn <= turns; ++turn) {
        const int now = stage.begin;
#pragma unroll
        for (int i = 0; i < R * K_BLOCKS * kPieces; ++i) {
          const int block = i / kPieces, first = i % kPieces * kSteps;
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < kSteps; ++step) wgmma<BF16, N>(acc[block % R], a[i % 2][step], tokens + block / R * (kTokenBytes / 16), first + step);
          wgmma_commit();
          const auto fetch = [&] {  // the next block
            if (block + 1 < R * K_BLOCKS) return load(block + 1);
            stage.advance();
            if (turn == turns) return;
            mbarrier_wait(mbarrier_address(&footer()->full), stage.parity);
            load(0);
          };
          if (kSteps == 4) fetch();
          wgmma_wait<1>();  // the products that read the buffer to be overwritten
          if (i == 0) release(before);
          decode(i + 1);  // one too many behind the last: its result is not used
          if (kSteps == 2 && first == 0) fetch();
        }
        tokens += (stage.begin - now) >> 4;
        before = now;
      }
      if constexpr (RANK > 0 && !kEarly) load_adapter<R, RANK>(adapter, all, at.expert, n0, g, t);
      wgmma_wait<0>();
      keep_behind(acc);
      if constexpr (RANK > 0) {
        for_each_sum(acc, [&](float& sum, int i) { sum *= rows.factor[i / (4 * N) % R][i % 4 / 2] * kUnscale<BF16>; });
        mbarrier_wait(mbarrier_address(&footer()->full), stage.parity);
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < RANK; ++block)
#pragma unroll
          for (int r = 0; r < R; ++r) wgmma<BF16, N>(acc[r], adapter[block][r], tokens, block);
        wgmma_commit();
        wgmma_wait<0>();
        keep_behind(acc);
        release(stage.begin);
        const int now = stage.begin;
        stage.advance();
        tokens += (stage.begin - now) >> 4;
#pragma unroll
        for (int r = 0; r < R; ++r) rows.factor[r][0] = rows.factor[r][1] = 1.0f / kUnscale<BF16>;
      }
      keep_apart<-N>();
      release(before);
      if constexpr (STREAM_K) {
        if (work.contributors < 0) return store_partial_sums<R, N, C>(args, acc, warpgroup, WG);
        reduce_partial_sums<R, N, C>(args, acc, warpgroup, WG, work.contributors);
      }
      if constexpr (SCALED) {
        named_barrier_sync(1 + warpgroup, 128);  // the epilogue of the tile before has read row_scale
#pragma unroll
        for (int i = 0; i < 2; ++i) row_scale[threadIdx.x % 128 + 128 * i] = own_scale[i];
        named_barrier_sync(1 + warpgroup, 128);
      }
      store<BF16, SWIGLU, N, R, 64>(
          args, acc, rows, [&](int i) { return SCALED ? row_scale[i] : 1.0f; }, at.row0, at.end, n0, g, t);
    };
    // A tile that is not full takes narrower products, where registers suffice for all three instances.
    if constexpr (C * R <= (WG < 3 ? 40 : 24)) {
      constexpr int kLess = C <= 12 ? 2 : C <= 24 ? 4 : 8;
      const int empty = C - (at.end - at.row0 + 7) / 8;
      if constexpr (C - 2 * kLess >= 2) {
        if (empty >= 2 * kLess) {
          multiply_tokens(Number<C - 2 * kLess>());
          continue;
        }
      }
      if constexpr (C - kLess >= 2) {
        if (empty >= kLess) {
          multiply_tokens(Number<C - kLess>());
          continue;
        }
      }
    }
    multiply_tokens(Number<C>());
  }
}

template <bool BF16, bool SWIGLU, bool SCALED, int C, int R, int WG, int K_BLOCKS, bool STREAM_K, int STAGES>
__global__ void __launch_bounds__(128 * (WG + 1), 1) grouped_mm_tiled_wgmma(const __grid_constant__ TmaGemmArguments all) {
  await_previous_kernel();
  multiply_tiled<BF16, SWIGLU, SCALED, C, R, WG, K_BLOCKS, STREAM_K, STAGES, 0, RowsOfBlock>(all);
}

template <bool BF16, int C, int R, int WG, int K_BLOCKS, int STAGES, int RANK>
__global__ void __launch_bounds__(128 * (WG + 1), 1) low_rank_tiled_wgmma(const __grid_constant__ LowRankGemmArguments all) {
  await_previous_kernel();
  multiply_tiled<BF16, false, false, C, R, WG, K_BLOCKS, false, STAGES, RANK, RowsOfBlock>(all);
}
#endif
