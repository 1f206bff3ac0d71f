// Grouped GEMM of many 16-bit rows per expert with NVFP4 weights in layout "tiled_64x64", by wgmma (SM90).
// Compiled at run time by kernels/cuda.py behind cuda_tiled.cuh; run on a CPU by tests/kernels/cuda_emulator.h.
//
// The tensor cores are the limit here: while they work on one 64 k of a warpgroup's rows, the warpgroup decodes the next.

struct TiledArguments {
  TensorMap x;     // of gemm.x, in boxes of a tile's tokens
  Arguments gemm;  // row_slot has been applied to x, it is for slot_scale alone
};

struct GatherArguments {
  const uint16_t* x;    // (T, K)
  const int* row_slot;  // (M,)
  uint16_t* out;        // (M, K)
  int rows, k, top_k;
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
// C: blocks of 8 tokens of a tile; R: blocks of 64 weight rows of a warpgroup (SwiGLU: one of gate, one of up); WG:
// warpgroups that multiply, one more copies. One block runs tile after tile. The blocks of a cluster have the same tokens
// and neighbouring rows of weights: each copies its share of the tokens to all.
template <bool BF16, bool SWIGLU, int C, int R, int WG, int CLUSTER, int STAGES>
__global__ void __launch_bounds__(128 * (WG + 1), 1) grouped_mm_tiled_wgmma(const __grid_constant__ TiledArguments all) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(C % CLUSTER == 0, "a share of the tokens is whole blocks of 8");
  constexpr int kThreads = 128 * (WG + 1), kTokens = 8 * C, kBlocks = WG * R;
  constexpr int kTileRows = 64 * WG * (SWIGLU ? 1 : R);  // output features
  constexpr int kTokenUnits = kTokens * 8;  // of 16 bytes, in a stage
  DYNAMIC_SHARED(uint4, memory);  // [STAGES] of tokens [kTokens][8], then of codes [kBlocks][128], then of scales [kBlocks][16]
  __shared__ Barrier full[STAGES], empty[STAGES];
  __shared__ Tile tile_of_stage[STAGES];
  __shared__ int tile_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];

  const Arguments& args = all.gemm;
  uint4* const tokens = align_shared(memory, 1024);
  uint4* const codes = tokens + STAGES * kTokenUnits;
  uint4* const scales = codes + STAGES * kBlocks * kBlockCodes;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be a warp's
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + CLUSTER * kTileRows - 1) / (CLUSTER * kTileRows);  // of a cluster
  const int rank = CLUSTER > 1 ? rank_in_cluster() : 0, first_tile = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const int subs = args.k / kBlock;
  if (threadIdx.x == 0) {
    prefetch_map(&all.x);
    for (int i = 0; i < STAGES; ++i) init_barrier(&full[i], 1), init_barrier(&empty[i], 4 * WG * CLUSTER);
    fence_barriers();
  }
  count_tiles<kThreads>(args, kTokens, tile_start, warp_total);  // ends with a barrier
  if constexpr (CLUSTER > 1) meet_cluster();
  const int tiles = tile_start[args.experts] * tiles_n;
  Stage<STAGES> stage;

  if (warp >= 4 * WG) {
    shrink_registers<(WG == 1 ? 56 : WG == 2 ? 40 : 32)>();
    if (warp == 4 * WG && lane == 0)
    for (int tile = first_tile; tile < tiles; tile += step) {
      Tile at = tile_of(args, tile_start, tile, tiles_n, kTokens);
      at.tile_n = at.tile_n * CLUSTER + rank;
      const uint8_t *codes_from[kBlocks], *scales_from[kBlocks];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int row_block = block_of_expert<SWIGLU>(args, at.tile_n * kTileRows, block);
        const int64_t from = (static_cast<int64_t>(at.expert) * (args.n / kBlock) + row_block) * subs;
        codes_from[block] = args.qdata + from * (16 * kBlockCodes);
        scales_from[block] = args.scale + from * (16 * kBlockScales);
      }
      for (int sub = 0; sub < subs; ++sub) {
        wait(&empty[stage.index], stage.parity ^ 1);
        Barrier* const barrier = &full[stage.index];
        tile_of_stage[stage.index] = at;
        arrive_and_expect(barrier, 16 * (kTokenUnits + kBlocks * (kBlockCodes + kBlockScales)));
        constexpr int kShare = kTokens / CLUSTER;
        uint4* const to = tokens + stage.index * kTokenUnits + rank * kShare * 8;
        if constexpr (CLUSTER > 1) copy_box_to_all(to, &all.x, sub * kBlock, at.row0 + rank * kShare, barrier, (1 << CLUSTER) - 1);
        else copy_box(to, &all.x, sub * kBlock, at.row0, barrier);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          copy_bulk(codes + (stage.index * kBlocks + block) * kBlockCodes, codes_from[block], 16 * kBlockCodes, barrier);
          copy_bulk(scales + (stage.index * kBlocks + block) * kBlockScales, scales_from[block], 16 * kBlockScales, barrier);
          codes_from[block] += 16 * kBlockCodes, scales_from[block] += 16 * kBlockScales;
        }
        stage.advance();
      }
    }
  } else {
  grow_registers<(WG == 1 ? 256 - 56 : WG == 2 ? 232 : 160)>();
  const int g = lane / 4, t = lane % 4, warpgroup = warp / 4;
  const uint4* const codes_from = codes + warpgroup * R * kBlockCodes + warp % 4 * 32 + lane;
  const uint2* const scales_from = reinterpret_cast<const uint2*>(scales + warpgroup * R * kBlockScales) + warp % 4 * 8 + g;
  auto release = [&](int index) {  // a stage, to all blocks that copy into it
    __syncwarp();
    if constexpr (CLUSTER == 1) {
      if (lane == 0) arrive(&empty[index]);
    } else {
      if (lane < CLUSTER) arrive_at(&empty[index], lane);
    }
  };
  for (int tile = first_tile; tile < tiles; tile += step) {
    // Left operands of 64 k by 64 rows; one is multiplied while the other is decoded: with R = 1 they belong to
    // stages in turn, with R = 2 to the two blocks of a stage.
    uint32_t a[2][4][4];
    auto decode_block = [&](uint32_t (&to)[4][4], int from, int r) {
      const uint4 code = codes_from[(from * kBlocks + r) * kBlockCodes];
      const uint2 scale = scales_from[(from * kBlocks + r) * 2 * kBlockScales];
      decode_steps<BF16>(to[0], to[1], code.x, code.y, scale.x, 0x70007000);
      decode_steps<BF16>(to[2], to[3], code.z, code.w, scale.y, 0x70007000);
    };
    float acc[R][C][4] = {};
    auto multiply_block = [&](const uint32_t (&left)[4][4], int r) {
      fence_registers();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma<BF16, C>(acc[r], left[step], tokens + stage.index * kTokenUnits, step);
      commit_products();
    };

    wait(&full[stage.index], stage.parity);
    const Tile at = tile_of_stage[stage.index];
    const int n0 = at.tile_n * kTileRows + warpgroup * (SWIGLU ? 64 : 64 * R) + warp % 4 * 16;
    RowFactors<R> rows;  // asked for here, needed behind the loop
    rows.template load<SWIGLU, 64>(args, at.expert, n0, g);
    decode_block(a[0], stage.index, 0);
    int before = stage.index;  // the stage before this one
    for (int sub = 0; sub < subs; sub += 3 - R) {
#pragma unroll
      for (int turn = 0; turn < 3 - R; ++turn) {
        if (sub + turn >= subs) break;
        multiply_block(a[R == 1 ? turn : 0], 0);
        if constexpr (R == 2) {
          wait_for_products<1>();
          decode_block(a[1], stage.index, 1);
          multiply_block(a[1], 1);
        }
        const int now = stage.index;
        stage.advance();
        const bool more = sub + turn + 1 < subs;
        if (more) wait(&full[stage.index], stage.parity);
        wait_for_products<1>();
        // R = 1: the stage before is done; R = 2: it was when the first block's products of this stage were waited for.
        if (sub + turn > 0) release(before);
        before = now;
        if (more) decode_block(a[R == 1 ? 1 - turn : 0], stage.index, 0);
      }
    }
    wait_for_products<0>();
    release(before);
    store<BF16, SWIGLU, C, R, 64>(args, acc, rows, at.row0, at.end, n0, g, t);
  }
  }
  if constexpr (CLUSTER > 1) meet_cluster();  // no block goes while another one may write into its memory
}
#endif
