// A router's logits -> scores, expert ids, and the slots t * A + a sorted by expert, stably: one launch for few tokens, else two.
// Compiled at run time by kernels/cuda/backend.py behind common.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// A warp chooses the experts of a token: lane l has experts l, l + 32, ...; each choice is two reductions over the warp, of keys
// that order as the values do (NaN on top) and of the index among equal keys. What is computed: `RouterForm` of routing.py.
// Few tokens: router_one_block does all. Else router_choose, whose blocks count the slots of each expert among their tokens, and
// router_scatter, whose blocks have the same tokens.

struct RouterArguments {
  const void* logits;   // (T, E)
  const void* bias;     // (E,) or null
  void* scores;         // (T, A)
  int64_t* expert_ids;  // (T, A)
  int* counts;          // (blocks, E); null for router_one_block
  int* row_slot;        // (T * A,)
  int* offsets;         // (E,)
  int* slot_row;        // (T, A)
  int tokens, num_experts, top_k, tokens_per_block;
  int logits_dtype, bias_dtype, scores_dtype;  // 0 float32, 1 bfloat16, 2 float16
  int sigmoid, normalize, num_groups, top_groups, group_best, mask_to_zero;
  float epsilon, least_sum, scale;
};

constexpr uint32_t kAll = 0xffffffffu;
constexpr int kScatterThreads = 512;

#ifdef CUDA_EMULATOR
DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
#else
DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }
#endif

// Keys order as the values do: -0 as 0, NaN above infinity; no value has key 0.
DEVICE uint32_t key_of(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return kAll;
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

DEVICE float value_of(uint32_t key) { return bits_to_float(key >> 31 ? key & (key == kAll ? kAll : 0x7FFFFFFF) : ~key); }

DEVICE float sum_of_warp(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += bits_to_float(__shfl_xor_sync(kAll, float_to_bits(value), mask));
  return value;
}

DEVICE float shuffle(float value, int from) {
  return bits_to_float(static_cast<uint32_t>(__shfl_sync(kAll, static_cast<int>(float_to_bits(value)), from)));
}

DEVICE float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// The best of a lane's keys; the lowest i among equal ones.
template <int PER_LANE>
DEVICE uint32_t best_of_lane(const uint32_t (&keys)[PER_LANE], int& index) {
  uint32_t best = keys[0];
  index = 0;
#pragma unroll
  for (int i = 1; i < PER_LANE; ++i)
    if (keys[i] > best) best = keys[i], index = i;
  return best;
}

// The groups of consecutive experts with the best sums of their best, as bits.
template <int PER_LANE>
DEVICE uint32_t best_groups(const RouterArguments& args, const uint32_t (&keys)[PER_LANE]) {
  const int lane = threadIdx.x % 32, of_group = args.num_experts / args.num_groups;
  uint32_t mine = 0;  // of lane g: the key of group g's sum
  for (int group = 0; group < args.num_groups; ++group) {
    uint32_t taken = 0;  // bits of i
    float sum = 0.0f;
    for (int best = 0; best < args.group_best; ++best) {
      uint32_t own = 0;
      int index = 0;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int expert = lane + 32 * i;
        const bool counts = expert / of_group == group && expert < args.num_experts && !(taken >> i & 1);
        if (counts && keys[i] > own) own = keys[i], index = i;
      }
      const uint32_t key = __reduce_max_sync(kAll, own);
      const uint32_t expert = __reduce_min_sync(kAll, own == key ? static_cast<uint32_t>(lane + 32 * index) : kAll);
      if (expert % 32 == static_cast<uint32_t>(lane)) taken |= 1u << (expert / 32);
      sum += value_of(key);
    }
    if (lane == group) mine = key_of(sum);
  }
  uint32_t chosen = 0;
  for (int i = 0; i < args.top_groups; ++i) {
    const uint32_t key = __reduce_max_sync(kAll, mine);
    const uint32_t group = __reduce_min_sync(kAll, mine == key ? static_cast<uint32_t>(lane) : kAll);
    if (group == static_cast<uint32_t>(lane)) mine = 0;
    chosen |= 1u << group;
  }
  return chosen;
}

// The experts of a token and their scores: lane a < A gets the a-th best, writes it, and returns its id.
// BY_SCORE: the choice is by the scores plus the bias, within groups; else by the logits alone.
template <int PER_LANE, bool BY_SCORE>
DEVICE int choose(const RouterArguments& args, int token) {
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(token) * args.num_experts;
  float values[PER_LANE];  // the logits; by score: the scores
  uint32_t keys[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = lane + 32 * i;
    const bool exists = expert < args.num_experts;
    values[i] = exists ? load_float(args.logits, first + expert, args.logits_dtype) : 0.0f;
    keys[i] = exists ? key_of(values[i]) : 0;
  }
  // By the logits, and normalized over the chosen ones: the sum over all experts cancels.
  const bool needs_sum = !args.sigmoid && (BY_SCORE || !args.normalize || args.epsilon > 0.0f || args.least_sum > 0.0f);
  float largest = 0.0f, sum = 1.0f;
  int index;
  uint32_t best = best_of_lane(keys, index);
  if (needs_sum) {
    largest = value_of(__reduce_max_sync(kAll, best));
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const float power = keys[i] != 0 ? expf(values[i] - largest) : 0.0f;
      sum += power;
      if constexpr (BY_SCORE) values[i] = power;
    }
    sum = sum_of_warp(sum);
  }
  if constexpr (BY_SCORE) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = lane + 32 * i;
      if (expert >= args.num_experts) continue;
      values[i] = args.sigmoid ? sigmoid(values[i]) : values[i] / sum;
      keys[i] = key_of(values[i] + (args.bias == nullptr ? 0.0f : load_float(args.bias, expert, args.bias_dtype)));
    }
    if (args.top_groups < args.num_groups) {
      const uint32_t groups = best_groups(args, keys);
      const uint32_t masked = key_of(args.mask_to_zero ? 0.0f : -bits_to_float(0x7F800000));
      const int of_group = args.num_experts / args.num_groups;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int expert = lane + 32 * i;
        if (expert < args.num_experts && !(groups >> (expert / of_group) & 1)) keys[i] = masked;
      }
    }
    best = best_of_lane(keys, index);
  }
  int id = 0;
  float chosen = 0.0f;
  for (int a = 0; a < args.top_k; ++a) {
    const uint32_t key = __reduce_max_sync(kAll, best);
    const int expert = static_cast<int>(__reduce_min_sync(kAll, best == key ? static_cast<uint32_t>(lane + 32 * index) : kAll));
    float value;
    if constexpr (BY_SCORE) {
      value = values[0];
#pragma unroll
      for (int i = 1; i < PER_LANE; ++i)
        if (i == index) value = values[i];
      value = shuffle(value, expert % 32);
    } else {
      value = value_of(key);
      if (a == 0 && !needs_sum) largest = value;
    }
    if (lane == a) id = expert, chosen = value;
    if (lane == expert % 32) {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (i == index) keys[i] = 0;
      best = best_of_lane(keys, index);
    }
  }
  const bool mine = lane < args.top_k;
  if constexpr (!BY_SCORE) chosen = args.sigmoid ? sigmoid(chosen) : expf(chosen - largest) / sum;
  if (args.normalize) {
    const float divisor = sum_of_warp(mine ? chosen : 0.0f) + args.epsilon;
    chosen /= divisor < args.least_sum ? args.least_sum : divisor;  // NaN stays NaN
  }
  chosen *= args.scale;
  if (mine) {
    const int64_t slot = static_cast<int64_t>(token) * args.top_k + lane;
    args.expert_ids[slot] = id;
    if (args.scores_dtype == 0) static_cast<float*>(args.scores)[slot] = chosen;
    else static_cast<uint16_t*>(args.scores)[slot] = args.scores_dtype == 1 ? narrow<true>(chosen) : narrow<false>(chosen);
  }
  return id;
}

// The rows of slots [first, end), whose experts are at `ids`: each warp has consecutive ones, and next_row[w][expert] is the first
// row of the expert's slots among them.
template <int WARPS, class Ids>
DEVICE void scatter_slots(const RouterArguments& args, int* next_row, int per_warp, int first, int end, const Ids& id_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  next_row += warp * args.num_experts;
  for (int i = 0; i < per_warp; i += 32) {
    const int slot = first + warp * per_warp + i + lane;
    const int id = slot < end ? id_of(slot) : -1;
    const uint32_t peers = __match_any_sync(kAll, id);
    const int rank = __popc(peers & ((1u << lane) - 1));
    const int row = id >= 0 ? next_row[id] + rank : 0;
    __syncwarp();
    if (id >= 0) {
      if (rank == 0) next_row[id] += __popc(peers);
      args.row_slot[row] = slot;
      args.slot_row[slot] = row;
    }
    __syncwarp();
  }
}

// warp_count[w][expert] = slots of the expert among those of warp w.
template <int WARPS, class Ids>
DEVICE void count_slots(const RouterArguments& args, int* warp_count, int per_warp, int first, int end, const Ids& id_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < WARPS * args.num_experts; i += 32 * WARPS) warp_count[i] = 0;
  __syncthreads();
  for (int i = 0; i < per_warp; i += 32) {
    const int slot = first + warp * per_warp + i + lane;
    const int id = slot < end ? id_of(slot) : -1;
    const uint32_t peers = __match_any_sync(kAll, id);
    if (id >= 0 && (peers & ((1u << lane) - 1)) == 0) warp_count[warp * args.num_experts + id] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

// Slots of a warp, a multiple of 32, when a block's are divided among its warps.
DEVICE int slots_per_warp(int slots, int warps) { return (slots + 32 * warps - 1) / (32 * warps) * 32; }

// All of it in one block: few tokens.
template <int PER_LANE, bool BY_SCORE, int THREADS>
__global__ void __launch_bounds__(THREADS) router_one_block(const RouterArguments args) {
  await_previous_kernel();
  constexpr int kWarps = THREADS / 32, kDirect = 128;  // slots that are ranked by comparing all with all
  DYNAMIC_SHARED(int, shared);
  __shared__ int warp_total[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slots = args.tokens * args.top_k;
  int* ids = shared;            // [T * A]
  int* rows = shared + slots;   // [kWarps][E], where slots are counted
  for (int token = warp; token < args.tokens; token += kWarps) {
    const int id = choose<PER_LANE, BY_SCORE>(args, token);
    if (lane < args.top_k) ids[token * args.top_k + lane] = id;
  }
  __syncthreads();
  if (slots <= kDirect) {
    if (static_cast<int>(threadIdx.x) < slots) {
      const int slot = threadIdx.x, id = ids[slot];
      int row = 0;
      for (int other = 0; other < slots; ++other) row += ids[other] < id + (other < slot ? 1 : 0);
      args.row_slot[row] = slot;
      args.slot_row[slot] = row;
    }
    for (int expert = threadIdx.x; expert < args.num_experts; expert += THREADS) {
      int end = 0;
      for (int other = 0; other < slots; ++other) end += ids[other] <= expert;
      args.offsets[expert] = end;
    }
    return;
  }
  const int per_warp = slots_per_warp(slots, kWarps);
  const auto id_of = [&](int slot) { return ids[slot]; };
  count_slots<kWarps>(args, rows, per_warp, 0, slots, id_of);
  int carry = 0;
  for (int base = 0; base < args.num_experts; base += THREADS) {
    const int expert = base + static_cast<int>(threadIdx.x);
    int total = 0;
    if (expert < args.num_experts)
      for (int w = 0; w < kWarps; ++w) total += rows[w * args.num_experts + expert];
    int row = scan_block<THREADS>(total, warp_total, carry) - total;
    if (expert < args.num_experts) {
      args.offsets[expert] = row + total;
      for (int w = 0; w < kWarps; ++w) {
        const int count = rows[w * args.num_experts + expert];
        rows[w * args.num_experts + expert] = row;
        row += count;
      }
    }
  }
  __syncthreads();
  scatter_slots<kWarps>(args, rows, per_warp, 0, slots, id_of);
}

// The choice, and counts[block][expert].
template <int PER_LANE, bool BY_SCORE>
__global__ void __launch_bounds__(kScatterThreads) router_choose(const RouterArguments args) {
  await_previous_kernel();
  __shared__ int count[32 * PER_LANE];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < 32 * PER_LANE; i += kScatterThreads) count[i] = 0;
  __syncthreads();
  const int first = blockIdx.x * args.tokens_per_block, end = min(first + args.tokens_per_block, args.tokens);
  for (int token = first + warp; token < end; token += kScatterThreads / 32) {
    const int id = choose<PER_LANE, BY_SCORE>(args, token);
    if (lane < args.top_k) atomicAdd(count + id, 1);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < args.num_experts; expert += kScatterThreads)
    args.counts[static_cast<int64_t>(blockIdx.x) * args.num_experts + expert] = count[expert];
}

template <int PER_LANE>
__global__ void __launch_bounds__(kScatterThreads) router_scatter(const RouterArguments args) {
  await_previous_kernel();
  constexpr int kWarps = kScatterThreads / 32;
  DYNAMIC_SHARED(int, rows);                      // [kWarps][E]: of this block; before that, sums over all blocks
  __shared__ int before_block[kWarps][32 * PER_LANE];  // slots of the expert in blocks before this one: each warp's part
  __shared__ int warp_total[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = args.num_experts;
  int totals[PER_LANE] = {}, before[PER_LANE] = {};
  for (int block = warp; block < static_cast<int>(gridDim.x); block += kWarps) {
    const bool earlier = block < static_cast<int>(blockIdx.x);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = lane + 32 * i;
      const int count = expert < experts ? args.counts[static_cast<int64_t>(block) * experts + expert] : 0;
      totals[i] += count;
      if (earlier) before[i] += count;
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int expert = lane + 32 * i;
    before_block[warp][expert] = before[i];
    if (expert < experts) rows[warp * experts + expert] = totals[i];
  }
  __syncthreads();
  int total = 0, earlier = 0;  // of the expert that is this thread's number: E <= 512
  const int expert = threadIdx.x;
  if (expert < experts) {
    for (int w = 0; w < kWarps; ++w) total += rows[w * experts + expert], earlier += before_block[w][expert];
  }
  int carry = 0;
  const int start = scan_block<kScatterThreads>(total, warp_total, carry) - total;
  if (blockIdx.x == 0 && expert < experts) args.offsets[expert] = start + total;

  const int first = blockIdx.x * args.tokens_per_block * args.top_k;
  const int end = min(first + args.tokens_per_block * args.top_k, args.tokens * args.top_k);
  const int per_warp = slots_per_warp(end - first, kWarps);
  const auto id_of = [&](int slot) { return static_cast<int>(args.expert_ids[slot]); };
  count_slots<kWarps>(args, rows, per_warp, first, end, id_of);
  if (expert < experts) {
    int row = start + earlier;
    for (int w = 0; w < kWarps; ++w) {
      const int count = rows[w * experts + expert];
      rows[w * experts + expert] = row;
      row += count;
    }
  }
  __syncthreads();
  scatter_slots<kWarps>(args, rows, per_warp, first, end, id_of);
}
