// The gradient of the experts' weights (E, N, K), added to float32 or written: by mma (SM80), and by float32 products.
// Compiled at run time for kernels/cuda/wgrad.py behind ptx.cuh and wgrad.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Persistent, like wgrad_wgmma.cu. wgrad_mma: eight warps, each 64 by 32 of a tile of 128 by 128, copies of the threads into a ring of
// stages of 32 rows. wgrad_any: any dtype, any widths and any alignment.

constexpr int kMmaTile = 128, kMmaRows = 32, kMmaStages = 4, kUnits = kMmaTile / 8;  // units of 16 bytes

// The place of a unit of a row: no two of eight rows below each other are in the same banks.
DEVICE int unit_at(int row, int unit) { return row * kUnits + (unit ^ (row % 8)); }

template <bool BF16>
__global__ void __launch_bounds__(256, 2) wgrad_mma(const WgradArguments args) {
  await_previous_kernel();
  constexpr int kOperand = kMmaRows * kUnits, kStage = 2 * kOperand;  // in units: [rows][128] of grad, then of x
  DYNAMIC_SHARED(uint4, stages);
  __shared__ ExpertOrder order;
  const int tiles = order_experts(args, order) * tiles_of_expert<kMmaTile, kMmaTile>(args);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const int warp_n = warp / 4 * 64, warp_k = warp % 4 * 32;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const WgradTile tile = wgrad_tile<kMmaTile, kMmaTile>(args, order, index);
    const int count = (tile.end - tile.row + kMmaRows - 1) / kMmaRows;
    const auto load = [&](int i) {
      if (i < count) {
        uint4* const to = stages + i % kMmaStages * kStage;
#pragma unroll
        for (int at = threadIdx.x; at < kOperand; at += 256) {
          const int row = at / kUnits, unit = at % kUnits, from = tile.row + i * kMmaRows + row;
          const int n = tile.n + 8 * unit, k = tile.k + 8 * unit;
          const bool of_grad = from < tile.end && n < args.n, of_x = from < tile.end && k < args.k;
          cp_async16(to + unit_at(row, unit), args.grad + (of_grad ? static_cast<int64_t>(from) * args.n + n : 0), of_grad);
          cp_async16(to + kOperand + unit_at(row, unit), args.x + (of_x ? static_cast<int64_t>(from) * args.k + k : 0), of_x);
        }
      }
      cp_async_commit();
    };
    float acc[4][4][4] = {};
    __syncthreads();  // all have read the stages of the tile before
#pragma unroll
    for (int i = 0; i < kMmaStages - 1; ++i) load(i);
    for (int i = 0; i < count; ++i) {
      cp_async_wait<kMmaStages - 2>();
      __syncthreads();
      load(i + kMmaStages - 1);
      const uint4* const grad = stages + i % kMmaStages * kStage;
      const uint4* const x = grad + kOperand;
#pragma unroll
      for (int step = 0; step < kMmaRows / 16; ++step) {
        uint32_t a[4][4], b[2][4];
        const int row = 16 * step + lane % 8, matrix = lane / 8;
#pragma unroll
        for (int m = 0; m < 4; ++m) ldmatrix_x4_transposed(a[m], grad + unit_at(row + matrix / 2 * 8, warp_n / 8 + 2 * m + matrix % 2));
#pragma unroll
        for (int c = 0; c < 2; ++c) ldmatrix_x4_transposed(b[c], x + unit_at(row + matrix % 2 * 8, warp_k / 8 + 2 * c + matrix / 2));
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int c = 0; c < 4; ++c) mma<BF16>(acc[m][c], a[m], b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
      }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int n = tile.n + warp_n + 16 * m + g, k = tile.k + warp_k;
      store_sums<BF16>(args, acc[m], tile.out + static_cast<int64_t>(n) * args.k + k, n, k);
    }
  }
}

// DTYPE of grad and x: 0 float32, 1 bfloat16, 2 float16. A thread computes 8 by 8 of a tile of 128 by 128, four beside each other twice in
// both directions, and loads the next 16 rows while it multiplies.
template <int DTYPE>
__global__ void __launch_bounds__(256) wgrad_any(const WgradArguments args) {
  await_previous_kernel();
  constexpr int kTile = 128, kRows = 16, kLoads = kRows * kTile / 256;
  __shared__ ExpertOrder order;
  alignas(16) __shared__ float grad[kRows][kTile], x[kRows][kTile];
  const int tiles = order_experts(args, order) * tiles_of_expert<kTile, kTile>(args), column = threadIdx.x % 16 * 4, line = threadIdx.x / 16 * 4;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const WgradTile tile = wgrad_tile<kTile, kTile>(args, order, index);
    float of_grad[kLoads], of_x[kLoads], acc[8][8] = {};
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = threadIdx.x + 256 * i, n = tile.n + at % kTile, k = tile.k + at % kTile;
        const int64_t from = begin + at / kTile;
        of_grad[i] = from < tile.end && n < args.n ? load_float(args.grad, from * args.n + n, DTYPE) : 0.0f;
        of_x[i] = from < tile.end && k < args.k ? load_float(args.x, from * args.k + k, DTYPE) : 0.0f;
      }
    };
    load(tile.row);
    for (int begin = tile.row; begin < tile.end; begin += kRows) {
      __syncthreads();  // the numbers before are read
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = threadIdx.x + 256 * i;
        grad[at / kTile][at % kTile] = of_grad[i], x[at / kTile][at % kTile] = of_x[i];
      }
      __syncthreads();
      if (begin + kRows < tile.end) load(begin + kRows);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        float4 a[2], b[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          a[half] = *reinterpret_cast<const float4*>(&grad[row][64 * half + line]);
          b[half] = *reinterpret_cast<const float4*>(&x[row][64 * half + column]);
        }
        const float of_n[8] = {a[0].x, a[0].y, a[0].z, a[0].w, a[1].x, a[1].y, a[1].z, a[1].w};
        const float of_k[8] = {b[0].x, b[0].y, b[0].z, b[0].w, b[1].x, b[1].y, b[1].z, b[1].w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < 8; ++j) acc[i][j] += of_n[i] * of_k[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int n = tile.n + (i < 4 ? line + i : 60 + line + i), k = tile.k + (j < 4 ? column + j : 60 + column + j);
        if (n >= args.n || k >= args.k) continue;
        const int64_t to = tile.out + static_cast<int64_t>(n) * args.k + k;
        if (DTYPE != 0 && args.narrow_out) {
          static_cast<uint16_t*>(args.out)[to] = narrow<DTYPE == 1>(acc[i][j]);
          continue;
        }
        float* const sum = static_cast<float*>(args.out) + to;
        *sum = args.accumulate ? *sum + acc[i][j] : acc[i][j];
      }
  }
}
