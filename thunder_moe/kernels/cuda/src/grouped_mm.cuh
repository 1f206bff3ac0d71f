// Shared by the grouped GEMM kernels: operands, the tiles of a routing, the epilogue.
// Compiled behind the header of the weights' format and in front of the kernels' own files (kernels/cuda/configs.py, direct.py);
// calls it, common.cuh and ptx.cuh.
//
// The weights are the left operand of the tensor cores: 16 rows by 16 k of a warp, in registers; the tokens are the
// right one, 8 columns by 16 k. Legend: M rows sorted by expert, E experts, N output features, K input features,
// lane = 4 * g + t: a thread holds rows g and g + 8, and of a step's 16 k the pairs 2 t and 2 t + 8.

struct GemmArguments {
  const uint16_t* x;        // (M, K), or the tokens (T, K) with row_slot
  const uint8_t* qdata;     // (E, N, K / kCodesPerByte)
  const uint8_t* scale;     // (E, N, K / kScaleK)
  const float* global_scale;  // (E,) or (E, N), or null where the format has none
  const int* offsets;       // (E,) row ends, or null: one expert that has all rows
  const int* row_slot;      // (M,) or null
  const void* slot_scale;   // (M,), or (T * A,) with row_slot, or null
  const void* bias;         // (E, N) or null
  uint16_t* out;            // (M, N), or (M, N / 2) with SwiGLU, rounded up to an even number
  float* partial_sums;      // workspace of stream-K, or null, see store_partial_sums
  int* semaphores;          // of partial_sums: zero before and after
  uint32_t* row_sums;       // the same for tiles of one row, or null, see send_row: zero before and after
  int rows, num_experts, n, k, top_k;
  int global_per_row, slot_scale_dtype, bias_dtype;  // dtypes: 0 float32, 1 bfloat16, 2 float16
  float alpha, limit, up_shift;  // limit <= 0: none
  int* tile_counter;  // of the tile scheduler: zero before and after
  int read_once;      // load weights with L2 evict_first, see `plan_gemm` of plan.py
  int row_tiles;      // whose rows stay in L2, see `tile_at`
  // For tiled_mma.cu and tiled_cluster.cu: the kernel before this one writes x and no other operand, so the other operands are
  // read before the wait for it (programmatic dependent launch).
  int x_from_previous_kernel;
};

struct GatherArguments {  // of gather_rows and order_rows
  const uint16_t* x;    // (M, K), or the tokens (T, K) with row_slot
  const int* row_slot;  // (M,) or null
  uint16_t* out;        // the rows, contiguous
  const int* end;       // where the rows of experts end, or null: the others, of ids that no expert here has, are left out
  int rows, k, top_k;
};

// The rows to gather; `end` is not trusted.
DEVICE int rows_to_gather(const GatherArguments& args) {
  return args.end == nullptr ? args.rows : min(max(*args.end, 0), args.rows);
}

constexpr int kChunk = 128;     // k of a chunk: 32 of each of the 4 threads that share a row
constexpr int kMaxExperts = 1024;

// ---- the tiles of a routing ----

// The end of an expert's rows, clamped to the rows that exist: offsets are not trusted. An expert that ends before it begins
// has none.
DEVICE int row_end(const GemmArguments& args, int expert) {
  return args.offsets == nullptr ? args.rows : min(max(args.offsets[expert], 0), args.rows);
}
DEVICE int tiles_between(int start, int end, int height) { return (max(end - start, 0) + height - 1) / height; }

// tile_start[e] = tiles of `height` rows of the experts before e, row_start[e] = their rows. All threads of the block call it.
template <int THREADS>
DEVICE void count_tiles(const GemmArguments& args, int height, int* tile_start, int* row_start, int* warp_total) {
  const int thread = threadIdx.x;
  int carry = 0;
  for (int base = 0; base < args.num_experts; base += THREADS) {
    const int e = base + thread;
    int tiles = 0;
    if (e < args.num_experts) {
      const int end = row_end(args, e);
      tiles = tiles_between(e ? row_end(args, e - 1) : 0, end, height);
      row_start[e + 1] = end;
    }
    const int end = scan_block<THREADS>(tiles, warp_total, carry);
    if (e < args.num_experts) tile_start[e + 1] = end;
  }
  if (thread == 0) tile_start[0] = row_start[0] = 0;
  __syncthreads();
}

// The last expert whose tiles start at or before `tile`.
DEVICE int expert_of_tile(const int* tile_start, int num_experts, int tile) {
  int low = 0, high = num_experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (tile_start[middle] <= tile) low = middle;
    else high = middle - 1;
  }
  return low;
}

struct Tile {
  int expert, row0, end, tile_n;  // rows row0 to at most end - 1
};

// Tile tile_m * tiles_n + tile_n of `height` rows. Within an expert the row tiles vary fastest, so that blocks that run at the
// same time read the same weights, which stay in L2. Many row tiles are cut into groups, whose rows stay there, too.
DEVICE Tile tile_at(const GemmArguments& args, const int* tile_start, const int* row_start, int tile_m, int tile_n, int tiles_n, int height) {
  const int expert = expert_of_tile(tile_start, args.num_experts, tile_m);
  const int before = tile_start[expert], tiles = tile_start[expert + 1] - before, start = row_start[expert], end = row_start[expert + 1];
  if (tiles == 1) return {expert, start, end, tile_n};  // saves a division
  const int group = tiles > 3 * args.row_tiles ? args.row_tiles : tiles;  // a group more reads the weights once more
  const TilePlace at = place_of_tile((tile_m - before) * tiles_n + tile_n, tiles, tiles_n, group);
  return {expert, start + at.row * height, end, at.column};
}
DEVICE Tile tile_of(const GemmArguments& args, const int* tile_start, const int* row_start, int tile, int tiles_n, int height) {
  return tile_at(args, tile_start, row_start, tile / tiles_n, tile % tiles_n, tiles_n, height);
}

// The token of a row; rows past `end` read the last one's, and are not stored.
DEVICE const uint16_t* token_of_row(const GemmArguments& args, int row, int end) {
  row = min(row, end - 1);
  return args.x + static_cast<int64_t>(args.row_slot != nullptr ? slot_of_row(args.row_slot, row, args.rows) / args.top_k : row) * args.k;
}

// ---- the GEMM ----

// The address at which a thread reads its rows g and g + 8, from its first chunk on.
struct Rows {
  const uint8_t* codes[2];
  const uint8_t* scales[2];
};

// The rows of weights of a warp: R blocks of 16, STRIDE output features apart from n0 on (SwiGLU: one of gate, one of
// up), from k on. Rows past the last are read from the last, and not stored.
template <bool SWIGLU, int R, int STRIDE>
DEVICE void find_rows(Rows (&rows)[R], const GemmArguments& args, int expert, int n0, int g, int k) {
  const int features = SWIGLU ? args.n / 2 : args.n;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int feature = min(n0 + (SWIGLU ? 0 : STRIDE * r) + g + 8 * half, features - 1);
      const int64_t row = static_cast<int64_t>(expert) * args.n + feature + (SWIGLU && r ? features : 0);
      rows[r].codes[half] = args.qdata + row * (args.k / kCodesPerByte) + k / kCodesPerByte;
      rows[r].scales[half] = args.scale + row * (args.k / kScaleK) + k / kScaleK;
    }
  }
}

// Prefetches the epilogue's operands of a tile into L2: with few rows their latency would not be hidden.
template <bool SWIGLU, int R, int STRIDE>
DEVICE void prefetch_for_epilogue(const GemmArguments& args, int expert, int n0, int g) {
  const int features = SWIGLU ? args.n / 2 : args.n;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int feature = min(n0 + g + (SWIGLU ? 0 : STRIDE * r), features - 1);
    const int64_t index = static_cast<int64_t>(expert) * args.n + feature + (SWIGLU && r ? features : 0);
    if (kGlobalScales && (r == 0 || args.global_per_row)) prefetch(args.global_scale + (args.global_per_row ? index : expert));
    if (args.bias != nullptr) prefetch(static_cast<const uint8_t*>(args.bias) + index * (args.bias_dtype == 0 ? 4 : 2));
  }
}

// Loads chunk `chunk` from there on. FULL: K is a multiple of the chunk. Otherwise k_left says how many k there are from the thread's
// 32 of that chunk on.
template <bool FULL, bool SCALES = true>
DEVICE void load_weights(Weights& w, const Rows& rows, int chunk, int k_left) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    load_row<FULL, SCALES>(w, half, rows.codes[half] + chunk * (kChunk / kCodesPerByte), rows.scales[half] + chunk * (kChunk / kScaleK), k_left);
}

// Multiplies one block of 8 tokens by half a decoded chunk; x holds the thread's 32 k of its token.
template <bool BF16>
DEVICE void multiply(float (&acc)[4], const uint32_t (&a)[4][4], const uint4 (&x)[4], int part) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    mma<BF16>(acc, a[2 * i], x[2 * part + i].x, x[2 * part + i].y);
    mma<BF16>(acc, a[2 * i + 1], x[2 * part + i].z, x[2 * part + i].w);
  }
}

// f(sum, its number) for each of a thread's sums.
template <int R, int C, class F>
DEVICE void for_each_sum(float (&acc)[R][C][4], F f) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(acc[r][c][i], (r * C + c) * 4 + i);
}

// The next stage of a ring.
template <int STAGES>
DEVICE int next_stage(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }

// The epilogue's factors and biases of a thread's rows of weights; rows past the last feature repeat the last row's.
template <int R>
struct RowFactors {
  float factor[R][2], bias[R][2];

  template <bool SWIGLU, int STRIDE>
  METHOD void load(const GemmArguments& args, int expert, int n0, int g) {
    const int features = SWIGLU ? args.n / 2 : args.n;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int feature = min(n0 + g + 8 * half + (SWIGLU ? 0 : STRIDE * r), features - 1);
        const int64_t index = static_cast<int64_t>(expert) * args.n + feature + (SWIGLU && r ? features : 0);
        factor[r][half] = kGlobalScales ? args.global_scale[args.global_per_row ? index : expert] : 1.0f;
        bias[r][half] = args.bias != nullptr ? load_float(args.bias, index, args.bias_dtype) : 0.0f;
      }
  }
};

// The slot_scale of a row of a tile; rows at or past `end` get the last row's scale.
DEVICE float scale_of_row(const GemmArguments& args, int row, int end) {
  row = min(row, end - 1);
  return load_float(args.slot_scale, args.row_slot != nullptr ? slot_of_row(args.row_slot, row, args.rows) : row, args.slot_scale_dtype);
}

// The epilogue: scales, bias and activation of a warp's results; row0 and n0 are its first row and output feature,
// STRIDE output features lie between its blocks of 16. A thread computes two tokens of a feature, and after an exchange
// stores two features of a token. scale_of(i) is the scale of row row0 + i.
template <bool BF16, bool SWIGLU, int C, int R, int STRIDE, class ScaleOf>
DEVICE void store(const GemmArguments& args, const float (&acc)[R][C][4], const RowFactors<R>& rows, ScaleOf scale_of, int row0, int end, int n0, int g, int t) {
  const int features = SWIGLU ? args.n / 2 : args.n;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    if (row0 + 8 * c >= end) break;
    const float row_scale[2] = {kUnscale<BF16> * scale_of(8 * c + 2 * t), kUnscale<BF16> * scale_of(8 * c + 2 * t + 1)};
    const int row = row0 + 8 * c + g;
    uint16_t* out = args.out + static_cast<int64_t>(row) * ((features + 1) & ~1) + n0 + 2 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float y[R][2];
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int column = 0; column < 2; ++column)
          y[r][column] = acc[r][c][2 * half + column] * rows.factor[r][half] * row_scale[column] + rows.bias[r][half];
      if constexpr (SWIGLU)
#pragma unroll
        for (int column = 0; column < 2; ++column) y[0][column] = activate(args, y[0][column], y[1][column]);
#pragma unroll
      for (int r = 0; r < (SWIGLU ? 1 : R); ++r) {
        const uint32_t pair = transpose8x8(narrow2<BF16>(y[r][0], y[r][1]));
        const int offset = STRIDE * r + 8 * half;
        if (row < end && n0 + offset + 2 * t < features) *reinterpret_cast<uint32_t*>(out + offset) = pair;
      }
    }
  }
}

// The same epilogue, but it loads row factors and scales itself.
template <bool BF16, bool SWIGLU, int C, int R, int STRIDE>
DEVICE void store(const GemmArguments& args, const float (&acc)[R][C][4], int expert, int row0, int end, int n0, int g, int t) {
  RowFactors<R> rows;
  rows.template load<SWIGLU, STRIDE>(args, expert, n0, g);
  const bool scaled = args.slot_scale != nullptr;
  const auto scale_of = [&](int i) { return scaled ? scale_of_row(args, row0 + i, end) : 1.0f; };
  store<BF16, SWIGLU, C, R, STRIDE>(args, acc, rows, scale_of, row0, end, n0, g, t);
}
