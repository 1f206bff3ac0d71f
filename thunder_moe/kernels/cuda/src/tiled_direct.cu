// GEMM of up to 8 rows with one packed weight in layout "tiled_64x64", without a pipeline (SM90).
// Compiled at run time for kernels/cuda/direct.py behind grouped_mm.cuh and norm.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// With so few rows the kernel takes little longer than one trip to memory. So a warp loads all of its weights at once into registers, 16
// rows of them by up to 64 * AHEAD k, where possible before it waits for the kernel in front. A block has 16 columns of the result; its
// warps share K, and add their sums in a fixed order.
//
// With NORM the kernel takes an RMS norm first: total = x + residual, rows = total / rms(total) * norm_weight, each step rounded to 16
// bits. Each block computes the norm for itself, and the first one writes `total`.

constexpr int kBlock = 64;  // rows, and k, of a block of weights

struct DirectArguments {
  GemmArguments gemm;
  const uint16_t* residual;     // (M, K)
  const uint16_t* norm_weight;  // (K,)
  uint16_t* total;              // (M, K)
  float epsilon;
};

template <bool BF16, int WARPS, int AHEAD, bool NORM>
__global__ void __launch_bounds__(32 * WARPS) mm_tiled_direct(const DirectArguments direct) {
  const GemmArguments& args = direct.gemm;
  constexpr int kPitch = 64 * AHEAD + 8;  // of rows in shared memory, against bank conflicts of ldmatrix
  DYNAMIC_SHARED(uint4, memory);          // rows of x [WARPS][rows][kPitch]
  __shared__ float4 sums[WARPS][32];
  __shared__ volatile uint32_t scale_top;  // volatile, so that the compiler does not know its value
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tile = blockIdx.x;
  const int first = warp * AHEAD, count = min(args.k / kBlock - first, AHEAD);  // blocks of 64 k
  uint16_t* const x = reinterpret_cast<uint16_t*>(memory) + warp * args.rows * kPitch;
  if (threadIdx.x == 0) scale_top = 0x70007000;
  __syncthreads();
  const uint32_t top = scale_top;
  TiledCodes codes[AHEAD];
  TiledScales scales[AHEAD];
  constexpr int kParts = NORM ? (AHEAD + 3) / 4 : 1;  // of 256 numbers of a row
  Eight norm_weight[kParts];
  const auto load = [&] {
    const int64_t block = static_cast<int64_t>(tile / 4) * (args.k / kBlock) + first;
    const uint8_t* const from_codes = args.qdata + block * kBlockCodes + (tile % 4 * (kBlockCodes / 64) + lane) * 16;
    const uint8_t* const from_scales = args.scale + block * kBlockScales + (tile % 4 * 8 + lane / 4) * (kBlockScales / 32);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (i < count) {
        codes[i] = load_codes(reinterpret_cast<const uint4*>(from_codes + i * kBlockCodes));
        scales[i] = *reinterpret_cast<const TiledScales*>(from_scales + i * kBlockScales);
      }
    if constexpr (NORM)
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (8 * lane + 256 * i < count * kBlock) norm_weight[i] = load_eight(direct.norm_weight + first * kBlock + 8 * lane + 256 * i);
  };
  if (args.x_from_previous_kernel) load();
  await_previous_kernel();
  if (!args.x_from_previous_kernel) load();
  if constexpr (NORM) {
    __shared__ float squares[8][WARPS];
#pragma unroll(4)
    for (int row = 0; row < args.rows; ++row) {
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int at = 8 * lane + 256 * i;
        if (at >= count * kBlock) break;
        const int64_t from = row * static_cast<int64_t>(args.k) + first * kBlock + at;
        const Eight total = add_residual<BF16>(args.x + from, direct.residual + from, square);
        store_eight(x + row * kPitch + at, total);
      }
      square = sum_of_warp(square);
      if (lane == 0) squares[row][warp] = square;
    }
    __syncthreads();
    for (int row = 0; row < args.rows; ++row) {
      float square = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) square += squares[row][other];
      const float factor = norm_factor(square, args.k, direct.epsilon);
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int at = 8 * lane + 256 * i;
        if (at >= count * kBlock) break;
        const Eight total = load_eight(x + row * kPitch + at);
        store_eight(x + row * kPitch + at, normalize<BF16>(total, norm_weight[i], factor));
        if (tile == 0) store_eight(direct.total + row * static_cast<int64_t>(args.k) + first * kBlock + at, total);
      }
    }
  } else {
    for (int i = lane; i < args.rows * count * 8; i += 32) {
      const int row = i / (count * 8), at = i % (count * 8) * 8;
      *reinterpret_cast<uint4*>(x + row * kPitch + at) = *reinterpret_cast<const uint4*>(args.x + row * static_cast<int64_t>(args.k) + first * kBlock + at);
    }
  }
  __syncwarp();
  const uint4* const from = reinterpret_cast<const uint4*>(x + min(lane % 8, args.rows - 1) * kPitch + lane / 8 * 8);  // others repeat the last row
  float acc[4][4] = {};  // four chains of sums
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) {
    if (i >= count) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[4], a[2][4];
      ldmatrix_x4(b, from + 8 * i + 4 * half);
      decode_part<BF16>(a[0], a[1], codes[i], scales[i], half, top);
      mma<BF16>(acc[2 * half], a[0], b[0], b[1]);
      mma<BF16>(acc[2 * half + 1], a[1], b[2], b[3]);
    }
  }
  RowFactors<1> rows;
  if (warp == 0) rows.template load<false, 64>(args, 0, 16 * tile, lane / 4);
  float sum[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
  sums[warp][lane] = {sum[0], sum[1], sum[2], sum[3]};
  __syncthreads();
  if (warp > 0) return;
  float total[1][1][4] = {};
  for (int other = 0; other < WARPS; ++other) {
    const float4& part = sums[other][lane];
    total[0][0][0] += part.x, total[0][0][1] += part.y, total[0][0][2] += part.z, total[0][0][3] += part.w;
  }
  store<BF16, false, 1, 1, 64>(args, total, rows, [](int) { return 1.0f; }, 0, args.rows, 16 * tile, lane / 4, lane % 4);
}
