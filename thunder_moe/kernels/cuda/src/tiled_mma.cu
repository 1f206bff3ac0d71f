// Grouped GEMM of few 16-bit rows per expert with NVFP4 weights in layout "tiled_64x64", by mma.sync (SM90).
// Compiled at run time by kernels/cuda.py behind tiled.cuh; run on a CPU by tests/kernels/cuda_emulator.h.
//
// Memory is the limit here: the producer keeps the stages full, and what a consumer does for 16 rows by 16 k is little
// more than decoding them.

// SCALED: whether there is a slot_scale; FULL: K is a multiple of a stage; C: blocks of 8 tokens of a tile; R: blocks of 64
// weight rows of a warpgroup (SwiGLU: one of gate, one of up); WN, WK: warpgroups along N and along K; SUB: 64 k of a
// warpgroup in a stage; SHARED: whether blocks may share tiles.
template <bool BF16, bool SWIGLU, bool SCALED, bool FULL, int C, int R, int WN, int WK, int SUB, bool SHARED, int STAGES>
__global__ void __launch_bounds__(128 * WN * WK + 32, 1) grouped_mm_tiled_mma(const Arguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(C <= 4, "a lane finds one token");
  constexpr int kConsumers = 128 * WN * WK, kTokens = 8 * C;
  constexpr int kBlocks = WN * R, kSubs = WK * SUB;  // of weights in a stage, along N and along K
  constexpr int kTileRows = 64 * WN * (SWIGLU ? 1 : R);  // output features
  // Where in a stage lie, in bytes, the codes and scales [kBlocks][kSubs] of blocks, the tokens [kTokens][kPitch], and its end.
  constexpr int kScales = kBlocks * kSubs * kBlockCodes * 16, kInput = kScales + kBlocks * kSubs * kBlockScales * 16;
  constexpr int kPitch = 128 * kSubs + 16;  // an odd number of 16 bytes, for the banks of load_matrices
  constexpr int kEnd = kInput + kTokens * kPitch;
  constexpr int kStage = (kEnd + sizeof(StageEnd) + 127) / 128 * 128;  // for the copy engine
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage], then partial sums [2][WK][WN][R * C][128] where WK > 1
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ const uint16_t* token_of[kTokens];
  __shared__ volatile uint32_t scale_top;  // volatile: the compiler is not to know what is in it

  uint8_t* const memory = reinterpret_cast<uint8_t*>(align_shared(unaligned, 128));
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be a warp's
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int all_subs = args.k / kBlock;
  Units<SHARED, 2> units((features + kTileRows - 1) / kTileRows, (all_subs + kSubs - 1) / kSubs);
  if (warp == 0) count_tiles_by_warp(args, kTokens, tile_start, row_start);
  if (threadIdx.x == kConsumers) {
    init_ring<STAGES, kStage>(memory + kEnd, kConsumers / 32);
    fence_barriers();
    scale_top = 0x70007000;
  }
  __syncthreads();
  Ring<STAGES, kStage> stage;
  auto end_of_stage = [&] { return reinterpret_cast<StageEnd*>(memory + stage.begin + kEnd); };

  if (warp == kConsumers / 32) {  // copies
    const bool elected = is_elected();
    const CachePolicy usual = cache_policy(false);
    for (units.begin(args.tiles_asked, tile_start[args.experts]); units.any(); units.advance()) {
      const Tile at = units.find(args, tile_start, row_start, kTokens);
      const int first_sub = units.first * kSubs, subs = min(units.last * kSubs, all_subs) - first_sub;
      const int live = min(at.end - at.row0, kTokens);
      WeightCopies<SWIGLU, kBlocks, kSubs> copy(args, at.expert, at.tile_n * kTileRows, first_sub);
      auto copy_weights = [&](int count) {
        StageEnd* const end = end_of_stage();
        announce(end, stage.parity, {at, subs, units.share()}, count * (kBlocks * 16 * (kBlockCodes + kBlockScales) + live * 128));
        uint8_t* const to = memory + stage.begin;
        copy(reinterpret_cast<uint4*>(to), reinterpret_cast<uint4*>(to + kScales), count, barrier_at(&end->full));
      };
      auto copy_tokens = [&](int sub, int count) {
        uint8_t* const to = memory + stage.begin + kInput;
        const BarrierAt full = barrier_at(&end_of_stage()->full);
        for (int token = 0; token < live; ++token) copy_bulk(to + token * kPitch, token_of[token] + sub * kBlock, count * 128, full, usual);
        stage.advance();
      };
      if (elected) copy_weights(min(subs, kSubs));  // they do not wait until the tokens have been found
      if (lane < live) token_of[lane] = token_of_row(args, at.row0 + lane, at.end) + first_sub * kBlock;
      __syncwarp();
      if (elected) {
        copy_tokens(0, min(subs, kSubs));
        for (int sub = kSubs; sub < subs; sub += kSubs) {
          const int count = min(subs - sub, kSubs);
          copy_weights(count);
          copy_tokens(sub, count);
        }
      }
      __syncwarp();
    }
    if (elected) announce(end_of_stage(), stage.parity, kNoWork, 0);
    return;
  }

  const int g = lane / 4, t = lane % 4;
  const int group = warp / 4, warp_k = group % WK, warp_n = group / WK;  // warpgroup
  float* const partial = reinterpret_cast<float*>(memory + STAGES * kStage);
  // What this thread reads of the first stage.
  const uint8_t* const codes_of_ring = memory + ((warp_n * R * kSubs + warp_k) * kBlockCodes + warp % 4 * 32 + lane) * 16;
  const uint8_t* const scales_of_ring = memory + kScales + (warp_n * R * kSubs + warp_k) * kBlockScales * 16 + (warp % 4 * 8 + g) * 8;
  const uint8_t* const tokens_of_ring = memory + kInput + lane % 8 * kPitch + (8 * warp_k + lane / 8) * 16;
  const uint32_t top = scale_top;  // from memory, so that it stays in a register
  for (int turn = 0;; ++turn) {
    wait(barrier_at(&end_of_stage()->full), stage.parity);
    const Work work = read_work(end_of_stage());
    const Tile& at = work.at;
    if (at.expert < 0) return;
    const int n0 = at.tile_n * kTileRows + warp_n * (SWIGLU ? 64 : 64 * R) + warp % 4 * 16;
    RowFactors<R> rows;  // asked for here, needed behind the loop
    rows.template load<SWIGLU, 64>(args, at.expert, n0, g);
    float row_scale[C][2];
    if constexpr (SCALED)
#pragma unroll
      for (int c = 0; c < C; ++c)
#pragma unroll
        for (int column = 0; column < 2; ++column) row_scale[c][column] = scale_of_row(args, at.row0 + 8 * c + 2 * t + column, at.end);
    float acc[R][C][4] = {};
    for (int sub = 0; sub < work.subs; sub += kSubs) {
      wait(barrier_at(&end_of_stage()->full), stage.parity);
      const uint4* const codes_from = reinterpret_cast<const uint4*>(codes_of_ring + stage.begin);
      const uint2* const scales_from = reinterpret_cast<const uint2*>(scales_of_ring + stage.begin);
      const uint4* const tokens_from = reinterpret_cast<const uint4*>(tokens_of_ring + stage.begin);
      // Every other 64 k is loaded before the one before it is multiplied.
      uint32_t x[2][C][2][4];
      uint4 codes[2][R];
      uint2 scales[2][R];
      auto load = [&](int i) {
        if (i >= SUB || (!FULL && sub + WK * i + warp_k >= work.subs)) return;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          codes[i % 2][r] = codes_from[(r * kSubs + WK * i) * kBlockCodes];
          scales[i % 2][r] = scales_from[(r * kSubs + WK * i) * 2 * kBlockScales];
        }
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            load_matrices(x[i % 2][c][half], tokens_from + 8 * c * (kPitch / 16) + 8 * WK * i + 4 * half);
      };
      load(0);
#pragma unroll
      for (int i = 0; i < SUB; ++i) {
        load(i + 1);
        if (!FULL && sub + WK * i + warp_k >= work.subs) break;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int r = 0; r < R; ++r) {
            const uint4& code = codes[i % 2][r];
            const uint2& scale = scales[i % 2][r];
            uint32_t a[2][4];
            decode_steps<BF16>(a[0], a[1], half ? code.z : code.x, half ? code.w : code.y, half ? scale.y : scale.x, top);
#pragma unroll
            for (int c = 0; c < C; ++c) {
              mma<BF16>(acc[r][c], a[0], x[i % 2][c][half][0], x[i % 2][c][half][1]);
              mma<BF16>(acc[r][c], a[1], x[i % 2][c][half][2], x[i % 2][c][half][3]);
            }
          }
      }
      __syncwarp();
      if (lane == 0) arrive(barrier_at(&end_of_stage()->empty));
      stage.advance();
    }

    if constexpr (WK > 1) {  // add the shares of K, always in the same order; the warpgroups take turns at the epilogue
      constexpr int kShare = R * C * 128 * 4;  // of a warpgroup
      const int last = turn % WK;
      float* const shares = partial + (turn % 2 * WN + warp_n) * WK * kShare + threadIdx.x % 128;
      if (warp_k != last) for_each_sum(acc, [&](float& sum, int i) { shares[warp_k * kShare + i * 128] = sum; });
      meet(1 + warp_n, 128 * WK);
      if (warp_k != last) continue;
      for_each_sum(acc, [&](float& own, int i) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < WK; ++other) sum += other == last ? own : shares[other * kShare + i * 128];
        own = sum;
      });
    }
    if constexpr (SHARED) {
      if (work.share < 0) {
        leave_sums(args, acc, warp_n, WN);
        continue;
      }
      add_sums(args, acc, warp_n, WN, work.share);
    }
    store<BF16, SWIGLU, C, R, 64>(
        args, acc, rows, [&](int i) { return SCALED ? row_scale[i / 8][i % 2] : 1.0f; }, at.row0, at.end, n0, g, t);
  }
}
