// Grouped GEMMs of 16-bit and float32 weights, rows of each expert times its weight or its transpose: by mma (SM80), and by float32
// products. Compiled at run time for kernels/cuda/linear.py behind ptx.cuh and linear.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Persistent, like linear_wgmma.cu; the rows are the left operand. linear_mma: eight warps, each a half of the rows by 32 of a tile's 128
// columns, copies of the threads into a ring of stages of 32 k. linear_any: any dtype, any widths and any alignment.

constexpr int kTileN = 128, kMmaK = 32, kMmaStages = 4;

// The place of a unit of 16 bytes: no two of eight rows below each other are in the same banks.
DEVICE int unit_of_row(int row, int unit) { return row * 4 + (unit ^ (row / 2 % 4)); }             // rows of 32 k
DEVICE int unit_of_wide_row(int row, int unit) { return row * (kTileN / 8) + (unit ^ (row % 8)); }  // rows of 128 columns

// ROWS: the rows of a tile, 32 or 128.
template <bool BF16, bool TRANSPOSED, int ROWS>
__global__ void __launch_bounds__(256, 2) linear_mma(const LinearArguments args) {
  await_previous_kernel();
  constexpr int kRows = ROWS * 4, kStage = kRows + kTileN * 4, kHeight = ROWS / 32;  // units of x, of x and the weight; 16 rows of a warp
  DYNAMIC_SHARED(uint4, stages);
  __shared__ ExpertTiles experts;
  count_tiles<ROWS>(args, experts);
  LinearTiles<ROWS, kTileN> tiles(args, experts);
  const int64_t count = tiles.count();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, t = lane % 4;
  const int warp_row = warp / 4 * (ROWS / 2), warp_n = warp % 4 * 32, steps = (args.k + kMmaK - 1) / kMmaK;
  write_zeros<uint4>(args, experts, 2 * args.n, threadIdx.x, 256);
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const LinearTile tile = tiles.at(index);
    const uint16_t* const weight = static_cast<const uint16_t*>(args.weight) + static_cast<int64_t>(tile.expert) * args.n * args.k;
    const uint16_t* const x = static_cast<const uint16_t*>(args.x);
    const auto load = [&](int i) {
      if (i < steps) {
        uint4* const to = stages + i % kMmaStages * kStage;
#pragma unroll
        for (int at = threadIdx.x; at < kRows; at += 256) {
          const int row = at / 4, unit = at % 4, k = i * kMmaK + 8 * unit;
          const bool valid = tile.row + row < tile.end && k < args.k;
          cp_async16(to + unit_of_row(row, unit), x + (valid ? static_cast<int64_t>(tile.row + row) * args.k + k : 0), valid);
        }
#pragma unroll
        for (int at = threadIdx.x; at < kTileN * 4; at += 256) {
          const int row = TRANSPOSED ? at / (kTileN / 8) : at / 4, unit = TRANSPOSED ? at % (kTileN / 8) : at % 4;
          const int k = i * kMmaK + (TRANSPOSED ? row : 8 * unit), n = tile.n + (TRANSPOSED ? 8 * unit : row);
          const bool valid = k < args.k && n < args.n;
          const int64_t from = TRANSPOSED ? static_cast<int64_t>(k) * args.n + n : static_cast<int64_t>(n) * args.k + k;
          cp_async16(to + kRows + (TRANSPOSED ? unit_of_wide_row(row, unit) : unit_of_row(row, unit)), weight + (valid ? from : 0), valid);
        }
      }
      cp_async_commit();
    };
    float acc[kHeight][4][4] = {};
    __syncthreads();  // all have read the stages of the tile before
#pragma unroll
    for (int i = 0; i < kMmaStages - 1; ++i) load(i);
    for (int i = 0; i < steps; ++i) {
      cp_async_wait<kMmaStages - 2>();
      __syncthreads();
      load(i + kMmaStages - 1);
      const uint4* const rows = stages + i % kMmaStages * kStage;
      const uint4* const of_weight = rows + kRows;
#pragma unroll
      for (int step = 0; step < kMmaK / 16; ++step) {
        uint32_t a[kHeight][4], b[2][4];  // b[c]: two blocks of 8 columns, two halves of k each
#pragma unroll
        for (int m = 0; m < kHeight; ++m) ldmatrix_x4(a[m], rows + unit_of_row(warp_row + 16 * m + matrix % 2 * 8 + lane % 8, 2 * step + matrix / 2));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int n = warp_n + 16 * c + matrix / 2 * 8;
          if constexpr (TRANSPOSED) ldmatrix_x4_transposed(b[c], of_weight + unit_of_wide_row(16 * step + matrix % 2 * 8 + lane % 8, n / 8));
          else ldmatrix_x4(b[c], of_weight + unit_of_row(n + lane % 8, 2 * step + matrix % 2));
        }
#pragma unroll
        for (int m = 0; m < kHeight; ++m)
#pragma unroll
          for (int c = 0; c < 4; ++c) mma<BF16>(acc[m][c], a[m], b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
      }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int m = 0; m < kHeight; ++m)
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = tile.row + warp_row + 16 * m + lane / 4 + 8 * half, n = tile.n + warp_n + 8 * c + 2 * t;
          if (row < tile.end && n < args.n)
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(args.out) + static_cast<int64_t>(row) * args.n + n) = narrow2<BF16>(acc[m][c][2 * half], acc[m][c][2 * half + 1]);
        }
  }
}

// DTYPE of all operands: 0 float32, 1 bfloat16, 2 float16. ROWS: of a tile, 32, 64 or 128. A thread computes ROWS / 16 rows by 8 columns, four of them
// beside each other twice, and loads the numbers of the next 16 k while it multiplies.
template <int DTYPE, bool TRANSPOSED, int ROWS>
__global__ void __launch_bounds__(256, ROWS < 128 ? 2 : 1) linear_any(const LinearArguments args) {
  await_previous_kernel();
  constexpr int kK = 16, kHeight = ROWS / 16, kOfX = ROWS * kK / 256, kOfWeight = kTileN * kK / 256;
  alignas(16) __shared__ float rows[kK][ROWS + 4], weights[kK][kTileN + 4];
  __shared__ ExpertTiles experts;
  count_tiles<ROWS>(args, experts);
  LinearTiles<ROWS, kTileN> tiles(args, experts);
  const int64_t count = tiles.count();
  const int column = threadIdx.x % 16 * 4, line = threadIdx.x / 16 * kHeight;
  if constexpr (DTYPE == 0) write_zeros<float>(args, experts, 4 * args.n, threadIdx.x, 256);
  else write_zeros<uint16_t>(args, experts, 2 * args.n, threadIdx.x, 256);
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const LinearTile tile = tiles.at(index);
    const int64_t weight = static_cast<int64_t>(tile.expert) * args.n * args.k;
    float of_x[kOfX], of_weight[kOfWeight], acc[kHeight][8] = {};
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kOfX; ++i) {
        const int at = threadIdx.x + 256 * i, row = tile.row + at / kK, k = begin + at % kK;
        of_x[i] = row < tile.end && k < args.k ? load_float(args.x, static_cast<int64_t>(row) * args.k + k, DTYPE) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kOfWeight; ++i) {
        const int at = threadIdx.x + 256 * i, k = begin + (TRANSPOSED ? at / kTileN : at % kK), n = tile.n + (TRANSPOSED ? at % kTileN : at / kK);
        const int64_t from = TRANSPOSED ? static_cast<int64_t>(k) * args.n + n : static_cast<int64_t>(n) * args.k + k;
        of_weight[i] = k < args.k && n < args.n ? load_float(args.weight, weight + from, DTYPE) : 0.0f;
      }
    };
    load(0);
    for (int begin = 0; begin < args.k; begin += kK) {
      __syncthreads();  // the numbers before are read
#pragma unroll
      for (int i = 0; i < kOfX; ++i) rows[(threadIdx.x + 256 * i) % kK][(threadIdx.x + 256 * i) / kK] = of_x[i];
#pragma unroll
      for (int i = 0; i < kOfWeight; ++i) {
        const int at = threadIdx.x + 256 * i;
        weights[TRANSPOSED ? at / kTileN : at % kK][TRANSPOSED ? at % kTileN : at / kK] = of_weight[i];
      }
      __syncthreads();
      if (begin + kK < args.k) load(begin + kK);
#pragma unroll
      for (int k = 0; k < kK; ++k) {
        const float4 first = *reinterpret_cast<const float4*>(&weights[k][column]), second = *reinterpret_cast<const float4*>(&weights[k][64 + column]);
        const float b[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        float a[kHeight];
        if constexpr (kHeight % 4 == 0) {
#pragma unroll
          for (int i = 0; i < kHeight; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&rows[k][line + i]);
            a[i] = four.x, a[i + 1] = four.y, a[i + 2] = four.z, a[i + 3] = four.w;
          }
        } else {
#pragma unroll
          for (int i = 0; i < kHeight; ++i) a[i] = rows[k][line + i];
        }
#pragma unroll
        for (int i = 0; i < kHeight; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) acc[i][j] += a[i] * b[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kHeight; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int row = tile.row + line + i, n = tile.n + (j < 4 ? column + j : 60 + column + j);
        if (row >= tile.end || n >= args.n) continue;
        const int64_t to = static_cast<int64_t>(row) * args.n + n;
        if constexpr (DTYPE == 0) static_cast<float*>(args.out)[to] = acc[i][j];
        else static_cast<uint16_t*>(args.out)[to] = narrow<DTYPE == 1>(acc[i][j]);
      }
  }
}
