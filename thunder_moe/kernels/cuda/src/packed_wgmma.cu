// The gradient of a grouped GEMM's rows from NVFP4 weights in layout "tiled_64x64", by wgmma (SM90).
// Compiled at run time for kernels/cuda/linear.py behind nvfp4.cuh and linear_wgmma.cu; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Like linear_wgmma.cu with a transposed weight: two warpgroups decode its boxes into the stages, with codes two stages ahead in registers.

struct PackedLinearArguments {
  TensorMap x, b, inner;      // (M, K) in boxes of TOKENS rows by 64 k; of an adapter, as in LowRankLinearArguments
  LinearArguments of;         // n: K of the weight; k: its N
  const uint8_t* qdata;       // (E, N, K / 2)
  const uint8_t* scale;       // (E, N, K / 16)
  const float* global_scale;  // (E,) or (E, N)
  int rank;                   // of the adapter, 0 for none
};

constexpr int kProducers = 2;

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A thread's part of a stage's two blocks of 64 rows by 64 columns.
struct PackedPart {
  TiledCodes codes[2];
  TiledScales scales[2];
  float global[2];  // of rows g and g + 8 of its warp's 16; PER_ROW
};

template <bool PER_ROW>
DEVICE void load_part(PackedPart& part, const PackedLinearArguments& all, const LinearTile& tile, int k) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, blocks_n = all.of.n / 64;
  const int64_t row_block = (static_cast<int64_t>(tile.expert) * all.of.k + k) / 64;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t block = row_block * blocks_n + min(tile.n / 64 + i, blocks_n - 1);
    part.codes[i] = reinterpret_cast<const TiledCodes*>(all.qdata)[block * 128 + threadIdx.x % 128];
    part.scales[i] = reinterpret_cast<const TiledScales*>(all.scale)[block * 32 + warp * 8 + g];
    if constexpr (PER_ROW) part.global[i] = all.global_scale[row_block * 64 + 16 * warp + g + 8 * i];
  }
}

// Decodes this part to boxes in the tensor cores' swizzle: 2**-8 of e2m1 * scale, exact. PER_ROW: times the global scale, in float32, rounded once.
template <bool BF16, bool PER_ROW>
DEVICE void decode_boxes(uint8_t* boxes, const PackedPart& part) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint8_t* const to = boxes + (16 * warp + g) * 128 + 4 * t;
#pragma unroll
  for (int box = 0; box < 2; ++box)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[2][4];  // of two steps of 16 k: rows g and g + 8, the same 8 k further
      decode_part<BF16>(pairs[0], pairs[1], part.codes[box], part.scales[box], half, 0x70007000);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t pair = pairs[i / 4][i % 4];
        if constexpr (PER_ROW) {
          const float factor = part.global[i % 2];
          pair = narrow2<BF16>(widen<BF16>(pair & 0xFFFF) * factor * kUnscale<BF16>, widen<BF16>(pair >> 16) * factor * kUnscale<BF16>);
        }
        const int unit = 4 * half + i / 2;
        *reinterpret_cast<uint32_t*>(to + box * kBox + i % 2 * 1024 + (unit ^ g) * 16) = pair;
      }
    }
}

// A stage of the block's tiles; the adapter's, if there is one, is the last of a tile.
template <int TOKENS>
struct StageWalk {
  LinearTiles<TOKENS, kTileN> tiles;
  LinearTile tile;
  int64_t index, count;
  int k;

  METHOD StageWalk(const LinearTiles<TOKENS, kTileN>& tiles, int64_t count) : tiles(tiles), tile(), index(blockIdx.x), count(count), k(0) { find(); }
  METHOD bool valid() const { return index < count; }
  METHOD void find() {
    if (valid()) tile = tiles.at(index);
  }
  METHOD void advance(int stages, int end_k) {
    for (; stages > 0; --stages)
      if ((k += kStageK) >= end_k) k = 0, index += gridDim.x, find();
  }
};

// Two warpgroups decode, in turn, and two multiply.
template <bool BF16, bool PER_ROW, int TOKENS, int STAGES>
__global__ void __launch_bounds__(512, 1) packed_linear_wgmma(const __grid_constant__ PackedLinearArguments all) {
  await_previous_kernel();
  constexpr int kStage = 2 * kBox + TOKENS * 128;  // [2] boxes of the weight, one of x
  const LinearArguments& args = all.of;
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage]
  __shared__ ExpertTiles experts;
  __shared__ Mbarrier full[STAGES], empty[STAGES];
  uint8_t* const stages = reinterpret_cast<uint8_t*>(align_shared(unaligned, 1024));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(mbarrier_address(&full[i]), 5), mbarrier_init(mbarrier_address(&empty[i]), 8);
    fence_mbarrier_init();
    prefetch_tensor_map(&all.x);
  }
  count_tiles<TOKENS>(args, experts);
  LinearTiles<TOKENS, kTileN> tiles(args, experts);
  const int64_t count = tiles.count();
  const int warpgroup = static_cast<int>(threadIdx.x) / 128 - kProducers;
  if (warpgroup >= 0) {
    grow_registers<184>();
    if constexpr (PER_ROW) consume_linear<BF16, true, true, TOKENS, STAGES>(args, all.rank, tiles, count, stages, full, empty, warpgroup, [](int) { return '\0'; });
    else consume_linear<BF16, true, true, TOKENS, STAGES>(args, all.rank, tiles, count, stages, full, empty, warpgroup, [&](int expert) { return all.global_scale[expert] * kUnscale<BF16>; });
    return;
  }

  shrink_registers<72>();
  const bool first_warp = threadIdx.x % 128 < 32, elected = elect_one() && first_warp;
  const int end_k = args.k + (all.rank > 0 ? kStageK : 0);
  StageWalk<TOKENS> now(tiles, count);
  now.advance(warpgroup + kProducers, end_k);
  StageWalk<TOKENS> ahead(now);
  int stage = warpgroup + kProducers, parity = 0;
  const auto fetch = [&](PackedPart& part) {
    if (!ahead.valid()) return;
    if (ahead.k < args.k) load_part<PER_ROW>(part, all, ahead.tile, ahead.k);
    ahead.advance(kProducers, end_k);
  };
  const auto fill_stage = [&](PackedPart& part) {
    if (!now.valid()) return;
    uint8_t* const to = stages + stage * kStage;
    const MbarrierAddress arrived = mbarrier_address(&full[stage]);
    const bool of_weight = now.k < args.k;
    mbarrier_wait(mbarrier_address(&empty[stage]), parity ^ 1);
    if (elected) {
      mbarrier_arrive_expect_tx(arrived, of_weight ? TOKENS * 128 : kStage);
      if (of_weight) {
        tma_load_box(to + 2 * kBox, &all.x, now.k, now.tile.row, arrived);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) tma_load_box(to + i * kBox, &all.b, now.tile.n + 64 * i, now.tile.expert * all.rank, arrived);
        tma_load_box(to + 2 * kBox, &all.inner, 0, now.tile.row, arrived);
      }
    }
    __syncwarp();
    if (of_weight) decode_boxes<BF16, PER_ROW>(to, part);
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(arrived);
    fetch(part);
    if ((stage += kProducers) >= STAGES) stage -= STAGES, parity ^= 1;
    now.advance(kProducers, end_k);
  };
  PackedPart even = {}, odd = {};
  fetch(even), fetch(odd);
  while (now.valid()) fill_stage(even), fill_stage(odd);
}
#endif
