// The gradients of a LoRA adapter's matrices, bound by reading the wide rows.
// Compiled at run time for kernels/cuda/wgrad.py behind ptx.cuh and wgrad.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Persistent, by mma (SM80): eight warps, each 16 columns of a tile of 128 by all of the rank, copies of the threads into a ring of stages
// of 64 rows, which runs on from tile to tile.

struct RankWgradArguments {
  WgradArguments of;    // grad: narrow rows (M, N), N at most 64; x: wide rows (M, K), or tokens (T, K); the result is in their dtype
  const int* row_slot;  // (M,) of tokens with top_k slots each, or null
  int top_k;
};

constexpr int kStageRows = 64, kColumns = 128, kUnits = kColumns / 8;  // units of 16 bytes

// The place of a unit of a wide row: no two of eight rows below each other are in the same banks.
DEVICE int unit_at(int row, int unit) { return row * kUnits + (unit ^ (row % 8)); }

// C: blocks of 16 of N; STAGES: stages of the ring. The result is (E, N, K), WIDE_FIRST (E, K, N).
template <bool BF16, bool WIDE_FIRST, int C, bool GATHER, int STAGES>
__global__ void __launch_bounds__(256, 2) rank_wgrad(const RankWgradArguments all) {
  await_previous_kernel();
  constexpr int kWide = kStageRows * kUnits, kNarrow = kStageRows * 2 * C, kStage = kWide + kNarrow, kCopies = kWide / 256;
  DYNAMIC_SHARED(uint4, stages);
  __shared__ ExpertOrder order;
  const WgradArguments& args = all.of;
  const int tiles = order_experts(args, order) * tiles_of_expert<64, kColumns>(args);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, g = lane / 4, t = lane % 4;

  // The next stage to be loaded: its tile, its first row, and the tokens of the rows that this thread copies parts of.
  int ahead = blockIdx.x, row = 0, slot = 0, tokens[kCopies];
  WgradTile tile_ahead = {};
  const auto find = [&] {
    while (ahead < tiles && row >= tile_ahead.end) {
      ahead += gridDim.x;
      if (ahead < tiles) tile_ahead = wgrad_tile<64, kColumns>(args, order, ahead), row = tile_ahead.row;
    }
    if (ahead >= tiles) return;
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const int from = min(row + static_cast<int>(threadIdx.x + 256 * j) / kUnits, tile_ahead.end - 1);
      tokens[j] = from;
      if constexpr (GATHER) tokens[j] = slot_of_row(all.row_slot, from, args.rows);
    }
  };
  const auto load = [&] {
    if (ahead < tiles) {
      uint4* const to = stages + slot * kStage;
#pragma unroll
      for (int j = 0; j < kCopies; ++j) {
        const int at = threadIdx.x + 256 * j, of_stage = at / kUnits, unit = at % kUnits, k = tile_ahead.k + 8 * unit;
        const bool valid = row + of_stage < tile_ahead.end && k < args.k;
        const int64_t token = GATHER ? tokens[j] / all.top_k : tokens[j];
        cp_async16(to + unit_at(of_stage, unit), args.x + (valid ? token * args.k + k : 0), valid);
      }
      for (int at = threadIdx.x; at < kNarrow; at += 256) {
        const int of_stage = at / (2 * C), n = at % (2 * C) * 8;
        const bool valid = row + of_stage < tile_ahead.end && n < args.n;
        cp_async16(to + kWide + at, args.grad + (valid ? static_cast<int64_t>(row + of_stage) * args.n + n : 0), valid);
      }
      row += kStageRows;
      find();
    }
    if (++slot == STAGES) slot = 0;
    cp_async_commit();
  };
  if (ahead < tiles) tile_ahead = wgrad_tile<64, kColumns>(args, order, ahead), row = tile_ahead.row;
  find();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) load();

  int now = 0;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const WgradTile tile = wgrad_tile<64, kColumns>(args, order, index);
    float acc[2 * C][4] = {};
    for (int first = tile.row; first < tile.end; first += kStageRows) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      load();
      const uint4* const wide = stages + now * kStage;
      const uint4* const narrow = wide + kWide;
#pragma unroll
      for (int step = 0; step < kStageRows / 16; ++step) {
        uint32_t a[4], b[4];
        const int from = 16 * step + lane % 8;
        ldmatrix_x4_transposed(a, wide + unit_at(from + matrix / 2 * 8, 2 * warp + matrix % 2));
#pragma unroll
        for (int c = 0; c < C; ++c) {
          ldmatrix_x4_transposed(b, narrow + (from + matrix % 2 * 8) * 2 * C + 2 * c + matrix / 2);
          mma<BF16>(acc[2 * c], a, b[0], b[1]);
          mma<BF16>(acc[2 * c + 1], a, b[2], b[3]);
        }
      }
      if (++now == STAGES) now = 0;
    }
    uint16_t* const out = static_cast<uint16_t*>(args.out) + tile.out;
#pragma unroll
    for (int i = 0; i < 4 * C; ++i) {
      const int c = i / 2, half = i % 2;
      uint32_t pair = narrow2<BF16>(acc[c][2 * half], acc[c][2 * half + 1]);
      int k = tile.k + 16 * warp + 8 * half + g, n = 8 * c + 2 * t;
      if constexpr (!WIDE_FIRST) pair = transpose8x8(pair), k += 2 * t - g, n += g - 2 * t;
      if (k < args.k && n < args.n) *reinterpret_cast<uint32_t*>(out + (WIDE_FIRST ? static_cast<int64_t>(k) * args.n + n : static_cast<int64_t>(n) * args.k + k)) = pair;
    }
  }
  cp_async_wait<0>();
}
