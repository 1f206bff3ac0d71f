// Grouped GEMM of many 16-bit rows per expert with NVFP4 weights in layout "tiled_64x64", by wgmma (SM90).
// Compiled at run time by kernels/cuda.py behind cuda_wgmma.cuh and cuda_tiled.cuh; run on a CPU by tests/kernels/cuda_emulator.h.
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
    const int64_t from = static_cast<int64_t>(args.row_slot[row] / args.top_k) * units + unit;
    reinterpret_cast<uint4*>(args.out)[item] = reinterpret_cast<const uint4*>(args.x)[from];
  }
}

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

// SCALED: whether there is a slot_scale; C: blocks of 8 tokens of a tile, at most; R: blocks of 64 weight rows of a warpgroup
// (SwiGLU: one of gate, one of up); WG: warpgroups that multiply, one more copies. One block runs tile after tile.
template <bool BF16, bool SWIGLU, bool SCALED, int C, int R, int WG, int STAGES>
__global__ void __launch_bounds__(128 * (WG + 1), 1) grouped_mm_tiled_wgmma(const __grid_constant__ TiledArguments all) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  constexpr int kThreads = 128 * (WG + 1), kTokens = 8 * C, kBlocks = WG * R;
  constexpr int kTileRows = 64 * WG * (SWIGLU ? 1 : R);  // output features
  constexpr int kTokenUnits = kTokens * 8;  // of 16 bytes, in a stage
  DYNAMIC_SHARED(uint4, memory);  // [STAGES] of tokens [kTokens][8], then of codes [kBlocks][128], then of scales [kBlocks][16]
  __shared__ Barrier full_barriers[STAGES], empty_barriers[STAGES];
  __shared__ Tile tile_of_stage[STAGES];
  __shared__ float row_scale[SCALED ? WG : 1][256];
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];

  const Barriers full = barriers(full_barriers), empty = barriers(empty_barriers);
  const Arguments& args = all.gemm;
  uint4* const tokens = align_shared(memory, 1024);
  uint4* const codes = tokens + STAGES * kTokenUnits;
  uint4* const scales = codes + STAGES * kBlocks * kBlockCodes;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be a warp's
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int subs = args.k / kBlock;
  if (threadIdx.x == 0) {
    prefetch_map(&all.x);
    for (int i = 0; i < STAGES; ++i) init_barrier(barrier_of(full, i), 1), init_barrier(barrier_of(empty, i), 4 * WG);
    fence_barriers();
  }
  count_tiles<kThreads>(args, kTokens, tile_start, row_start, warp_total);  // ends with a barrier
  const int tiles = tile_start[args.experts] * tiles_n;
  Stage<STAGES> stage;

  if (warp >= 4 * WG) {
    shrink_registers<(WG == 1 ? 56 : WG == 2 ? 40 : 32)>();
    if (warp != 4 * WG || lane != 0) return;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Tile at = tile_of(args.experts, tile_start, row_start, tile, tiles_n, kTokens);
      WeightCopies<SWIGLU, kBlocks, 1> copy(args, at.expert, at.tile_n * kTileRows, 0);
      for (int sub = 0; sub < subs; ++sub) {
        wait(barrier_of(empty, stage.index), stage.parity ^ 1);
        const BarrierAt barrier = barrier_of(full, stage.index);
        tile_of_stage[stage.index] = at;
        arrive_and_expect(barrier, 16 * (kTokenUnits + kBlocks * (kBlockCodes + kBlockScales)));
        copy_box(tokens + stage.index * kTokenUnits, &all.x, sub * kBlock, at.row0, barrier);
        uint4* const to_codes = codes + stage.index * kBlocks * kBlockCodes;
        copy(to_codes, scales + stage.index * kBlocks * kBlockScales, 1, barrier);
        stage.advance();
      }
    }
    return;
  }

  grow_registers<(WG == 1 ? 256 - 56 : WG == 2 ? 232 : 160)>();
  const int g = lane / 4, t = lane % 4, warpgroup = warp / 4;
  const uint4* const codes_from = codes + warpgroup * R * kBlockCodes + warp % 4 * 32 + lane;
  const uint2* const scales_from = reinterpret_cast<const uint2*>(scales + warpgroup * R * kBlockScales) + warp % 4 * 8 + g;
  auto release = [&](int index) {  // a stage
    __syncwarp();
    if (lane == 0) arrive(barrier_of(empty, index));
  };
  const TileDescriptor described = describe(tokens);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    wait(barrier_of(full, stage.index), stage.parity);
    const Tile at = tile_of_stage[stage.index];
    const int n0 = at.tile_n * kTileRows + warpgroup * (SWIGLU ? 64 : 64 * R) + warp % 4 * 16;
    RowFactors<R> rows;  // asked for here, needed behind the loop
    rows.template load<SWIGLU, 64>(args, at.expert, n0, g);
    float own_scale[2];  // of two of the tile's rows, likewise
    if constexpr (SCALED)
#pragma unroll
      for (int i = 0; i < 2; ++i) own_scale[i] = scale_of_row(args, at.row0 + threadIdx.x % 128 + 128 * i, at.end);

    // All k of the tile's first 8 * N tokens. `a` has the left operands of 32 k by 64 rows: one is multiplied while the other
    // is decoded.
    auto multiply_tokens = [&](auto number) {
      constexpr int N = decltype(number)::value;
      float acc[R][N][4] = {};
      keep_apart<N>();
      uint32_t a[2][2][4];
      uint4 code;
      uint2 scale;
      auto load = [&](int r) {  // 64 k of a block of the stage
        code = codes_from[(stage.index * kBlocks + r) * kBlockCodes];
        scale = scales_from[(stage.index * kBlocks + r) * 2 * kBlockScales];
      };
      load(0);
      decode_steps<BF16>(a[0][0], a[0][1], code.x, code.y, scale.x, 0x70007000);
      int before = stage.index;  // the stage before this one
      for (int sub = 0; sub < subs; ++sub) {
        const int now = stage.index;
        const bool more = sub + 1 < subs;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            fence_registers();
#pragma unroll
            for (int step = 0; step < 2; ++step) wgmma<BF16, N>(acc[r], a[half][step], described + now * kTokenUnits, 2 * half + step);
            commit_products();
            if (half == 1 && r + 1 < R) load(r + 1);
            if (half == 1 && r + 1 == R) {
              stage.advance();
              if (more) {
                wait(barrier_of(full, stage.index), stage.parity);
                load(0);
              }
            }
            wait_for_products<1>();  // those that read the other operand
            if (r == 0 && half == 0 && sub > 0) release(before);
            if (half == 0) decode_steps<BF16>(a[1][0], a[1][1], code.z, code.w, scale.y, 0x70007000);
            else if (r + 1 < R || more) decode_steps<BF16>(a[0][0], a[0][1], code.x, code.y, scale.x, 0x70007000);
          }
        before = now;
      }
      wait_for_products<0>();
      keep_apart<-N>();
      release(before);
      if constexpr (SCALED) {
        meet(1 + warpgroup, 128);  // the tile before has been stored
#pragma unroll
        for (int i = 0; i < 2; ++i) row_scale[warpgroup][threadIdx.x % 128 + 128 * i] = own_scale[i];
        meet(1 + warpgroup, 128);
      }
      store<BF16, SWIGLU, N, R, 64>(
          args, acc, rows, [&](int i) { return SCALED ? row_scale[warpgroup][i] : 1.0f; }, at.row0, at.end, n0, g, t);
    };
    // A tile that is half empty is multiplied by half, where registers suffice for both codes.
    if constexpr (C % 2 == 0 && C * R <= (WG < 3 ? 32 : 20)) {
      if (at.end - at.row0 <= 4 * C) {
        multiply_tokens(Number<C / 2>());
        continue;
      }
    }
    multiply_tokens(Number<C>());
  }
}
#endif
