// Grouped GEMM of few 16-bit rows per expert with packed weights in layout "tiled_64x64", by mma.sync (SM90).
// Compiled at run time by kernels/cuda/nvrtc.py behind tile_scheduler.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Bound by memory: the producer keeps the stages full, and a consumer does little more for 16 rows by 16 k than decode them.

template <bool VALUE>
struct Flag {
  static constexpr bool value = VALUE;
};

// SCALED: there is a slot_scale; FULL: K is a multiple of a stage's; C: blocks of 8 tokens of a tile; R: blocks of 64 weight
// rows of a warpgroup (SwiGLU: one of gate, one of up); WN, WK: warpgroups along N and along K; K_BLOCKS: blocks of 64 k of a
// warpgroup in a stage; STREAM_K: thread blocks may share tiles.
template <bool BF16, bool SWIGLU, bool SCALED, bool FULL, int C, int R, int WN, int WK, int K_BLOCKS, bool STREAM_K, int STAGES>
__global__ void __launch_bounds__(128 * WN * WK + 32, 1) grouped_mm_tiled_mma(const GemmArguments args) {
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(C <= 4, "a lane finds one token");
  constexpr int kConsumers = 128 * WN * WK, kTokens = 8 * C;
  constexpr int kBlocks = WN * R, kKBlocks = WK * K_BLOCKS;  // of weights in a stage, along N and along K
  constexpr int kTileRows = 64 * WN * (SWIGLU ? 1 : R);  // output features
  // Byte offsets in a stage: codes at 0, then scales, both [kBlocks][kKBlocks] blocks, the tokens [kTokens][kPitch], the footer.
  constexpr int kScales = kBlocks * kKBlocks * kBlockCodes, kInput = kScales + kBlocks * kKBlocks * kBlockScales;
  constexpr int kPitch = 128 * kKBlocks + 16;  // an odd number of 16 bytes, against bank conflicts of ldmatrix
  constexpr int kEnd = kInput + kTokens * kPitch;
  constexpr int kStage = (kEnd + sizeof(StageFooter) + 127) / 128 * 128;  // for the copy engine
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage]; with WK > 1 then partial sums [2][WK][WN][R * C][128]
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ const uint16_t* token_of[kTokens];
  __shared__ volatile uint32_t scale_top;  // volatile, so that the compiler does not know its value

  uint8_t* const memory = reinterpret_cast<uint8_t*>(align_shared(unaligned, 128));
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that the compiler knows it is uniform
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int all_k_blocks = args.k / kBlock;
  TileScheduler<STREAM_K, 2> scheduler((features + kTileRows - 1) / kTileRows, (all_k_blocks + kKBlocks - 1) / kKBlocks);
  if (threadIdx.x == kConsumers) {
    init_pipeline<STAGES, kStage>(memory + kEnd, kConsumers / 32);
    fence_mbarrier_init();
    scale_top = 0x70007000;
  }
  // With x_from_previous_kernel only the producer waits, before it reads x. Consumers see x in shared memory, so everything that
  // they store comes after that wait.
  const bool late = args.x_from_previous_kernel;
  const bool early = late || args.offsets == nullptr;  // tiles are counted without a look at memory
  if (!early) await_previous_kernel();
  if (warp == 0) count_tiles_by_warp(args, kTokens, tile_start, row_start);
  if (early && !late) await_previous_kernel();
  __syncthreads();
  PipelineState<STAGES, kStage> stage;
  auto footer = [&] { return reinterpret_cast<StageFooter*>(memory + stage.begin + kEnd); };

  if (warp == kConsumers / 32) {  // the producer
    const bool elected = elect_one();
    const CachePolicy usual = cache_policy(false);
    // With kWaits the first tile of a block that has to wait for x: its weights fill the ring meanwhile. Else they are one stage
    // ahead, copied before the addresses of the tokens are known. Two instances, because one loop with a lead known at run time
    // is slower: a layer of Qwen3-30B-A3B took 97 us instead of 89 at 32 tokens, 120 instead of 112 at 128 (H200).
    auto copy_tile = [&](auto waits) {
      constexpr bool kWaits = decltype(waits)::value;
      const Tile at = scheduler.find(args, tile_start, row_start, kTokens);
      const int first_k_block = scheduler.first * kKBlocks, k_blocks = min(scheduler.last * kKBlocks, all_k_blocks) - first_k_block;
      const int live = min(at.end - at.row0, kTokens);
      WeightCopies<SWIGLU, kBlocks, kKBlocks> copy(args, at.expert, at.tile_n * kTileRows, first_k_block);
      auto copy_weights = [&](const PipelineState<STAGES, kStage>& to_stage, int count) {
        uint8_t* const to = memory + to_stage.begin;
        StageFooter* const end = reinterpret_cast<StageFooter*>(to + kEnd);
        acquire_stage(end, to_stage.parity, {at, k_blocks, scheduler.contributors()}, count * (kBlocks * (kBlockCodes + kBlockScales) + live * 128));
        copy(reinterpret_cast<uint4*>(to), reinterpret_cast<uint4*>(to + kScales), count, mbarrier_address(&end->full));
      };
      auto copy_tokens = [&](int k_block, int count) {
        uint8_t* const to = memory + stage.begin + kInput;
        const MbarrierAddress full = mbarrier_address(&footer()->full);
        for (int token = 0; token < live; ++token) copy_bulk(to + token * kPitch, token_of[token] + k_block * kBlock, count * 128, full, usual);
        stage.advance();
      };
      constexpr int kLead = kWaits ? STAGES * kKBlocks : kKBlocks;  // blocks of 64 k
      if constexpr (kWaits) {
        if (elected) {
          PipelineState<STAGES, kStage> ahead;
#pragma unroll 1
          for (int k_block = 0; k_block < min(k_blocks, kLead); k_block += kKBlocks) {
            copy_weights(ahead, min(k_blocks - k_block, kKBlocks));
            ahead.advance();
          }
        }
        await_previous_kernel();
      } else if (elected) {
        copy_weights(stage, min(k_blocks, kKBlocks));
      }
      if (lane < live) token_of[lane] = token_of_row(args, at.row0 + lane, at.end) + first_k_block * kBlock;
      __syncwarp();
      if (elected) {
        copy_tokens(0, min(k_blocks, kKBlocks));
        for (int k_block = kKBlocks; k_block < k_blocks; k_block += kKBlocks) {
          const int count = min(k_blocks - k_block, kKBlocks);
          if (k_block >= kLead) copy_weights(stage, count);
          copy_tokens(k_block, count);
        }
      }
      __syncwarp();
    };
    scheduler.begin(args.tile_counter, tile_start[args.num_experts]);
    if (late) {
      if (scheduler.valid()) {
        copy_tile(Flag<true>());
        scheduler.advance();
      } else {
        await_previous_kernel();
      }
    }
    for (; scheduler.valid(); scheduler.advance()) copy_tile(Flag<false>());
    if (elected) acquire_stage(footer(), stage.parity, kEndOfWork, 0);
    return;
  }

  const int g = lane / 4, t = lane % 4;
  const int group = warp / 4, warp_k = group % WK, warp_n = group / WK;  // warpgroup
  float* const partial = reinterpret_cast<float*>(memory + STAGES * kStage);
  // Where this thread reads in the first stage.
  const uint8_t* const codes_of_ring = memory + ((warp_n * R * kKBlocks + warp_k) * (kBlockCodes / 16) + warp % 4 * (kBlockCodes / 64) + lane) * 16;
  const uint8_t* const scales_of_ring = memory + kScales + (warp_n * R * kKBlocks + warp_k) * kBlockScales + (warp % 4 * 8 + g) * (kBlockScales / 32);
  const uint8_t* const tokens_of_ring = memory + kInput + lane % 8 * kPitch + (8 * warp_k + lane / 8) * 16;
  const uint32_t top = scale_top;  // from memory, so that it stays in a register
  for (int turn = 0;; ++turn) {
    mbarrier_wait(mbarrier_address(&footer()->full), stage.parity);
    const WorkItem work = read_work_item(footer());
    const Tile& at = work.tile;
    if (at.expert < 0) return;
    const int n0 = at.tile_n * kTileRows + warp_n * (SWIGLU ? 64 : 64 * R) + warp % 4 * 16;
    RowFactors<R> rows;  // loaded early, used in the epilogue
    rows.template load<SWIGLU, 64>(args, at.expert, n0, g);
    float row_scale[C][2];
    if constexpr (SCALED)
#pragma unroll
      for (int c = 0; c < C; ++c)
#pragma unroll
        for (int column = 0; column < 2; ++column) row_scale[c][column] = scale_of_row(args, at.row0 + 8 * c + 2 * t + column, at.end);
    float acc[R][C][4] = {};
    for (int k_block = 0; k_block < work.k_blocks; k_block += kKBlocks) {
      mbarrier_wait(mbarrier_address(&footer()->full), stage.parity);
      const uint4* const codes_from = reinterpret_cast<const uint4*>(codes_of_ring + stage.begin);
      const TiledScales* const scales_from = reinterpret_cast<const TiledScales*>(scales_of_ring + stage.begin);
      const uint4* const tokens_from = reinterpret_cast<const uint4*>(tokens_of_ring + stage.begin);
      // Double-buffered in registers: block i + 1 is loaded before block i is multiplied.
      uint32_t x[2][C][2][4];
      TiledCodes codes[2][R];
      TiledScales scales[2][R];
      auto load = [&](int i) {
        if (i >= K_BLOCKS || (!FULL && k_block + WK * i + warp_k >= work.k_blocks)) return;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          codes[i % 2][r] = load_codes(codes_from + (r * kKBlocks + WK * i) * (kBlockCodes / 16));
          scales[i % 2][r] = scales_from[(r * kKBlocks + WK * i) * (kBlockScales / sizeof(TiledScales))];
        }
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            ldmatrix_x4(x[i % 2][c][half], tokens_from + 8 * c * (kPitch / 16) + 8 * WK * i + 4 * half);
      };
      load(0);
#pragma unroll
      for (int i = 0; i < K_BLOCKS; ++i) {
        load(i + 1);
        if (!FULL && k_block + WK * i + warp_k >= work.k_blocks) break;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int r = 0; r < R; ++r) {
            uint32_t a[2][4];
            decode_part<BF16>(a[0], a[1], codes[i % 2][r], scales[i % 2][r], half, top);
#pragma unroll
            for (int c = 0; c < C; ++c) {
              mma<BF16>(acc[r][c], a[0], x[i % 2][c][half][0], x[i % 2][c][half][1]);
              mma<BF16>(acc[r][c], a[1], x[i % 2][c][half][2], x[i % 2][c][half][3]);
            }
          }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(mbarrier_address(&footer()->empty));
      stage.advance();
    }

    if constexpr (WK > 1) {  // sum over the warpgroups along K in a fixed order; they take turns at the epilogue
      constexpr int kShare = R * C * 128 * 4;  // of a warpgroup
      const int last = turn % WK;
      float* const shares = partial + (turn % 2 * WN + warp_n) * WK * kShare + threadIdx.x % 128;
      if (warp_k != last) for_each_sum(acc, [&](float& sum, int i) { shares[warp_k * kShare + i * 128] = sum; });
      named_barrier_sync(1 + warp_n, 128 * WK);
      if (warp_k != last) continue;
      for_each_sum(acc, [&](float& own, int i) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WK; ++other) sum += other == last ? own : shares[other * kShare + i * 128];
        own = sum;
      });
    }
    if constexpr (STREAM_K) {
      const bool one_row = args.row_sums != nullptr && at.end - at.row0 == 1;
      if (work.contributors < 0) {
        if (one_row) send_row(args, acc, warp_n, WN);
        else store_partial_sums(args, acc, warp_n, WN);
        continue;
      }
      if (one_row) receive_row(args, acc, warp_n, WN, work.contributors);
      else reduce_partial_sums(args, acc, warp_n, WN, work.contributors);
    }
    store<BF16, SWIGLU, C, R, 64>(
        args, acc, rows, [&](int i) { return SCALED ? row_scale[i / 8][i % 2] : 1.0f; }, at.row0, at.end, n0, g, t);
  }
}
