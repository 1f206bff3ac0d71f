// Gathers the rows of tokens, and multiplies them by a matrix of a LoRA adapter on the way.
// Compiled at run time for kernels/cuda/low_rank.py behind ptx.cuh and linear.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Persistent, bound by reading and writing the rows, by mma (SM80). The rank is a multiple of 8, at most 64.

struct GatherLowRankArguments {
  LinearArguments of;   // x: tokens (T, K)
  const int* row_slot;  // (M,), of tokens with top_k slots each
  uint16_t* gathered;   // (M, K): the tokens of the rows that experts have
  int top_k;
};

constexpr int kTileRows = 128, kStageK = 64, kUnits = kStageK / 8;  // units of 16 bytes

// The place of a unit of 16 bytes of a row of 64 numbers: no two of eight rows below each other are in the same banks.
DEVICE int unit_at(int row, int unit) { return row * kUnits + (unit ^ (row % 8)); }

// Rows (M, K) x (E, N, K), or TRANSPOSED (E, K, N) -> (M, N), N <= 16 * C. Eight warps, each 16 rows, copies of the threads into a ring of
// STAGES stages of 64 k.
template <bool BF16, bool TRANSPOSED, int C, int STAGES>
__global__ void __launch_bounds__(256, 2) gather_low_rank(const GatherLowRankArguments all) {
  await_previous_kernel();
  const LinearArguments& args = all.of;
  constexpr int kOfX = kTileRows * kUnits, kWeightUnits = 2 * C * kStageK, kStage = kOfX + kWeightUnits;
  DYNAMIC_SHARED(uint4, stages);
  __shared__ ExpertTiles experts;
  count_tiles<kTileRows>(args, experts);
  LinearTiles<kTileRows, 16 * C> tiles(args, experts);
  const int64_t count = tiles.count();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, t = lane % 4, steps = (args.k + kStageK - 1) / kStageK;
  for (int64_t index = blockIdx.x; index < count; index += gridDim.x) {
    const LinearTile tile = tiles.at(index);
    const uint16_t* const x = static_cast<const uint16_t*>(args.x);
    const uint16_t* const weight = static_cast<const uint16_t*>(args.weight) + static_cast<int64_t>(tile.expert) * args.n * args.k;
    const uint16_t* of_row[kOfX / 256];  // of the rows that this thread copies parts of
#pragma unroll
    for (int j = 0; j < kOfX / 256; ++j) {
      const int row = min(tile.row + static_cast<int>(threadIdx.x + 256 * j) / kUnits, tile.end - 1);
      of_row[j] = x + static_cast<int64_t>(slot_of_row(all.row_slot, row, args.rows) / all.top_k) * args.k;
    }
    const auto load = [&](int i) {
      if (i < steps) {
        uint4* const to = stages + i % STAGES * kStage;
#pragma unroll
        for (int j = 0; j < kOfX / 256; ++j) {
          const int at = threadIdx.x + 256 * j, row = at / kUnits, unit = at % kUnits, k = i * kStageK + 8 * unit;
          const bool valid = tile.row + row < tile.end && k < args.k;
          cp_async16(to + unit_at(row, unit), of_row[j] + (valid ? k : 0), valid);
        }
        for (int at = threadIdx.x; at < kWeightUnits; at += 256) {
          const int row = TRANSPOSED ? at / (2 * C) : at / kUnits, unit = TRANSPOSED ? at % (2 * C) : at % kUnits;
          const int k = i * kStageK + (TRANSPOSED ? row : 8 * unit), n = TRANSPOSED ? 8 * unit : row;
          const bool valid = k < args.k && n < args.n;
          const int64_t from = TRANSPOSED ? static_cast<int64_t>(k) * args.n + n : static_cast<int64_t>(n) * args.k + k;
          cp_async16(to + kOfX + (TRANSPOSED ? at : unit_at(row, unit)), weight + (valid ? from : 0), valid);
        }
      }
      cp_async_commit();
    };
    float acc[2 * C][4] = {};
    __syncthreads();  // all have read the stages of the tile before
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load(i);
    for (int i = 0; i < steps; ++i) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      load(i + STAGES - 1);
      const uint4* const rows = stages + i % STAGES * kStage;
      const uint4* const of_weight = rows + kOfX;
#pragma unroll
      for (int j = 0; j < kOfX / 256; ++j) {
        const int at = threadIdx.x + 256 * j, row = at / kUnits, unit = at % kUnits, k = i * kStageK + 8 * unit;
        if (tile.row + row < tile.end && k < args.k)
          *reinterpret_cast<uint4*>(all.gathered + static_cast<int64_t>(tile.row + row) * args.k + k) = rows[unit_at(row, unit)];
      }
#pragma unroll
      for (int step = 0; step < kStageK / 16; ++step) {
        uint32_t a[4], b[4];  // b: two blocks of 8 columns, two halves of k each
        ldmatrix_x4(a, rows + unit_at(16 * warp + matrix % 2 * 8 + lane % 8, 2 * step + matrix / 2));
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const int block = 2 * c + matrix / 2;
          if constexpr (TRANSPOSED) ldmatrix_x4_transposed(b, of_weight + (16 * step + matrix % 2 * 8 + lane % 8) * 2 * C + block);
          else ldmatrix_x4(b, of_weight + unit_at(8 * block + lane % 8, 2 * step + matrix % 2));
          mma<BF16>(acc[2 * c], a, b[0], b[1]);
          mma<BF16>(acc[2 * c + 1], a, b[2], b[3]);
        }
      }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int c = 0; c < 2 * C; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile.row + 16 * warp + lane / 4 + 8 * half, n = 8 * c + 2 * t;
        if (row < tile.end && n < args.n)
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(args.out) + static_cast<int64_t>(row) * args.n + n) = narrow2<BF16>(acc[c][2 * half], acc[c][2 * half + 1]);
      }
  }
}
