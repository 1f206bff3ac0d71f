// Shared by the kernels of weights' gradients: the order of experts, and adding to or writing the result.
// Compiled behind ptx.cuh (and wgmma.cuh) and in front of wgrad_mma.cu, wgrad_wgmma.cu or rank_wgrad.cu (kernels/cuda/wgrad.py).

struct WgradArguments {
  const uint16_t* grad;  // (M, N), of the output
  const uint16_t* x;     // (M, K), rows sorted by expert
  const void* offsets;   // row ends of all experts
  void* out;             // (E, N, K)
  int rows, first_expert, num_experts, n, k;  // E experts from the first on
  int wide_offsets, accumulate, narrow_out;  // offsets are int64; add to `out`, else write it; it has the operands' dtype, not float32
};

constexpr int kMostExperts = 1024;

// The rows of each expert, and the experts with most rows first: the last tiles, which not all blocks have, are short ones.
struct ExpertOrder {
  int begin[kMostExperts], end[kMostExperts], expert[kMostExperts], count;
};

// Returns the number of experts with work: experts with rows, or all experts if the result is written. All threads call it.
DEVICE int order_experts(const WgradArguments& args, ExpertOrder& order) {
  const int threads = blockDim.x;
  const auto row_end = [&](int of) {
    const int expert = args.first_expert + of;
    if (expert < 0) return 0;
    const int64_t end = args.wide_offsets ? static_cast<const int64_t*>(args.offsets)[expert] : static_cast<const int*>(args.offsets)[expert];
    return static_cast<int>(max(min(end, static_cast<int64_t>(args.rows)), static_cast<int64_t>(0)));
  };
  if (threadIdx.x == 0) order.count = 0;
  for (int expert = threadIdx.x; expert < args.num_experts; expert += threads) {
    const int begin = row_end(expert - 1);
    order.begin[expert] = begin, order.end[expert] = max(row_end(expert), begin);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < args.num_experts; expert += threads) {
    const int mine = order.end[expert] - order.begin[expert];
    int rank = 0;
    for (int other = 0; other < args.num_experts; ++other) {
      const int rows = order.end[other] - order.begin[other];
      rank += rows > mine || (rows == mine && other < expert);
    }
    order.expert[rank] = expert;
    if (mine > 0 || !args.accumulate) atomicAdd(&order.count, 1);
  }
  __syncthreads();
  return order.count;
}

// A tile of an expert's result: the expert's rows, the first column of grad and of x.
struct WgradTile {
  int row, end, n, k, expert;
  int64_t out;  // where the expert's result begins
};

template <int TILE_N, int TILE_K>
DEVICE int tiles_of_expert(const WgradArguments& args) {
  return ((args.n + TILE_N - 1) / TILE_N) * ((args.k + TILE_K - 1) / TILE_K);
}

template <int TILE_N, int TILE_K>
DEVICE WgradTile wgrad_tile(const WgradArguments& args, const ExpertOrder& order, int index) {
  constexpr int kGroup = 8;  // tiles of K beside each other, for all N: what blocks read at a time stays in L2
  const int tiles_n = (args.n + TILE_N - 1) / TILE_N, tiles_k = (args.k + TILE_K - 1) / TILE_K, tiles = tiles_n * tiles_k;
  const int place = index / tiles, rest = index - place * tiles, group = rest / (kGroup * tiles_n);
  const int inside = rest - group * kGroup * tiles_n, width = min(kGroup, tiles_k - group * kGroup), expert = order.expert[place];
  return {order.begin[expert], order.end[expert], inside / width * TILE_N, (group * kGroup + inside % width) * TILE_K,
          args.first_expert + expert, static_cast<int64_t>(expert) * args.n * args.k};
}

// acc[i]: columns 8 i and 8 i + 1 of row n at element `first` of the result (of t = 0), and of row n + 8; k: the first column.
// Neighbouring lanes exchange halves, so that each has four columns in a row: even ones of block i, odd ones of block i + 1.
// PAIRS: of blocks, whose loads are independent.
template <bool BF16, int PAIRS = 4, int C>
DEVICE void store_sums(const WgradArguments& args, const float (&acc)[C][4], int64_t first, int n, int k) {
  constexpr int kPairs = C < 2 * PAIRS ? C / 2 : PAIRS;
  const int t = threadIdx.x % 4, odd = t % 2, at = odd ? 8 + 2 * (t - 1) : 2 * t;
#pragma unroll
  for (int base = 0; base < C; base += 2 * kPairs) {
    float4 before[kPairs][2];
    const auto valid = [&](int i, int half) { return n + 8 * half < args.n && k + 8 * (base + 2 * i) + at < args.k; };
    const auto place = [&](int i, int half) { return first + static_cast<int64_t>(8 * half) * args.k + 8 * (base + 2 * i) + at; };
    if (args.accumulate) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (valid(i, half)) before[i][half] = *reinterpret_cast<const float4*>(static_cast<const float*>(args.out) + place(i, half));
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&low)[4] = acc[base + 2 * i];
        const float(&high)[4] = acc[base + 2 * i + 1];
        const float x = shuffle_xor(odd ? low[2 * half] : high[2 * half], 1);
        const float y = shuffle_xor(odd ? low[2 * half + 1] : high[2 * half + 1], 1);
        float4 sum = {x, y, high[2 * half], high[2 * half + 1]};
        if (!odd) sum = {low[2 * half], low[2 * half + 1], x, y};
        if (!valid(i, half)) continue;
        if (args.narrow_out) {
          *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.out) + place(i, half)) = make_uint2(narrow2<BF16>(sum.x, sum.y), narrow2<BF16>(sum.z, sum.w));
          continue;
        }
        if (args.accumulate) {
          const float4& old = before[i][half];
          sum = {sum.x + old.x, sum.y + old.y, sum.z + old.z, sum.w + old.w};
        }
        *reinterpret_cast<float4*>(static_cast<float*>(args.out) + place(i, half)) = sum;
      }
  }
}
