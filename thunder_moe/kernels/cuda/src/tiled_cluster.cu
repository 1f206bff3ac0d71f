// GEMM of 16-bit rows with one packed weight in layout "tiled_64x64", by wgmma, K split over the blocks of a cluster (SM90).
// Compiled at run time by kernels/cuda/nvrtc.py behind wgmma.cuh and pipeline.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// For few tiles: a tile's K is cut into SPLITS * WK parts, so that all multiprocessors decode. Each part is multiplied by one
// warpgroup for each 64 rows of weights, which then sends its sums to the parts that own them, through distributed shared memory.

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct alignas(16) StageBarriers {
  Mbarrier full, empty;
};

// Not persistent: a cluster computes one tile. C: blocks of 8 tokens of a tile; WN, WK: warpgroups along N and along K; K_BLOCKS:
// blocks of 64 k of a warpgroup in a stage; SPLITS: blocks of a cluster, along K.
template <bool BF16, int C, int WN, int WK, int K_BLOCKS, int SPLITS, int STAGES>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(128 * WN * WK + 32, 1) mm_tiled_cluster(const __grid_constant__ TmaGemmArguments all) {
  constexpr int kConsumers = 128 * WN * WK, kTokens = 8 * C, kKBlocks = WK * K_BLOCKS;
  constexpr int kParts = SPLITS * WK, kOwned = (C + kParts - 1) / kParts;  // parts of K; blocks of tokens that a part owns
  // Byte offsets in a stage: tokens [kKBlocks][kTokens][64] at 0, the codes and scales, both [WN][kKBlocks] blocks, the barriers.
  constexpr int kTokenBytes = 128 * kTokens, kCodes = kKBlocks * kTokenBytes, kScales = kCodes + WN * kKBlocks * kBlockCodes;
  constexpr int kEnd = kScales + WN * kKBlocks * kBlockScales;
  constexpr int kStage = (kEnd + sizeof(StageBarriers) + 1023) / 1024 * 1024;  // for the swizzle
  CLUSTER_SHARED(uint4, unaligned, SPLITS);  // [STAGES][kStage], sums [WN][WK][kOwned][kParts - 1][128][4], a barrier, a word

  const GemmArguments& args = all.gemm;
  uint8_t* const memory = reinterpret_cast<uint8_t*>(align_shared(unaligned, 1024));
  float* const sums = reinterpret_cast<float*>(memory + STAGES * kStage);
  Mbarrier* const received = reinterpret_cast<Mbarrier*>(sums + WN * WK * kOwned * (kParts - 1) * 512);
  volatile uint32_t* const scale_top = reinterpret_cast<volatile uint32_t*>(received + 1);  // volatile, so that the compiler does not know its value
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that the compiler knows it is uniform
  const int rank = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS;
  const int tiles_m = (args.rows + kTokens - 1) / kTokens;
  const int row0 = tile % tiles_m * kTokens, tile_n = tile / tiles_m;
  const int stages_k = args.k / (kBlock * kKBlocks);
  const int first = rank * stages_k / SPLITS, turns = (rank + 1) * stages_k / SPLITS - first;  // stages
  PipelineState<STAGES, kStage> stage;
  auto barriers = [&](int begin) { return reinterpret_cast<StageBarriers*>(memory + begin + kEnd); };
  if (threadIdx.x == kConsumers) {
    prefetch_tensor_map(&all.x);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(mbarrier_address(&barriers(i * kStage)->full), 1);
      mbarrier_init(mbarrier_address(&barriers(i * kStage)->empty), kConsumers / 32);
    }
    mbarrier_init(mbarrier_address(received), 1);
    *scale_top = 0x70007000;
    fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (SPLITS > 1) cluster_arrive();
  // Threads that read global memory wait for the kernel before. With x_from_previous_kernel only the producer waits, before it
  // reads x. Consumers see x in shared memory, so everything that they store comes after that wait.
  const bool late = args.x_from_previous_kernel;

  if (warp == kConsumers / 32) {  // the producer
    const bool elected = elect_one();
    const int lead = late ? min(turns, STAGES) : 0;  // stages whose weights are copied before the wait
    WeightCopies<false, WN, kKBlocks> copy(args, 0, tile_n * 64 * WN, first * kKBlocks);
    auto copy_weights = [&](int begin) {
      const MbarrierAddress full = mbarrier_address(&barriers(begin)->full);
      mbarrier_arrive_expect_tx(full, kEnd);
      copy(reinterpret_cast<uint4*>(memory + begin + kCodes), reinterpret_cast<uint4*>(memory + begin + kScales), kKBlocks, full);
    };
    if (elected) {
      if constexpr (kParts > 1) {  // of the sums of this block's parts
        int bytes = 0;
#pragma unroll
        for (int c = 0; c < C; ++c) bytes += c % kParts / WK == rank ? WN * (kParts - 1) * 2048 : 0;
        mbarrier_arrive_expect_tx(mbarrier_address(received), bytes);
      }
      for (int turn = 0; turn < lead; ++turn) copy_weights(turn * kStage);
    }
    await_previous_kernel();
    if (elected)
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn) {
        if (turn >= STAGES) mbarrier_wait(mbarrier_address(&barriers(stage.begin)->empty), stage.parity ^ 1);
        if (turn >= lead) copy_weights(stage.begin);
        const MbarrierAddress full = mbarrier_address(&barriers(stage.begin)->full);
#pragma unroll
        for (int k_block = 0; k_block < kKBlocks; ++k_block)
          tma_load_box(memory + stage.begin + k_block * kTokenBytes, &all.x, ((first + turn) * kKBlocks + k_block) * kBlock, row0, full);
        stage.advance();
      }
    __syncwarp();
    if constexpr (SPLITS > 1) cluster_wait();
    return;
  }

  const int g = lane / 4, t = lane % 4;
  const int group = warp / 4, warp_k = group % WK, warp_n = group / WK;  // warpgroup
  const int part = rank * WK + warp_k, n0 = (tile_n * WN + warp_n) * 64 + warp % 4 * 16;
  // Where this thread reads in the first stage.
  const uint8_t* const codes = memory + kCodes + ((warp_n * kKBlocks + warp_k * K_BLOCKS) * (kBlockCodes / 16) + warp % 4 * (kBlockCodes / 64) + lane) * 16;
  const uint8_t* const scales = memory + kScales + (warp_n * kKBlocks + warp_k * K_BLOCKS) * kBlockScales + (warp % 4 * 8 + g) * (kBlockScales / 32);
  MatrixDescriptor tokens = matrix_descriptor(reinterpret_cast<const uint4*>(memory + warp_k * K_BLOCKS * kTokenBytes));  // of the stage
  if (!late) await_previous_kernel();
  RowFactors<1> rows;  // loaded early, used in the epilogue
  rows.template load<false, 64>(args, 0, n0, g);
  const uint32_t top = *scale_top;  // from memory, so that it stays in a register
  constexpr int kSteps = C <= (WN * WK < 3 ? 28 : WN * WK == 3 ? 16 : 8) && K_BLOCKS % 2 == 0 ? 4 : 2, kPieces = 4 / kSteps;
  float acc[1][C][4] = {};
  uint32_t a[2][kSteps][4];  // double-buffers 64 rows by kSteps * 16 k: one half is multiplied while the other is decoded
  TiledCodes code;
  TiledScales scale;
  auto load = [&](int block) {
    code = load_codes(reinterpret_cast<const uint4*>(codes + stage.begin + block * kBlockCodes));
    scale = *reinterpret_cast<const TiledScales*>(scales + stage.begin + block * kBlockScales);
  };
  auto decode = [&](int i) {  // piece i of the loaded block
    if (kSteps == 4 || i % 2 == 0) decode_part<BF16>(a[i % 2][0], a[i % 2][1], code, scale, 0, top);
    if (kSteps == 4 || i % 2 == 1) decode_part<BF16>(a[i % 2][kSteps - 2], a[i % 2][kSteps - 1], code, scale, 1, top);
  };
  mbarrier_wait(mbarrier_address(&barriers(0)->full), 0);
  load(0);
  decode(0);
  int before = 0;  // the offset of the stage before this one
  for (int turn = 1; turn <= turns; ++turn) {
    const int now = stage.begin;
#pragma unroll
    for (int i = 0; i < K_BLOCKS * kPieces; ++i) {
      const int block = i / kPieces, first_step = i % kPieces * kSteps;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) wgmma<BF16, C>(acc[0], a[i % 2][step], tokens + block * (kTokenBytes / 16), first_step + step);
      wgmma_commit();
      const auto fetch = [&] {  // the next block
        if (block + 1 < K_BLOCKS) return load(block + 1);
        stage.advance();
        if (turn == turns) return;
        mbarrier_wait(mbarrier_address(&barriers(stage.begin)->full), stage.parity);
        load(0);
      };
      if (kSteps == 4) fetch();
      wgmma_wait<1>();  // the products that read the buffer to be overwritten
      if (i == 0 && turn > 1 && turn - 2 + STAGES < turns) {  // that stage is filled again
        __syncwarp();
        if (lane == 0) mbarrier_arrive(mbarrier_address(&barriers(before)->empty));
      }
      decode(i + 1);  // one too many behind the last: its result is not used
      if (kSteps == 2 && first_step == 0) fetch();
    }
    tokens += (stage.begin - now) >> 4;
    before = now;
  }
  wgmma_wait<0>();
  keep_behind(acc);

  const auto unscaled = [](int) { return 1.0f; };
  if constexpr (kParts == 1) {
    store<BF16, false, C, 1, 64>(args, acc, rows, unscaled, row0, args.rows, n0, g, t);
  } else {
    // Sums of block c of tokens belong to part c % kParts, which adds the sums of all parts in their order.
    const int thread = threadIdx.x % 128;
    if constexpr (SPLITS > 1) cluster_wait();  // all blocks have begun, their barriers are initialized
#pragma unroll
    for (int owner = 0; owner < min(kParts, C); ++owner) {
      if (owner == part) continue;
      const int place = (warp_n * WK + owner % WK) * kOwned * (kParts - 1) + part - (part > owner);
      const RemotePlace to = remote_place(sums + (place * 128 + thread) * 4, received, owner / WK);
#pragma unroll
      for (int c = owner; c < C; c += kParts) send_floats(to, c / kParts * (kParts - 1) * 2048, acc[0][c]);
    }
    mbarrier_wait_cluster(mbarrier_address(received), 0);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int owner = c % kParts;
      if (owner != part) continue;
      float total[1][1][4] = {};
#pragma unroll
      for (int other = 0; other < kParts; ++other) {
        const int place = ((warp_n * WK + warp_k) * kOwned + c / kParts) * (kParts - 1) + other - (other > owner);
        const float* const from = sums + (place * 128 + thread) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) total[0][0][i] += other == owner ? acc[0][c][i] : from[i];
      }
      store<BF16, false, 1, 1, 64>(args, total, rows, unscaled, row0 + 8 * c, args.rows, n0, g, t);
    }
  }
}
#endif
