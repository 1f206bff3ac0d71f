// Shared by the grouped GEMMs of 16-bit and float32 weights: operands, tiles of a routing, zeros past the last row end.
// Compiled behind ptx.cuh and in front of linear_mma.cu or gather_low_rank.cu, or behind wgmma_shared.cuh and in front of linear_wgmma.cu
// (kernels/cuda/linear.py, low_rank.py).

struct LinearArguments {
  const void* x;        // (M, K), rows sorted by expert
  const void* weight;   // (E, N, K); of kernels that are TRANSPOSED (E, K, N)
  const void* offsets;  // row ends of all experts
  void* out;            // (M, N)
  int rows, first_expert, num_experts, n, k;  // E experts from the first on
  int wide_offsets, zero_tail;  // offsets are int64; rows past the last end become zeros, else they stay as they were
};

constexpr int kMostExperts = 1024;

struct ExpertTiles {
  int end[kMostExperts + 1];    // row ends; end[0]: where the first expert begins; none is less than the one before
  int tiles[kMostExperts + 1];  // of rows, of the experts up to this one; tiles[0] = 0
};

// All threads call it.
template <int ROWS>
DEVICE void count_tiles(const LinearArguments& args, ExpertTiles& experts) {
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const auto row_end = [&](int expert) {
      if (expert < 0) return 0;
      const int64_t end = args.wide_offsets ? static_cast<const int64_t*>(args.offsets)[expert] : static_cast<const int*>(args.offsets)[expert];
      return static_cast<int>(max(min(end, static_cast<int64_t>(args.rows)), static_cast<int64_t>(0)));
    };
    int begin = row_end(args.first_expert - 1), tiles = 0;
    if (lane == 0) experts.end[0] = begin, experts.tiles[0] = 0;
    for (int base = 0; base < args.num_experts; base += 32) {
      const int expert = base + lane;
      int end = expert < args.num_experts ? max(row_end(args.first_expert + expert), begin) : begin;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) end = max(end, __shfl_up_sync(0xffffffffu, end, step));
      const int before = __shfl_up_sync(0xffffffffu, end, 1);
      int through = (end - (lane == 0 ? begin : before) + ROWS - 1) / ROWS;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += other;
      }
      if (expert < args.num_experts) experts.end[expert + 1] = end, experts.tiles[expert + 1] = tiles + through;
      begin = __shfl_sync(0xffffffffu, end, 31);
      tiles += __shfl_sync(0xffffffffu, through, 31);
    }
  }
  __syncthreads();
}

// A tile of the result: its expert, its rows, its first column.
struct LinearTile {
  int expert, row, end, n;
};

// Tiles in the order in which blocks take them, so that the operands of concurrent tiles stay in L2. A thread asks for ascending ones.
template <int ROWS, int COLUMNS>
struct LinearTiles {
  const LinearArguments& args;
  const ExpertTiles& experts;
  int columns, place;  // tiles beside each other; the expert that the last tile was of

  METHOD LinearTiles(const LinearArguments& args, const ExpertTiles& experts)
      : args(args), experts(experts), columns((args.n + COLUMNS - 1) / COLUMNS), place(0) {}
  METHOD int64_t count() const { return static_cast<int64_t>(experts.tiles[args.num_experts]) * columns; }
  METHOD LinearTile at(int64_t index) {
    constexpr int kGroup = 8;  // tiles below each other, for all columns
    const int row_tile = static_cast<int>(index / columns);
    while (row_tile >= experts.tiles[place + 1]) ++place;
    const int first = experts.tiles[place], tiles = experts.tiles[place + 1] - first;
    const TilePlace at = place_of_tile(static_cast<int>(index - static_cast<int64_t>(first) * columns), tiles, columns, kGroup);
    const int row = experts.end[place] + at.row * ROWS;
    return {args.first_expert + place, row, min(row + ROWS, experts.end[place + 1]), at.column * COLUMNS};
  }
};

// Writes a block's part of the zeros for rows past the last end, with `threads` of its threads. Rows are whole units.
template <class Unit>
DEVICE void write_zeros(const LinearArguments& args, const ExpertTiles& experts, int row_bytes, int thread, int threads) {
  if (!args.zero_tail) return;
  const int64_t width = row_bytes / static_cast<int>(sizeof(Unit)), end = args.rows * width, step = static_cast<int64_t>(gridDim.x) * threads;
  Unit* const out = static_cast<Unit*>(args.out);
  for (int64_t at = experts.end[args.num_experts] * width + static_cast<int64_t>(blockIdx.x) * threads + thread; at < end; at += step) out[at] = Unit{};
}
