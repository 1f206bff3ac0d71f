// The biases of experts, added to rows, and their gradients: sums over each expert's rows, in an order that depends on the offsets.
// Compiled at run time for kernels/cuda/training.py behind activation.cu; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// Gradients: the rows of each expert are cut into chunks of kChunkRows. bias_grad_chunks adds up each chunk, bias_grad_reduce the chunks of
// an expert; the first kernel writes the sum of an expert with one chunk. No atomics: each run gives the same bits. Bound by memory.

struct BiasArguments {
  const void* rows_in;  // (M, N): y, or the gradient of the output
  const void* offsets;  // (E,) row ends
  const void* scale;    // (M,), of the bias, or null
  const void* bias;     // (E, N) or null
  float* partial_sums;  // (chunks, N)
  void* out;            // add_bias: (M, N); bias_grad: (E, N) float32; bias_scale_grad: (M,) float32
  const void* scales;   // (M,), of the whole row, or null
  int rows, num_experts, n;
  int wide_offsets, scale_dtype, scales_dtype, keep_tail;  // rows past the end stay as they were, else they become zeros
  int block_columns;                                       // of bias_grad_reduce
};

constexpr int kChunkRows = 128, kColumns = 256, kWarps = kRowThreads / 32;

// The row end of an expert, within 0 to rows.
DEVICE int row_end_of(const BiasArguments& args, int expert) {
  if (expert < 0) return 0;
  return static_cast<int>(max(min(offset_at(args.offsets, expert, args.wide_offsets), static_cast<int64_t>(args.rows)), static_cast<int64_t>(0)));
}
DEVICE int chunks_of(const BiasArguments& args, int expert) {
  return max(row_end_of(args, expert) - row_end_of(args, expert - 1) + kChunkRows - 1, 0) / kChunkRows;
}

// Column i of a lane's 8: they are neighbours if 16 bytes can be loaded at a time.
template <bool VECTOR>
DEVICE int column_of(int tile, int i) {
  const int lane = threadIdx.x % 32;
  return tile * kColumns + (VECTOR ? lane * 8 + i : i * 32 + lane);
}

// A block: one chunk, 256 columns. Warp w adds rows w, w + 8, ...; then the warps' sums are added in their order.
template <int DTYPE, bool VECTOR>
__global__ void __launch_bounds__(kRowThreads) bias_grad_chunks(const BiasArguments args) {
  await_previous_kernel();
  __shared__ int warp_total[kWarps], found_expert, found_before;
  __shared__ float sums[kWarps][kColumns];
  const int tiles = (args.n + kColumns - 1) / kColumns, chunk = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  if (threadIdx.x == 0) found_expert = -1;
  __syncthreads();
  int carry = 0;
  for (int base = 0; base < args.num_experts && carry <= chunk; base += kRowThreads) {
    const int expert = base + static_cast<int>(threadIdx.x), mine = expert < args.num_experts ? chunks_of(args, expert) : 0;
    const int through = scan_block<kRowThreads>(mine, warp_total, carry);
    if (chunk < through && chunk >= through - mine) found_expert = expert, found_before = through - mine;
  }
  __syncthreads();
  const int expert = found_expert;
  if (expert < 0) return;  // there are fewer chunks than there could be
  const int end = row_end_of(args, expert), begin = row_end_of(args, expert - 1) + (chunk - found_before) * kChunkRows;
  const int last = min(end, begin + kChunkRows), warp = threadIdx.x / 32;
  float sum[8] = {};
  // Lane i loads the factor of the warp's row i, before the rows.
  const int lane = threadIdx.x % 32, of_lane = begin + warp + lane * kWarps;
  const float factor = args.scale != nullptr && lane < kChunkRows / kWarps && of_lane < last ? load_float(args.scale, of_lane, args.scale_dtype) : 1.0f;
  constexpr int kLoads = DTYPE == 0 ? 4 : 8;  // rows whose loads are independent
  for (int i = 0; i < kChunkRows / kWarps; i += kLoads) {
    const int first = begin + warp + i * kWarps;
    if (first >= last) break;
    if constexpr (VECTOR) {
      const int column = column_of<true>(tile, 0);
      Eight<DTYPE> rows[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        if (first + j * kWarps < last && column < args.n) rows[j].load(args.rows_in, static_cast<int64_t>(first + j * kWarps) * args.n + column);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const float scale = args.scale != nullptr ? broadcast(factor, i + j) : 1.0f;
        if (first + j * kWarps >= last || column >= args.n) continue;
        float values[8];
        widen8<DTYPE>(values, rows[j]);
#pragma unroll
        for (int at = 0; at < 8; ++at) sum[at] += values[at] * scale;
      }
    } else {
      for (int j = 0; j < kLoads; ++j) {
        const float scale = args.scale != nullptr ? broadcast(factor, i + j) : 1.0f;
        if (first + j * kWarps >= last) continue;
#pragma unroll
        for (int at = 0; at < 8; ++at) {
          const int column = column_of<false>(tile, at);
          if (column < args.n) sum[at] += load_float(args.rows_in, static_cast<int64_t>(first + j * kWarps) * args.n + column, DTYPE) * scale;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[warp][column_of<VECTOR>(0, i)] = sum[i];
  __syncthreads();
  const int column = tile * kColumns + static_cast<int>(threadIdx.x);
  if (column >= args.n) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += sums[i][threadIdx.x];
  float* const to = chunks_of(args, expert) == 1 ? static_cast<float*>(args.out) + static_cast<int64_t>(expert) * args.n
                                                 : args.partial_sums + static_cast<int64_t>(chunk) * args.n;
  to[column] = total;
}

// A block sums args.block_columns columns of one expert; a warp takes 32 columns. Few chunks are added one after the other. If there
// are many, each warp adds neighbouring ones, then the warps' sums are added in their order.
__global__ void __launch_bounds__(kRowThreads) bias_grad_reduce(const BiasArguments args) {
  await_previous_kernel();
  constexpr int kFewChunks = 8;
  __shared__ int warp_total[kWarps];
  __shared__ float sums[kWarps][32];
  const int tiles = (args.n + args.block_columns - 1) / args.block_columns, expert = blockIdx.x / tiles, lane = threadIdx.x % 32;
  const int first = blockIdx.x % tiles * args.block_columns, last = min(args.n, first + args.block_columns), warp = threadIdx.x / 32;
  const int count = chunks_of(args, expert);
  float* const out = static_cast<float*>(args.out) + static_cast<int64_t>(expert) * args.n;
  if (count == 1) return;  // done
  if (count == 0) {
    for (int column = first + static_cast<int>(threadIdx.x); column < last; column += kRowThreads) out[column] = 0.0f;
    return;
  }
  int before = 0;
  for (int base = 0; base < expert; base += kRowThreads) {
    const int other = base + static_cast<int>(threadIdx.x);
    scan_block<kRowThreads>(other < expert ? chunks_of(args, other) : 0, warp_total, before);
  }
  const float* const from = args.partial_sums + static_cast<int64_t>(before) * args.n;
  if (count <= kFewChunks) {
    for (int column = first + static_cast<int>(threadIdx.x); column < last; column += kRowThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int chunk = 0; chunk < kFewChunks; ++chunk)
        if (chunk < count) sum += from[static_cast<int64_t>(chunk) * args.n + column];
      out[column] = sum;
    }
    return;
  }
  const int begin = static_cast<int>(static_cast<int64_t>(count) * warp / kWarps), end = static_cast<int>(static_cast<int64_t>(count) * (warp + 1) / kWarps);
  for (int base = first; base < last; base += 32) {
    const int column = base + lane;
    float sum = 0.0f;
    if (column < last) {
#pragma unroll 8
      for (int chunk = begin; chunk < end; ++chunk) sum += from[static_cast<int64_t>(chunk) * args.n + column];
    }
    __syncthreads();  // the sums before are read
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= last) continue;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += sums[i][lane];
    out[column] = total;
  }
}

// The expert of a row that belongs to one: the first expert whose rows end behind it.
DEVICE int expert_of(const BiasArguments& args, int64_t row) {
  int low = 0, high = args.num_experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (row_end_of(args, middle) > row) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The gradient of the factor of each row's bias, a warp per row: the sum of grad * bias of its expert; 0 past the end.
template <int DTYPE, int BIAS_DTYPE, bool VECTOR>
__global__ void __launch_bounds__(kRowThreads) bias_scale_grad(const BiasArguments args) {
  await_previous_kernel();
  constexpr int kStep = VECTOR ? 8 : 1, kPack = VECTOR ? 0 : -1;
  const int end = row_end_of(args, args.num_experts - 1);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < args.rows; row += static_cast<int64_t>(gridDim.x) * kWarps) {
    float sum = 0.0f;
    if (row < end) {
      const int64_t row_at = row * args.n, bias_at = static_cast<int64_t>(expert_of(args, row)) * args.n;
      for (int column = threadIdx.x % 32 * kStep; column < args.n; column += 32 * kStep) {
        float grad[8], bias[8];
        load_features<DTYPE, kPack>(grad, args.rows_in, row_at + column);
        load_features<BIAS_DTYPE, kPack>(bias, args.bias, bias_at + column);
#pragma unroll
        for (int i = 0; i < kStep; ++i) sum += grad[i] * bias[i];
      }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) static_cast<float*>(args.out)[row] = sum;
  }
}

// (y + bias * scale) * scales: a warp per row. BIAS_DTYPE -1: without a bias.
template <int DTYPE, int BIAS_DTYPE, bool VECTOR>
__global__ void __launch_bounds__(kRowThreads) add_bias(const BiasArguments args) {
  await_previous_kernel();
  constexpr int kStep = VECTOR ? 8 : 1, kPack = VECTOR ? 0 : -1;
  const int end = row_end_of(args, args.num_experts - 1);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; row < args.rows; row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const bool dead = row >= end;
    if (dead && args.keep_tail) continue;
    const int64_t row_at = row * args.n, bias_at = dead || BIAS_DTYPE < 0 ? 0 : static_cast<int64_t>(expert_of(args, row)) * args.n;
    const float scale = dead || args.scale == nullptr ? 1.0f : load_float(args.scale, row, args.scale_dtype);
    const float scales = dead || args.scales == nullptr ? 1.0f : load_float(args.scales, row, args.scales_dtype);
    for (int column = threadIdx.x % 32 * kStep; column < args.n; column += 32 * kStep) {
      float y[8] = {};
      if (!dead) {
        float bias[8] = {};
        load_features<DTYPE, kPack>(y, args.rows_in, row_at + column);
        if constexpr (BIAS_DTYPE >= 0) load_features<BIAS_DTYPE, kPack>(bias, args.bias, bias_at + column);
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          if constexpr (BIAS_DTYPE >= 0) y[i] += bias[i] * scale;
          y[i] *= scales;
        }
      }
      store_features<DTYPE, kPack>(args.out, row_at + column, y);
    }
  }
}

// Rows past the end become zeros.
template <int DTYPE>
__global__ void __launch_bounds__(kRowThreads) zero_past_end(const BiasArguments args) {
  await_previous_kernel();
  const int64_t begin = static_cast<int64_t>(row_end_of(args, args.num_experts - 1)) * args.n, end = static_cast<int64_t>(args.rows) * args.n;
  for (int64_t at = begin + static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; at < end; at += static_cast<int64_t>(gridDim.x) * kRowThreads)
    store1<DTYPE>(args.out, at, 0.0f);
}
