// Routing and weighted combine around the expert GEMMs, and row starts for torch's grouped GEMM.
// Compiled at run time for kernels/cuda/prepared.py and backend.py behind common.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// route: the slots t * A + a of tokens, sorted by expert, stably: a counting sort of one launch (one block) or two.
// Each block owns slots_per_block consecutive slots, each of its warps a consecutive part, so that ranks follow from counts.
// Slots of unknown experts (outside [0, E)) form bucket E, behind all others.

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct RouteArguments {
  const void* expert_ids;  // (S,) int32, or int64
  int* counts;             // (blocks, E + 1), or null when there is one block
  int* row_slot;           // (S,)
  int* offsets;            // (E,)
  int* slot_row;           // (S,)
  int slots, num_experts, wide_ids, slots_per_block;  // slots_per_block: a multiple of kThreads
};

struct CombineArguments {
  const uint16_t* rows;      // (M, N)
  const int* slot_row;       // (T, A)
  const void* slot_weight;   // (T, A) or null
  uint16_t* out;             // (T, N)
  int num_rows, tokens, top_k, n, slot_weight_dtype;  // dtypes: 0 float32, 1 bfloat16, 2 float16
  int rows_from_previous_kernel;  // the kernel before this one writes the rows and no other operand
};

struct RowStartsArguments {
  const int* offsets;  // (E,)
  int* starts;         // (E + 1,)
  int num_experts, rows;
};

DEVICE int bucket_of(const RouteArguments& args, int slot) {
  const int64_t id = args.wide_ids ? static_cast<const int64_t*>(args.expert_ids)[slot]
                                   : static_cast<const int*>(args.expert_ids)[slot];
  return id >= 0 && id < args.num_experts ? static_cast<int>(id) : args.num_experts;
}

// warp_count[w][bucket] = slots of the bucket among the slots of warp w of this block.
DEVICE void count_slots(const RouteArguments& args, int* warp_count) {
  const int buckets = args.num_experts + 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < kWarps * buckets; i += kThreads) warp_count[i] = 0;
  __syncthreads();
  const int first = blockIdx.x * args.slots_per_block + warp * (args.slots_per_block / kWarps);
  for (int i = 0; i < args.slots_per_block / kWarps; i += 32) {
    const int slot = first + i + lane;
    const int bucket = slot < args.slots ? bucket_of(args, slot) : -1;
    const uint32_t peers = __match_any_sync(0xffffffffu, bucket);
    if (bucket >= 0 && (peers & ((1u << lane) - 1)) == 0) warp_count[warp * buckets + bucket] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) route_count(const RouteArguments args) {
  await_previous_kernel();
  DYNAMIC_SHARED(int, warp_count);
  count_slots(args, warp_count);
  const int buckets = args.num_experts + 1;
  for (int bucket = threadIdx.x; bucket < buckets; bucket += kThreads) {
    int sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += warp_count[warp * buckets + bucket];
    args.counts[static_cast<int64_t>(blockIdx.x) * buckets + bucket] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) route_scatter(const RouteArguments args) {
  await_previous_kernel();
  DYNAMIC_SHARED(int, warp_count);  // [kWarps][E + 1]: counts, then the next row of each warp and bucket
  __shared__ int warp_total[kWarps];
  const int buckets = args.num_experts + 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  count_slots(args, warp_count);

  int carry = 0;  // slots of the buckets before
  for (int base = 0; base < buckets; base += kThreads) {
    const int bucket = base + threadIdx.x;
    int total = 0, before = 0;  // of the bucket: in all blocks, in the blocks before this one
    if (bucket < buckets) {
      if (args.counts == nullptr) {
        for (int w = 0; w < kWarps; ++w) total += warp_count[w * buckets + bucket];
      } else {
        for (int block = 0; block < gridDim.x; ++block) {
          const int count = args.counts[static_cast<int64_t>(block) * buckets + bucket];
          total += count;
          if (block < static_cast<int>(blockIdx.x)) before += count;
        }
      }
    }
    const int start = scan_block<kThreads>(total, warp_total, carry) - total;
    if (bucket < buckets) {
      if (blockIdx.x == 0 && bucket < args.num_experts) args.offsets[bucket] = start + total;
      int row = start + before;
      for (int w = 0; w < kWarps; ++w) {
        const int count = warp_count[w * buckets + bucket];
        warp_count[w * buckets + bucket] = row;
        row += count;
      }
    }
  }
  __syncthreads();

  int* next_row = warp_count + warp * buckets;
  const int first = blockIdx.x * args.slots_per_block + warp * (args.slots_per_block / kWarps);
  for (int i = 0; i < args.slots_per_block / kWarps; i += 32) {
    const int slot = first + i + lane;
    const int bucket = slot < args.slots ? bucket_of(args, slot) : -1;
    const uint32_t peers = __match_any_sync(0xffffffffu, bucket);
    const int rank = __popc(peers & ((1u << lane) - 1));
    const int row = bucket >= 0 ? next_row[bucket] + rank : 0;
    __syncwarp();
    if (bucket >= 0) {
      if (rank == 0) next_row[bucket] += __popc(peers);
      args.row_slot[row] = slot;
      args.slot_row[slot] = bucket < args.num_experts ? row : -1;
    }
    __syncwarp();
  }
}

// out[t] = sum over a of slot_weight[t, a] * rows[slot_row[t, a]], in float32 and in the order of a; slots without a row are skipped.
// A block sums columns of one token, a thread eight of them. With few tokens latency counts: the rows and weights of 32 slots are
// read at once, by as many threads, before the GEMM in front has ended, and then the values of SLOTS slots (one slot after the
// other took 2.5 us longer for 1 to 128 tokens of 8 slots, H200).
template <bool BF16, int SLOTS>
__global__ void __launch_bounds__(kThreads) combine(const CombineArguments args) {
  constexpr int kColumns = 8, kBatch = 32;
  __shared__ int row_of[kBatch];  // -1: none
  __shared__ float weight_of[kBatch];
  bool late = args.rows_from_previous_kernel;
  if (!late) await_previous_kernel();
  const int threads = blockDim.x, blocks_n = (args.n + kColumns * threads - 1) / (kColumns * threads);
  const int token = blockIdx.x / blocks_n, column = ((blockIdx.x % blocks_n) * threads + threadIdx.x) * kColumns;
  const auto from = [&](int row) { return args.rows + static_cast<int64_t>(row) * args.n + column; };
  float sum[kColumns] = {};
  for (int first = 0; first < args.top_k; first += kBatch) {
    const int count = min(args.top_k - first, kBatch);
    if (first > 0) __syncthreads();  // all threads have read the previous batch
    if (threadIdx.x < count) {
      const int64_t slot = static_cast<int64_t>(token) * args.top_k + first + threadIdx.x;
      const int row = args.slot_row[slot];
      row_of[threadIdx.x] = static_cast<uint32_t>(row) < static_cast<uint32_t>(args.num_rows) ? row : -1;
      weight_of[threadIdx.x] = args.slot_weight == nullptr ? 1.0f : load_float(args.slot_weight, slot, args.slot_weight_dtype);
    }
    __syncthreads();
    if (late) await_previous_kernel();
    late = false;
    const auto add = [&](const uint16_t (&values)[kColumns], float weight) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] += weight * widen<BF16>(values[c]);
    };
    if (column >= args.n) continue;
    if (args.n % kColumns == 0) {
#pragma unroll 1
      for (int at = 0; at < count; at += SLOTS) {
        struct alignas(16) Columns {
          uint16_t of[kColumns];
        } values[SLOTS];
        int row[SLOTS];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
          row[i] = at + i < count ? row_of[at + i] : -1;
          if (row[i] >= 0) *reinterpret_cast<uint4*>(values[i].of) = *reinterpret_cast<const uint4*>(from(row[i]));
        }
#pragma unroll
        for (int i = 0; i < SLOTS; ++i)
          if (row[i] >= 0) add(values[i].of, weight_of[at + i]);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        if (row_of[i] < 0) continue;
        uint16_t values[kColumns];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) values[c] = column + c < args.n ? from(row_of[i])[c] : 0;
        add(values, weight_of[i]);
      }
    }
  }
  if (late) await_previous_kernel();  // there are no slots
  uint16_t* to = args.out + static_cast<int64_t>(token) * args.n + column;
  if (column < args.n && args.n % kColumns == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(
        narrow2<BF16>(sum[0], sum[1]), narrow2<BF16>(sum[2], sum[3]), narrow2<BF16>(sum[4], sum[5]), narrow2<BF16>(sum[6], sum[7]));
  } else {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (column + c < args.n) to[c] = narrow<BF16>(sum[c]);
  }
}

// starts = 0 and the offsets, clamped so that they never decrease nor exceed the number of rows. One warp.
__global__ void __launch_bounds__(32) row_starts(const RowStartsArguments args) {
  await_previous_kernel();
  const int lane = threadIdx.x;
  int before = 0;
  if (lane == 0) args.starts[0] = 0;
  for (int base = 0; base < args.num_experts; base += 32) {
    const int expert = base + lane;
    int end = max(min(args.offsets[min(expert, args.num_experts - 1)], args.rows), before);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) end = max(end, __shfl_up_sync(0xffffffffu, end, step));
    if (expert < args.num_experts) args.starts[expert + 1] = end;
    before = __shfl_sync(0xffffffffu, end, 31);
  }
}
