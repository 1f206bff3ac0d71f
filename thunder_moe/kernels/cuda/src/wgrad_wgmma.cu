// The gradient of the experts' weights (E, N, K), added to float32 or written: grad^T x of each expert's rows, by wgmma (SM90).
// Compiled at run time for kernels/cuda/wgrad.py behind wgmma_shared.cuh and wgrad.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Persistent. The sum is over rows, and both operands are stored row by row: the tensor cores read both transposed. One warp has
// the copy engine fill a ring of stages of 64 rows; two warpgroups each multiply 64 columns of grad by all TILE_K columns of x.
// With few rows an expert it is bound by reading and writing the result, which is prefetched into L2.

struct TmaWgradArguments {
  TensorMap grad, x;  // (M, N) and (M, K) in boxes of 64 rows by 64 columns
  WgradArguments of;
};

// Arguments with E4M3 operands, in which each expert has a multiple of 32 rows; `of` has their ends.
struct ScaledWgradArguments {
  TensorMap grad, x;  // transposed: (N, M) and (K, M), in pairs of numbers, in boxes of 64 columns by 128 rows
  WgradArguments of;
  const float* grad_scale;  // (E, N)
  const float* x_scale;     // (E, K)
};

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kBox = 64 * 128;  // bytes of a box
template <bool E4M3>
constexpr int kStageRows = E4M3 ? 128 : 64;
constexpr int kTileN = 128;
constexpr int kShortTile = 8;  // stages: shorter tiles' results are prefetched one tile ahead

template <bool E4M3>
DEVICE int stages_of(const WgradTile& tile) {
  return (tile.end - tile.row + kStageRows<E4M3> - 1) / kStageRows<E4M3>;
}

// The warpgroup's 64 rows of a tile of the result.
template <int TILE_K>
DEVICE void prefetch_result(const WgradArguments& args, const WgradTile& tile, int warpgroup) {
  constexpr int kLines = TILE_K / 32;  // of 128 bytes
  for (int i = threadIdx.x % 128; i < 64 * kLines; i += 128) {
    const int n = tile.n + 64 * warpgroup + i / kLines, k = tile.k + i % kLines * 32;
    if (n < args.n && k < args.k) prefetch(static_cast<const float*>(args.out) + tile.out + static_cast<int64_t>(n) * args.k + k);
  }
}

template <bool BF16, bool E4M3, int TILE_K, int STAGES, class Arguments>
DEVICE void multiply_wgrad(const Arguments& all) {
  constexpr int kRows = kStageRows<E4M3>, kBoxes = TILE_K / 64, kStage = (2 + kBoxes) * kBox;  // [2] boxes of grad, [kBoxes] of x
  const WgradArguments& args = all.of;
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage]
  __shared__ ExpertOrder order;
  __shared__ Mbarrier full[STAGES], empty[STAGES];
  uint8_t* const stages = reinterpret_cast<uint8_t*>(align_shared(unaligned, 1024));
  const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(mbarrier_address(&full[i]), 1), mbarrier_init(mbarrier_address(&empty[i]), 2);
    fence_mbarrier_init();
  }
  const int tiles = order_experts(args, order) * tiles_of_expert<kTileN, TILE_K>(args);

  if (warpgroup < 0) {
    shrink_registers<E4M3 ? 24 : 40>();
    if (threadIdx.x / 32 == 0 && elect_one()) {
      int stage = 0, parity = 0;
      for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        const WgradTile tile = wgrad_tile<kTileN, TILE_K>(args, order, index);
        for (int row = tile.row; row < tile.end; row += kRows) {
          const MbarrierAddress arrived = mbarrier_address(&full[stage]);
          uint8_t* const to = stages + stage * kStage;
          mbarrier_wait(mbarrier_address(&empty[stage]), parity ^ 1);
          mbarrier_arrive_expect_tx(arrived, kStage);
#pragma unroll
          for (int i = 0; i < 2 + kBoxes; ++i) {
            const TensorMap* const map = i < 2 ? &all.grad : &all.x;
            const int column = i < 2 ? tile.n + 64 * i : tile.k + 64 * (i - 2);
            tma_load_box(to + i * kBox, map, E4M3 ? row / 2 : column, E4M3 ? column : row, arrived);
          }
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
    return;
  }

  grow_registers<E4M3 ? 240 : 232>();
  float acc[TILE_K / 8][4];
  int stage = 0, parity = 0;
  const int g = threadIdx.x % 32 / 4;
  if (args.accumulate && static_cast<int>(blockIdx.x) < tiles) prefetch_result<TILE_K>(args, wgrad_tile<kTileN, TILE_K>(args, order, blockIdx.x), warpgroup);
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const WgradTile tile = wgrad_tile<kTileN, TILE_K>(args, order, index);
    const int count = stages_of<E4M3>(tile);
    if (args.accumulate && index + static_cast<int>(gridDim.x) < tiles) {
      const WgradTile next = wgrad_tile<kTileN, TILE_K>(args, order, index + gridDim.x);
      if (stages_of<E4M3>(next) <= kShortTile) prefetch_result<TILE_K>(args, next, warpgroup);
    }
    if (E4M3 || count == 0) {
#pragma unroll
      for (int i = 0; i < TILE_K / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
    }
    int before = -1;  // the stage whose products may still be under way
    for (int i = 0; i < count; ++i) {
      const uint8_t* const a = stages + stage * kStage + warpgroup * kBox;
      const uint8_t* const b = stages + stage * kStage + 2 * kBox;
      const int valid = tile.end - tile.row - i * kRows;
      if (args.accumulate && count > kShortTile && i == count - kShortTile) prefetch_result<TILE_K>(args, tile, warpgroup);
      mbarrier_wait(mbarrier_address(&full[stage]), parity);
      if constexpr (E4M3) {
        multiply_e4m3(acc, matrix_descriptor(reinterpret_cast<const uint4*>(a)), matrix_descriptor(reinterpret_cast<const uint4*>(b)), valid);
        if (threadIdx.x % 128 == 0) mbarrier_arrive(mbarrier_address(&empty[stage]));
        if (++stage == STAGES) stage = 0, parity ^= 1;
        continue;
      }
      if (valid < kRows && valid % 16 != 0) {  // the rows that follow are another expert's, or padding, NaN perhaps
        const int rows = 16 - valid % 16, words = rows * 8;  // of 16 bytes, in each box
        for (int at = threadIdx.x % 128; at < (1 + kBoxes) * words; at += 128) {
          const int box = at / words;
          uint8_t* const from = const_cast<uint8_t*>(box == 0 ? a : b + (box - 1) * kBox);
          reinterpret_cast<uint4*>(from + valid * 128)[at - box * words] = make_uint4(0, 0, 0, 0);
        }
        fence_proxy_async();
        named_barrier_sync(1 + warpgroup, 128);
      }
      const MatrixDescriptor of_a = row_descriptor(a), of_b = row_descriptor(b);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kRows / 16; ++step)
        if (16 * step < valid) wgmma_shared<BF16, true, true>(acc, of_a + step * 128, of_b + step * 128, i > 0 || step > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0 && threadIdx.x % 128 == 0) mbarrier_arrive(mbarrier_address(&empty[before]));
      before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    fence_sums(acc);
    if (before >= 0 && threadIdx.x % 128 == 0) mbarrier_arrive(mbarrier_address(&empty[before]));

    if constexpr (E4M3) {
      const int first = tile.n + 64 * warpgroup;
      const float* const of_grad = all.grad_scale + static_cast<int64_t>(tile.expert) * args.n + first;
      const float* const of_x = all.x_scale + static_cast<int64_t>(tile.expert) * args.k + tile.k;
      scale_sums(acc, of_grad, args.n - first, of_x, args.k - tile.k);
    }
    const int n = tile.n + 64 * warpgroup + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + g;
    store_sums<BF16, E4M3 ? 2 : 4>(args, acc, tile.out + static_cast<int64_t>(n) * args.k + tile.k, n, tile.k);
  }
}

template <bool BF16, int TILE_K, int STAGES>
__global__ void __launch_bounds__(384, 1) wgrad_wgmma(const __grid_constant__ TmaWgradArguments all) {
  await_previous_kernel();
  multiply_wgrad<BF16, false, TILE_K, STAGES>(all);
}

// Of E4M3 operands; a result that is not float32 is bfloat16.
template <int TILE_K, int STAGES>
__global__ void __launch_bounds__(384, 1) scaled_wgrad_wgmma(const __grid_constant__ ScaledWgradArguments all) {
  await_previous_kernel();
  multiply_wgrad<true, true, TILE_K, STAGES>(all);
}
#endif
