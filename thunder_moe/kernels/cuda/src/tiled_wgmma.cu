// Grouped GEMM of many 16-bit rows per expert with NVFP4 weights in layout "tiled_64x64", by wgmma (SM90).
// Compiled at run time by kernels/cuda.py behind wgmma.cuh and tiled.cuh; run on a CPU by tests/kernels/cuda_emulator.h.
//
// The tensor cores are the limit here: while they work on one 64 k of a warpgroup's rows, the warpgroup decodes the next.

struct TiledArguments {
  TensorMap x;     // of gemm.x, in boxes of a tile's tokens
  Arguments gemm;  // row_slot has been applied to x, it is for slot_scale alone
};

__global__ void __launch_bounds__(256) gather_rows(const GatherArguments args) {
  await_previous_kernel();
  const int units = args.k / 8;
  const int64_t items = static_cast<int64_t>(args.rows) * units;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; item < items; item += static_cast<int64_t>(gridDim.x) * 256) {
    const int row = static_cast<int>(item / units), unit = static_cast<int>(item - static_cast<int64_t>(row) * units);
    const int64_t from = static_cast<int64_t>(slot_of_row(args.row_slot, row, args.rows) / args.top_k) * units + unit;
    reinterpret_cast<uint4*>(args.out)[item] = reinterpret_cast<const uint4*>(args.x)[from];
  }
}

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

// SCALED: whether there is a slot_scale; C: blocks of 8 tokens of a tile, at most; R: blocks of 64 weight rows of a warpgroup
// (SwiGLU: one of gate, one of up); WG: warpgroups that multiply, one more copies; SUB: 64 k of a stage, K has a multiple.
// One block runs tile after tile.
template <bool BF16, bool SWIGLU, bool SCALED, int C, int R, int WG, int SUB, int STAGES>
__global__ void __launch_bounds__(128 * (WG + 1), 1) grouped_mm_tiled_wgmma(const __grid_constant__ TiledArguments all) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  constexpr int kTokens = 8 * C, kBlocks = WG * R;
  constexpr int kTileRows = 64 * WG * (SWIGLU ? 1 : R);  // output features
  // Where in a stage lie, in bytes, the tokens [SUB][kTokens][64], the codes and scales [kBlocks][SUB] of blocks, and its
  // end.
  constexpr int kTokenBytes = 128 * kTokens, kCodes = SUB * kTokenBytes, kScales = kCodes + kBlocks * SUB * kBlockCodes * 16;
  constexpr int kEnd = kScales + kBlocks * SUB * kBlockScales * 16;
  constexpr int kStage = (kEnd + sizeof(StageEnd) + 1023) / 1024 * 1024;  // for the swizzle
  constexpr int kNoStage = STAGES * kStage - kEnd;  // begins where it has an end, and nothing else
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage], the end of kNoStage, scales of rows [WG][256] where SCALED
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ volatile uint32_t scale_top;  // volatile: the compiler is not to know what is in it

  const Arguments& args = all.gemm;
  uint8_t* const memory = reinterpret_cast<uint8_t*>(align_shared(unaligned, 1024));
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be a warp's
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int stages_k = args.k / (kBlock * SUB);
  Units<false, 6> units((features + kTileRows - 1) / kTileRows, stages_k);
  if (warp == 0) count_tiles_by_warp(args, kTokens, tile_start, row_start);
  if (threadIdx.x == 128 * WG) {
    prefetch_map(&all.x);
    scale_top = 0x70007000;
    init_ring<STAGES, kStage>(memory + kEnd, 4 * WG);
    init_ring<1, kStage>(memory + kNoStage + kEnd, 4 * WG);
    fence_barriers();
  }
  __syncthreads();
  Ring<STAGES, kStage> stage;
  auto end_of_stage = [&] { return reinterpret_cast<StageEnd*>(memory + stage.begin + kEnd); };

  if (warp >= 4 * WG) {
    shrink_registers<(WG == 1 ? 56 : WG == 2 ? 40 : 32)>();
    if (warp != 4 * WG) return;
    const bool elected = is_elected();
    for (units.begin(args.tiles_asked, tile_start[args.experts]); units.any(); units.advance()) {
      const Tile at = units.find(args, tile_start, row_start, kTokens);
      WeightCopies<SWIGLU, kBlocks, SUB> copy(args, at.expert, at.tile_n * kTileRows, 0);
      if (elected)
#pragma unroll 1
        for (int k = 0; k < args.k; k += SUB * kBlock) {
          announce(end_of_stage(), stage.parity, {at, 0, 0}, kEnd);
          uint8_t* const to = memory + stage.begin;
          const BarrierAt full = barrier_at(&end_of_stage()->full);
#pragma unroll
          for (int sub = 0; sub < SUB; ++sub) copy_box(to + sub * kTokenBytes, &all.x, k + sub * kBlock, at.row0, full);
          copy(reinterpret_cast<uint4*>(to + kCodes), reinterpret_cast<uint4*>(to + kScales), SUB, full);
          stage.advance();
        }
      __syncwarp();
    }
    if (elected) announce(end_of_stage(), stage.parity, kNoWork, 0);
    return;
  }

  grow_registers<(WG == 1 ? 256 - 56 : WG == 2 ? 232 : WG == 3 ? 160 : 112)>();
  const int g = lane / 4, t = lane % 4, warpgroup = warp / 4;
  // What this thread reads of the first stage.
  const uint8_t* const codes = memory + kCodes + warpgroup * R * SUB * kBlockCodes * 16 + (warp % 4 * 32 + lane) * 16;
  const uint8_t* const scales = memory + kScales + warpgroup * R * SUB * kBlockScales * 16 + (warp % 4 * 8 + g) * 8;
  TileDescriptor tokens = describe(reinterpret_cast<const uint4*>(memory));  // of the stage
  float* const row_scale = reinterpret_cast<float*>(memory + STAGES * kStage + sizeof(StageEnd)) + 256 * warpgroup;
  const uint32_t top = scale_top;  // from memory, so that it stays in a register
  for (;;) {
    wait(barrier_at(&end_of_stage()->full), stage.parity);
    const Tile at = read_work(end_of_stage()).at;
    if (at.expert < 0) return;
    const int n0 = at.tile_n * kTileRows + warpgroup * (SWIGLU ? 64 : 64 * R) + warp % 4 * 16;
    RowFactors<R> rows;  // asked for here, needed behind the loop
    rows.template load<SWIGLU, 64>(args, at.expert, n0, g);
    float own_scale[2];  // of two of the tile's rows, likewise
    if constexpr (SCALED)
#pragma unroll
      for (int i = 0; i < 2; ++i) own_scale[i] = scale_of_row(args, at.row0 + threadIdx.x % 128 + 128 * i, at.end);

    // All k of the tile's first 8 * N tokens. `a` has the left operands of two pieces of 64 rows, with kSteps times 16 k as
    // registers allow: one is multiplied while the other is decoded. What tokens do not exist are multiplied, and not stored.
    auto multiply_tokens = [&](auto number) {
      constexpr int N = decltype(number)::value;
      constexpr int kSteps = R * N <= (WG < 3 ? 28 : WG == 3 ? 12 : 4) && R * SUB % 2 == 0 ? 4 : 2, kPieces = 4 / kSteps;
      float acc[R][N][4] = {};
      keep_apart<N>();
      uint32_t a[2][kSteps][4];
      uint4 code;
      uint2 scale;
      auto load = [&](int block) {  // of the stage: R blocks of rows of 64 k, then of the next
        const int at = block % R * SUB + block / R;
        code = *reinterpret_cast<const uint4*>(codes + stage.begin + at * kBlockCodes * 16);
        scale = *reinterpret_cast<const uint2*>(scales + stage.begin + at * kBlockScales * 16);
      };
      auto decode = [&](int i) {  // piece i, of the block that has been loaded
        if (kSteps == 4 || i % 2 == 0) decode_steps<BF16>(a[i % 2][0], a[i % 2][1], code.x, code.y, scale.x, top);
        if (kSteps == 4 || i % 2 == 1) decode_steps<BF16>(a[i % 2][kSteps - 2], a[i % 2][kSteps - 1], code.z, code.w, scale.y, top);
      };
      auto release = [&](int begin) {  // the stage that begins there
        __syncwarp();
        if (lane == 0) arrive(barrier_at(&reinterpret_cast<StageEnd*>(memory + begin + kEnd)->empty));
      };
      load(0);
      decode(0);
      int before = kNoStage;  // where the stage before this one begins
      for (int turn = 1; turn <= stages_k; ++turn) {
        const int now = stage.begin;
#pragma unroll
        for (int i = 0; i < R * SUB * kPieces; ++i) {
          const int block = i / kPieces, first = i % kPieces * kSteps;
          fence_registers();
#pragma unroll
          for (int step = 0; step < kSteps; ++step) wgmma<BF16, N>(acc[block % R], a[i % 2][step], tokens + block / R * (kTokenBytes / 16), first + step);
          commit_products();
          const auto fetch = [&] {  // the next block
            if (block + 1 < R * SUB) return load(block + 1);
            stage.advance();
            if (turn == stages_k) return;
            wait(barrier_at(&end_of_stage()->full), stage.parity);
            load(0);
          };
          if (kSteps == 4) fetch();
          wait_for_products<1>();  // those that read the other operand
          if (i == 0) release(before);
          decode(i + 1);  // behind the last, for nothing
          if (kSteps == 2 && first == 0) fetch();
        }
        tokens += (stage.begin - now) >> 4;
        before = now;
      }
      wait_for_products<0>();
      keep_apart<-N>();
      release(before);
      if constexpr (SCALED) {
        meet(1 + warpgroup, 128);  // the tile before has been stored
#pragma unroll
        for (int i = 0; i < 2; ++i) row_scale[threadIdx.x % 128 + 128 * i] = own_scale[i];
        meet(1 + warpgroup, 128);
      }
      store<BF16, SWIGLU, N, R, 64>(
          args, acc, rows, [&](int i) { return SCALED ? row_scale[i] : 1.0f; }, at.row0, at.end, n0, g, t);
    };
    // A tile that is not full is multiplied by less, where registers suffice for all three codes.
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
#endif
