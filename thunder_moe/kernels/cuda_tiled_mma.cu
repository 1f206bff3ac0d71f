// Grouped GEMM of few 16-bit rows per expert with NVFP4 weights in layout "tiled_64x64", by mma.sync (SM90).
// Compiled at run time by kernels/cuda.py behind cuda_tiled.cuh; run on a CPU by tests/kernels/cuda_emulator.h.
//
// Memory is the limit here: the producer keeps the stages full, and what a consumer does for 16 rows by 16 k is little
// more than decoding them.

// SCALED: whether there is a slot_scale; FULL: K is a multiple of a stage; C: blocks of 8 tokens of a tile; R: blocks of 64
// weight rows of a warpgroup (SwiGLU: one of gate, one of up); WN, WK: warpgroups along N and along K; SUB: 64 k of a
// warpgroup in a stage; SPLIT: blocks that share K of a tile: the last that is done adds what all have left in memory, in
// their order.
template <bool BF16, bool SWIGLU, bool SCALED, bool FULL, int C, int R, int WN, int WK, int SUB, int SPLIT, int STAGES>
__global__ void __launch_bounds__(128 * WN * WK + 64, 1) grouped_mm_tiled_mma(const Arguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(C <= 4, "a lane finds one token");
  constexpr int kConsumers = 128 * WN * WK, kThreads = kConsumers + 64, kTokens = 8 * C;
  constexpr int kBlocks = WN * R, kSubs = WK * SUB;  // of weights in a stage, along N and along K
  constexpr int kTileRows = 64 * WN * (SWIGLU ? 1 : R);  // output features
  // A stage in units of 16 bytes: codes [kBlocks][kSubs][128], scales [kBlocks][kSubs][16], tokens [kTokens][kPitch].
  constexpr int kScales = kBlocks * kSubs * kBlockCodes, kInput = kScales + kBlocks * kSubs * kBlockScales;
  constexpr int kPitch = 8 * kSubs + 1;  // odd, for the banks of load_matrices
  constexpr int kStage = (kInput + kTokens * kPitch + 7) / 8 * 8;  // 128 bytes, for the copy engine
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage], then partial sums [2][WK][WN][R * C][128] where WK > 1
  __shared__ Barrier full_barriers[STAGES], empty_barriers[STAGES];
  __shared__ Tile tile_of_stage[STAGES];
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ const uint16_t* token_of[kTokens];
  __shared__ uint32_t scale_top;
  __shared__ bool is_last[WN * WK];

  uint4* const memory = align_shared(unaligned, 128);
  const Barriers full = barriers(full_barriers), empty = barriers(empty_barriers);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be a warp's
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int all_subs = args.k / kBlock;
  const int stages_k = (all_subs + kSubs - 1) / kSubs;  // at least SPLIT of them
  const int part = blockIdx.x % SPLIT;  // gridDim.x is a multiple of SPLIT
  const int first_sub = stages_k * part / SPLIT * kSubs, subs = min(stages_k * (part + 1) / SPLIT * kSubs, all_subs) - first_sub;
  const int first_tile = blockIdx.x / SPLIT, step = gridDim.x / SPLIT;
  Tiles own(first_tile, step, tiles_n);
  if (warp == 0) count_tiles_by_warp(args, kTokens, tile_start, row_start);
  if (threadIdx.x == kThreads - 1) {
    for (int i = 0; i < STAGES; ++i) init_barrier(barrier_of(full, i), 33), init_barrier(barrier_of(empty, i), kConsumers / 32);
    fence_barriers();
    scale_top = 0x70007000;
  }
  __syncthreads();
  const int tiles = tile_start[args.experts] * tiles_n;
  Stage<STAGES> stage;

  if (warp == kConsumers / 32) {  // copies weights
    if (lane != 0) return;
    for (int tile = first_tile; tile < tiles; tile += step, own.advance()) {
      const Tile at = own.find(args.experts, tile_start, row_start, kTokens);
      WeightCopies<SWIGLU, kBlocks, kSubs> copy(args, at.expert, at.tile_n * kTileRows, first_sub);
      for (int sub = 0; sub < subs; sub += kSubs) {
        const int count = min(subs - sub, kSubs);
        wait(barrier_of(empty, stage.index), stage.parity ^ 1);
        const BarrierAt barrier = barrier_of(full, stage.index);
        uint4* const to = memory + stage.index * kStage;
        tile_of_stage[stage.index] = at;
        arrive_and_expect(barrier, count * kBlocks * 16 * (kBlockCodes + kBlockScales));
        copy(to, to + kScales, count, barrier);
        stage.advance();
      }
    }
    return;
  }
  if (warp == kConsumers / 32 + 1) {  // copies tokens
    for (int tile = first_tile; tile < tiles; tile += step, own.advance()) {
      const Tile at = own.find(args.experts, tile_start, row_start, kTokens);
      const int live = min(at.end - at.row0, kTokens);
      __syncwarp();
      if (lane < live) token_of[lane] = token_of_row(args, at.row0 + lane, at.end) + first_sub * kBlock;
      __syncwarp();
      for (int sub = 0; sub < subs; sub += kSubs) {
        const int units = min(subs - sub, kSubs) * 8;  // of a token
        wait(barrier_of(empty, stage.index), stage.parity ^ 1);
        uint4* const to = memory + stage.index * kStage + kInput;
        for (int row = 0; row < live; ++row) {
          const uint16_t* const from = token_of[row] + sub * kBlock;
#pragma unroll
          for (int unit = 0; unit < 8 * kSubs; unit += 32)
            if (unit + lane < units) copy16(to + row * kPitch + unit + lane, from + 8 * (unit + lane), true);
        }
        arrive_after_copies(barrier_of(full, stage.index));
        stage.advance();
      }
    }
    return;
  }

  const int g = lane / 4, t = lane % 4;
  const int group = warp / 4, warp_k = group % WK, warp_n = group / WK;  // warpgroup
  float* const partial = reinterpret_cast<float*>(memory + STAGES * kStage);
  // Where this thread reads in a stage.
  const int from_codes = (warp_n * R * kSubs + warp_k) * kBlockCodes + warp % 4 * 32 + lane;
  const int from_scales = 2 * (kScales + (warp_n * R * kSubs + warp_k) * kBlockScales) + warp % 4 * 8 + g;
  const int from_tokens = kInput + lane % 8 * kPitch + 8 * warp_k + lane / 8;
  const uint32_t top = scale_top;  // from memory, so that it stays in a register
  int turn = 0;  // tiles that this block has done
  for (int tile = first_tile; tile < tiles; tile += step, ++turn) {
    wait(barrier_of(full, stage.index), stage.parity);
    const Tile at = tile_of_stage[stage.index];
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
    for (int sub = 0; sub < subs; sub += kSubs) {
      wait(barrier_of(full, stage.index), stage.parity);
      const uint4* const from = memory + stage.index * kStage;
      const uint4* const codes_from = from + from_codes;
      const uint2* const scales_from = reinterpret_cast<const uint2*>(from) + from_scales;
      const uint4* const tokens_from = from + from_tokens;
      // Every other 64 k is loaded before the one before it is multiplied.
      uint32_t x[2][C][2][4];
      uint4 codes[2][R];
      uint2 scales[2][R];
      auto load = [&](int i) {
        if (i >= SUB || (!FULL && sub + WK * i + warp_k >= subs)) return;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          codes[i % 2][r] = codes_from[(r * kSubs + WK * i) * kBlockCodes];
          scales[i % 2][r] = scales_from[(r * kSubs + WK * i) * 2 * kBlockScales];
        }
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            load_matrices(x[i % 2][c][half], tokens_from + 8 * c * kPitch + 8 * WK * i + 4 * half);
      };
      load(0);
#pragma unroll
      for (int i = 0; i < SUB; ++i) {
        load(i + 1);
        if (!FULL && sub + WK * i + warp_k >= subs) break;
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
      if (lane == 0) arrive(barrier_of(empty, stage.index));
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
    if constexpr (SPLIT > 1) {
      const int thread = threadIdx.x % 128;
      float* const sums = args.sums + (static_cast<int64_t>(tile) * SPLIT * WN + warp_n) * (R * C * 512) + thread;
      constexpr int kPart = WN * R * C * 512;  // from a block's sums to the next one's
      for_each_sum(acc, [&](float& sum, int i) { sums[part * kPart + i * 128] = sum; });
      __threadfence();
      meet(1 + WN + group, 128);  // of the warpgroup
      if (thread == 0) {
        const int before = atomicAdd(&args.sums_done[tile * WN + warp_n], 1);
        if (before == SPLIT - 1) args.sums_done[tile * WN + warp_n] = 0;
        is_last[group] = before == SPLIT - 1;
        __threadfence();
      }
      meet(1 + WN + group, 128);
      const bool last = is_last[group];
      meet(1 + WN + group, 128);  // before the next tile's is written
      if (!last) continue;
      for_each_sum(acc, [&](float& own, int i) {
        own = 0.0f;
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) own += load_other(sums + other * kPart + i * 128);
      });
    }
    store<BF16, SWIGLU, C, R, 64>(
        args, acc, rows, [&](int i) { return SCALED ? row_scale[i / 8][i % 2] : 1.0f; }, at.row0, at.end, n0, g, t);
  }
}
