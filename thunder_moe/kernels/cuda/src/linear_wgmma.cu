// Grouped GEMMs of 16-bit weights, rows of each expert times its weight or its transpose, by wgmma (SM90).
// Compiled at run time for kernels/cuda/linear.py behind wgmma_shared.cuh and linear.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Persistent. The weight is the left operand, so that an expert with few rows wastes little: two warpgroups each multiply 64 of its
// 128 columns of the result by TOKENS rows of x. One warp has the copy engine fill a ring of stages of 64 k. The tensor cores can
// read a transposed weight, as in the gradient of the rows.

struct TmaLinearArguments {
  TensorMap weight, x;  // (E N, K), or transposed (E K, N), in boxes of 64 rows by 64 columns; (M, K) in boxes of TOKENS rows by 64 k
  LinearArguments of;
};

// Arguments with a LoRA adapter, whose product is added: rows (M, rank), and b in the weight's layout.
struct LowRankLinearArguments {
  TensorMap weight, x, b, inner;
  LinearArguments of;
  int rank;  // a multiple of 8, at most 64
};

// Arguments with E4M3 operands: `weight` and `x` are in pairs of numbers, as is k.
struct ScaledLinearArguments {
  TensorMap weight, x;
  LinearArguments of;
  const float* row_scale;     // (M,)
  const float* column_scale;  // (E, N)
};

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kStageK = 64, kBox = 64 * 128;  // bytes of a box of a weight
constexpr int kTileN = 128;

// The warpgroup's 64 columns of a tile. Neighbouring lanes exchange halves, so that each stores four columns in a row.
template <bool BF16, int C>
DEVICE void store_rows(const LinearArguments& args, const float (&acc)[C][4], const LinearTile& tile, int column) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, odd = t % 2;
  const int n = column + static_cast<int>(threadIdx.x) % 128 / 32 * 16 + (odd ? 8 + 2 * (t - 1) : 2 * t);
#pragma unroll
  for (int i = 0; i < C; ++i) {
    const uint32_t low = transpose8x8(narrow2<BF16>(acc[i][0], acc[i][1]));   // columns 2 t and 2 t + 1 of row 8 i + g
    const uint32_t high = transpose8x8(narrow2<BF16>(acc[i][2], acc[i][3]));  // 8 columns further
    const uint32_t other = float_to_bits(shuffle_xor(bits_to_float(odd ? low : high), 1));
    const int row = tile.row + 8 * i + g;
    if (row < tile.end && n < args.n)
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.out) + static_cast<int64_t>(row) * args.n + n) = odd ? make_uint2(other, high) : make_uint2(low, other);
  }
}

template <int VALUE>
struct Number {
  static constexpr int value = VALUE;
};

// The scales of E4M3 operands: of all rows, and of an expert's columns.
struct E4M3Scales {
  const float* of_rows;
  const float* of_columns;
};

// A warpgroup multiplies 64 columns of each of the block's tiles. rank: an adapter's, whose product is one more stage; 0 for none.
// WHOLE: K is a multiple of 64; factor(expert): the sums in front of the adapter are multiplied by it; of E4M3 numbers E4M3Scales.
template <bool BF16, bool TRANSPOSED, bool WHOLE, int TOKENS, int STAGES, bool E4M3 = false, class Factor>
DEVICE void consume_linear(
    const LinearArguments& args, int rank, LinearTiles<TOKENS, kTileN>& tiles, int64_t count, uint8_t* stages, Mbarrier* full, Mbarrier* empty, int warpgroup,
    Factor factor) {
  constexpr int kStage = 2 * kBox + TOKENS * 128;
  int stage = 0, parity = 0;
  const auto release = [&](int before) {  // a stage, of which this warp has waited for the products
    __syncwarp();
    if (before >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(mbarrier_address(&empty[before]));
  };
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const LinearTile tile = tiles.at(index);
    const auto multiply = [&](auto number) {  // the tile's first 8 * C rows
      constexpr int C = decltype(number)::value;
      keep_apart<C>();
      const auto scale = factor(tile.expert);
      float acc[C][4] = {};
      int before = -1;  // the stage whose products may still be under way
      const auto take_stage = [&](auto whole, int valid) {
        const uint8_t* const a = stages + stage * kStage + warpgroup * kBox;
        const uint8_t* const b = stages + stage * kStage + 2 * kBox;
        mbarrier_wait(mbarrier_address(&full[stage]), parity);
        const MatrixDescriptor of_b = matrix_descriptor(reinterpret_cast<const uint4*>(b));
        const MatrixDescriptor of_a = TRANSPOSED ? row_descriptor(a) : matrix_descriptor(reinterpret_cast<const uint4*>(a));
        if constexpr (E4M3) {
          multiply_e4m3(acc, of_a, of_b, 2 * kStageK);  // behind the last k there are zeros
          release(stage);
          if (++stage == STAGES) stage = 0, parity ^= 1;
          return;
        }
        const auto product = [&](int step) { wgmma_shared<BF16, TRANSPOSED, false>(acc, of_a + step * (TRANSPOSED ? 128 : 2), of_b + step * 2, true); };
        if constexpr (decltype(whole)::value != 0) {
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < kStageK / 16; ++step) product(step);
        } else {
          if (TRANSPOSED && valid < kStageK && valid % 16 != 0) {  // the 8 rows that follow are the next expert's, NaN perhaps
            reinterpret_cast<uint2*>(const_cast<uint8_t*>(a) + valid * 128)[threadIdx.x % 128] = uint2{0, 0};
            fence_proxy_async();
            named_barrier_sync(1 + warpgroup, 128);
          }
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < kStageK / 16; ++step)
            if (16 * step < valid) product(step);
        }
        wgmma_commit();
        wgmma_wait<1>();
        release(before);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      };
      for (int k = 0; k < args.k; k += kStageK) take_stage(Number<WHOLE>(), args.k - k);
      if constexpr (sizeof(scale) == sizeof(float)) {
        wgmma_wait<0>();
        fence_sums(acc);
#pragma unroll
        for (int i = 0; i < 4 * C; ++i) acc[i / 4][i % 4] *= scale;
      }
      if (rank > 0) take_stage(Number<0>(), rank);
      wgmma_wait<0>();
      fence_sums(acc);
      release(before);
      if constexpr (E4M3) {
        const int column = tile.n + 64 * warpgroup;
        scale_sums(acc, scale.of_columns + column, args.n - column, scale.of_rows + tile.row, tile.end - tile.row);
      }
      store_rows<BF16>(args, acc, tile, tile.n + 64 * warpgroup);
      keep_apart<-C>();
    };
    const int rows = tile.end - tile.row;
    if constexpr (TOKENS > 128) {
      if (rows <= 64) {
        multiply(Number<8>());
        continue;
      }
      if (rows <= 128) {
        multiply(Number<16>());
        continue;
      }
    }
    if constexpr (TOKENS > 192) {
      if (rows <= 192) {
        multiply(Number<24>());
        continue;
      }
    }
    multiply(Number<TOKENS / 8>());
  }
}

// LOW_RANK: the last stage is the adapter's. E4M3 and factor: as of consume_linear.
template <bool BF16, bool TRANSPOSED, int TOKENS, int STAGES, bool LOW_RANK, bool E4M3, class Arguments, class Factor>
DEVICE void multiply_linear(const Arguments& all, Factor factor) {
  constexpr int kStage = 2 * kBox + TOKENS * 128;  // [2] boxes of the weight, one of x
  const LinearArguments& args = all.of;
  DYNAMIC_SHARED(uint4, unaligned);  // [STAGES][kStage]
  __shared__ ExpertTiles experts;
  __shared__ Mbarrier full[STAGES], empty[STAGES];
  uint8_t* const stages = reinterpret_cast<uint8_t*>(align_shared(unaligned, 1024));
  const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(mbarrier_address(&full[i]), 1), mbarrier_init(mbarrier_address(&empty[i]), 8);
    fence_mbarrier_init();
    prefetch_tensor_map(&all.weight), prefetch_tensor_map(&all.x);
  }
  count_tiles<TOKENS>(args, experts);
  LinearTiles<TOKENS, kTileN> tiles(args, experts);
  const int64_t count = tiles.count();

  if (warpgroup < 0) {
    shrink_registers<40>();
    if (threadIdx.x / 32 == 0 && elect_one()) {
      int stage = 0, parity = 0;
      for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
        const LinearTile tile = tiles.at(index);
        for (int k = 0; k < args.k; k += kStageK) {
          const MbarrierAddress arrived = mbarrier_address(&full[stage]);
          uint8_t* const to = stages + stage * kStage;
          mbarrier_wait(mbarrier_address(&empty[stage]), parity ^ 1);
          mbarrier_arrive_expect_tx(arrived, kStage);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (TRANSPOSED) tma_load_box(to + i * kBox, &all.weight, tile.n + 64 * i, tile.expert * args.k + k, arrived);
            else tma_load_box(to + i * kBox, &all.weight, k, tile.expert * args.n + tile.n + 64 * i, arrived);
          }
          tma_load_box(to + 2 * kBox, &all.x, k, tile.row, arrived);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if constexpr (LOW_RANK) {
          const MbarrierAddress arrived = mbarrier_address(&full[stage]);
          uint8_t* const to = stages + stage * kStage;
          mbarrier_wait(mbarrier_address(&empty[stage]), parity ^ 1);
          mbarrier_arrive_expect_tx(arrived, kStage);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (TRANSPOSED) tma_load_box(to + i * kBox, &all.b, tile.n + 64 * i, tile.expert * all.rank, arrived);
            else tma_load_box(to + i * kBox, &all.b, 0, tile.expert * args.n + tile.n + 64 * i, arrived);
          }
          tma_load_box(to + 2 * kBox, &all.inner, 0, tile.row, arrived);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    } else if (threadIdx.x >= 32) {
      write_zeros<uint4>(args, experts, 2 * args.n, threadIdx.x - 32, 96);
    }
    return;
  }

  grow_registers<232>();
  int rank = 0;
  if constexpr (LOW_RANK) rank = all.rank;
  consume_linear<BF16, TRANSPOSED, false, TOKENS, STAGES, E4M3>(args, rank, tiles, count, stages, full, empty, warpgroup, factor);
}

template <bool BF16, bool TRANSPOSED, int TOKENS, int STAGES>
__global__ void __launch_bounds__(384, 1) linear_wgmma(const __grid_constant__ TmaLinearArguments all) {
  await_previous_kernel();
  multiply_linear<BF16, TRANSPOSED, TOKENS, STAGES, false, false>(all, [](int) { return '\0'; });
}

template <bool BF16, bool TRANSPOSED, int TOKENS, int STAGES>
__global__ void __launch_bounds__(384, 1) low_rank_linear_wgmma(const __grid_constant__ LowRankLinearArguments all) {
  await_previous_kernel();
  multiply_linear<BF16, TRANSPOSED, TOKENS, STAGES, true, false>(all, [](int) { return '\0'; });
}

// E4M3 operands, both with K in rows, and a bfloat16 result.
template <int TOKENS, int STAGES>
__global__ void __launch_bounds__(384, 1) scaled_linear_wgmma(const __grid_constant__ ScaledLinearArguments all) {
  await_previous_kernel();
  multiply_linear<true, false, TOKENS, STAGES, false, true>(
      all, [&](int expert) { return E4M3Scales{all.row_scale, all.column_scale + static_cast<int64_t>(expert) * all.of.n}; });
}
#endif
