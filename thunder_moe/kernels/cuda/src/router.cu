// A router's logits -> scores, expert ids, and the slots t * A + a sorted by expert, stably: one launch for few tokens, else two.
// Compiled at run time for kernels/cuda/router.py behind common.cuh and norm.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// It computes `RouterConfig` of routing.py. A warp chooses the experts of a token: lane l has the PER_LANE experts from
// l * PER_LANE on. For few tokens router_one_block does everything. Otherwise the blocks of router_choose count the slots of each
// expert among their tokens, and the blocks of router_scatter, which have the same tokens, sort the slots.

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
  int lanes_per_group;  // a power of two where the experts of so many lanes are a group; else 0
  float epsilon, least_sum, scale;
};

struct RouterLinearArguments {
  RouterArguments router;  // logits: written
  const uint16_t* x;       // (T, H)
  const uint16_t* weight;  // (E, H)
  const uint16_t* bias;    // (E,) of the linear layer, or null
  uint32_t* words;         // (T, E): zero before and after
  int hidden_size;         // H, a multiple of 8
  int prefetch;            // the kernel before does not write `weight`
  // With NORM, x + residual is `total`, and the rows are its RMS norm.
  const uint16_t* residual;     // (T, H)
  const uint16_t* norm_weight;  // (H,)
  uint16_t* total;              // (T, H)
  uint16_t* normalized;         // (T, H)
  float epsilon;
};

constexpr uint32_t kAll = 0xffffffffu;
constexpr int kThreads = 512, kWarps = kThreads / 32;  // of router_scatter

// Keys order as the values do: -0 as 0, NaN above infinity; no value has key 0.
DEVICE uint32_t key_of(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return kAll;
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

DEVICE float value_of(uint32_t key) { return bits_to_float(key >> 31 ? key & (key == kAll ? kAll : 0x7FFFFFFF) : ~key); }

DEVICE float shuffle(float value, int from) {
  return bits_to_float(static_cast<uint32_t>(__shfl_sync(kAll, static_cast<int>(float_to_bits(value)), from)));
}

DEVICE float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// The numbers by which experts are chosen.
constexpr int kByBits = 0;    // by logits of 16 bits: a key of value and index is one register
constexpr int kByLogit = 1;   // by float32 logits
constexpr int kByScore = 2;   // by scores plus bias, within groups

// Like key_of, for both kinds of 16-bit floats.
DEVICE uint32_t key_of_16(uint32_t bits, bool bf16) {
  if ((bits & 0x7FFF) > (bf16 ? 0x7F80u : 0x7C00u)) return 0xFFFF;
  return bits > 0x8000 ? ~bits & 0xFFFF : bits | 0x8000;  // -0 (0x8000) as 0
}

DEVICE uint16_t bits_of_16(uint32_t key) { return static_cast<uint16_t>(key >> 15 ? key & (key == 0xFFFF ? 0xFFFF : 0x7FFF) : ~key); }

// The lowest lane where it is true. Lanes have consecutive experts, so this lane has the lowest expert.
DEVICE int lowest_lane(bool value) { return __ffs(static_cast<int>(__ballot_sync(kAll, value))) - 1; }

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

// The key of the sum of a group's best, where groups are of whole lanes; the same in all lanes of a group.
template <int PER_LANE>
DEVICE uint32_t group_of_lanes(const RouterArguments& args, const uint32_t (&keys)[PER_LANE]) {
  uint32_t first = 0, second = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    second = max(second, min(first, keys[i]));
    first = max(first, keys[i]);
  }
  for (int mask = 1; mask < args.lanes_per_group; mask *= 2) {
    const uint32_t other = __shfl_xor_sync(kAll, first, mask), next = __shfl_xor_sync(kAll, second, mask);
    second = max(min(first, other), max(second, next));
    first = max(first, other);
  }
  return key_of(args.group_best == 1 ? value_of(first) : value_of(first) + value_of(second));
}

// The same for groups of any size; lane g has the key of group g.
template <int PER_LANE>
DEVICE uint32_t group_of_experts(const RouterArguments& args, const uint32_t (&keys)[PER_LANE], const int (&groups)[PER_LANE]) {
  const int lane = threadIdx.x % 32;
  uint32_t mine = 0;
  for (int group = 0; group < args.num_groups; ++group) {
    uint32_t taken = 0;  // bits of i
    float sum = 0.0f;
    for (int best = 0; best < args.group_best; ++best) {
      uint32_t own = 0;
      int index = 0;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        if (groups[i] == group && !(taken >> i & 1) && keys[i] > own) own = keys[i], index = i;
      const uint32_t key = __reduce_max_sync(kAll, own);
      if (lowest_lane(own == key) == lane) taken |= 1u << index;
      sum += value_of(key);
    }
    if (lane == group) mine = key_of(sum);
  }
  return mine;
}

// Gives experts outside of the best groups the key `masked`.
template <int PER_LANE>
DEVICE void mask_groups(const RouterArguments& args, uint32_t (&keys)[PER_LANE], uint32_t masked) {
  const int lane = threadIdx.x % 32, of_group = args.num_experts / args.num_groups;
  const bool whole = args.lanes_per_group > 0;
  int groups[PER_LANE] = {};
  uint32_t mine;
  int group = lane;  // that `mine` is of
  if (whole) {
    group = lane / args.lanes_per_group;
    mine = group_of_lanes(args, keys);
    if (group >= args.num_groups) mine = 0;
  } else {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) groups[i] = (lane * PER_LANE + i) / of_group;
    mine = group_of_experts(args, keys, groups);
  }
  uint32_t chosen = 0;
  for (int i = 0; i < args.top_groups; ++i) {
    const int owner = lowest_lane(mine == __reduce_max_sync(kAll, mine));
    const int best = whole ? owner / args.lanes_per_group : owner;
    if (best == group) mine = 0;
    chosen |= 1u << best;
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i)
    if (lane * PER_LANE + i < args.num_experts && !(chosen >> (whole ? group : groups[i]) & 1)) keys[i] = masked;
}

// The experts of a token and their scores: lane a < A gets the a-th best, writes it, and returns its id.
template <int PER_LANE, int BY>
DEVICE int choose(const RouterArguments& args, int token) {
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(token) * args.num_experts + lane * PER_LANE;
  const int exist = args.num_experts - lane * PER_LANE;  // so many of this lane's experts do
  const bool bf16 = args.logits_dtype == 1;
  uint32_t keys[PER_LANE];
  float values[PER_LANE], biases[PER_LANE];  // biases: loaded along with the logits
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if constexpr (BY == kByScore)
      biases[i] = i < exist && args.bias != nullptr ? load_float(args.bias, lane * PER_LANE + i, args.bias_dtype) : 0.0f;
    if constexpr (BY == kByBits) {
      keys[i] = 0;
      if (i < exist) {
        const uint32_t bits = static_cast<const uint16_t*>(args.logits)[first + i];
        keys[i] = key_of_16(bits, bf16) << 16 | (0xFFFF - (lane * PER_LANE + i));
      }
    } else {
      values[i] = i < exist ? load_float(args.logits, first + i, BY == kByLogit ? 0 : args.logits_dtype) : 0.0f;
      keys[i] = i < exist ? key_of(values[i]) : 0;
    }
  }
  const auto logit = [&](uint32_t key) {
    if constexpr (BY == kByBits) return bf16 ? widen<true>(bits_of_16(key >> 16)) : widen<false>(bits_of_16(key >> 16));
    else return value_of(key);
  };
  int index;
  uint32_t best = best_of_lane(keys, index);
  // Chosen by logits, and normalized over the chosen ones: the sum over all experts cancels.
  const bool needs_sum = !args.sigmoid && (BY == kByScore || !args.normalize || args.epsilon > 0.0f || args.least_sum > 0.0f);
  float largest = 0.0f, sum = 1.0f;
  if (!args.sigmoid) largest = logit(__reduce_max_sync(kAll, best));
  if (needs_sum) {
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const float power = i < exist ? expf((BY == kByBits ? logit(keys[i]) : values[i]) - largest) : 0.0f;
      sum += power;
      if constexpr (BY == kByScore) values[i] = power;
    }
    sum = sum_of_warp(sum);
  }
  if constexpr (BY == kByScore) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (i >= exist) continue;
      values[i] = args.sigmoid ? sigmoid(values[i]) : values[i] / sum;
      keys[i] = key_of(values[i] + biases[i]);
    }
    if (args.top_groups < args.num_groups) mask_groups(args, keys, key_of(args.mask_to_zero ? 0.0f : -bits_to_float(0x7F800000)));
    best = best_of_lane(keys, index);
  }
  if constexpr (BY == kByBits) {  // in descending order
#pragma unroll
    for (int last = PER_LANE - 1; last > 0; --last)
#pragma unroll
      for (int i = 0; i < last; ++i) {
        const uint32_t larger = max(keys[i], keys[i + 1]);
        keys[i + 1] = min(keys[i], keys[i + 1]);
        keys[i] = larger;
      }
  }
  int id = 0;
  float chosen = 0.0f;
  uint32_t won = 0;
  for (int a = 0; a < args.top_k; ++a) {
    if constexpr (BY == kByBits) {
      const uint32_t key = __reduce_max_sync(kAll, keys[0]);
      if (lane == a) won = key;
      const bool mine = keys[0] == key;
#pragma unroll
      for (int i = 0; i + 1 < PER_LANE; ++i) keys[i] = mine ? keys[i + 1] : keys[i];
      if (mine) keys[PER_LANE - 1] = 0;
    } else {
      const uint32_t key = __reduce_max_sync(kAll, best);
      const int owner = lowest_lane(best == key);
      const int expert = owner * PER_LANE + __shfl_sync(kAll, index, owner);
      if (lane == a) id = expert, won = key;
      if (lane == owner) {
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
          if (i == index) keys[i] = 0;
        best = best_of_lane(keys, index);
      }
    }
  }
  const bool mine = lane < args.top_k;
  if constexpr (BY == kByBits) id = mine ? static_cast<int>(0xFFFF - (won & 0xFFFF)) : 0;
  if constexpr (BY == kByScore) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const float value = shuffle(values[i], id / PER_LANE);
      if (id % PER_LANE == i) chosen = value;
    }
  } else {
    chosen = args.sigmoid ? sigmoid(logit(won)) : expf(logit(won) - largest) / sum;
  }
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
DEVICE void scatter_slots(const RouterArguments& args, int* next_row, int per_warp, int first, int end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  next_row += warp * args.num_experts;
  for (int i = 0; i < per_warp; i += 32) {
    const int slot = first + warp * per_warp + i + lane;
    const int id = slot < end ? static_cast<int>(args.expert_ids[slot]) : -1;
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

// warp_count[w][expert] = slots of the expert among the slots of warp w.
DEVICE void count_slots(const RouterArguments& args, int* warp_count, int per_warp, int first, int end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < kWarps * args.num_experts; i += 32 * kWarps) warp_count[i] = 0;
  __syncthreads();
  for (int i = 0; i < per_warp; i += 32) {
    const int slot = first + warp * per_warp + i + lane;
    const int id = slot < end ? static_cast<int>(args.expert_ids[slot]) : -1;
    const uint32_t peers = __match_any_sync(kAll, id);
    if (id >= 0 && (peers & ((1u << lane) - 1)) == 0) warp_count[warp * args.num_experts + id] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
}

// Chooses and sorts in one block: at most THREADS slots.
template <int PER_LANE, int BY, int THREADS>
DEVICE void route_in_one_block(const RouterArguments& args) {
  __shared__ uint4 shared[THREADS / 4];
  int* ids = reinterpret_cast<int*>(shared);  // [T * A]
  const int lane = threadIdx.x % 32, slots = args.tokens * args.top_k;
  const int rounded = (slots + 3) / 4 * 4;
  for (int slot = slots + threadIdx.x; slot < rounded; slot += THREADS) ids[slot] = args.num_experts;
  for (int token = threadIdx.x / 32; token < args.tokens; token += THREADS / 32) {
    const int id = choose<PER_LANE, BY>(args, token);
    if (lane < args.top_k) ids[token * args.top_k + lane] = id;
  }
  __syncthreads();
  // Slots before a slot: slots of lower experts, and earlier slots of its own expert. Slots up to an expert's end: slots of
  // experts below the next one.
  const int first_expert = (slots + 31) / 32 * 32;
  for (int item = threadIdx.x; item < first_expert + args.num_experts; item += THREADS) {
    if (item >= slots && item < first_expert) continue;
    const bool ranks = item < slots;
    const int id = ranks ? ids[item] : item - first_expert + 1;
    int count = 0;
    for (int i = 0; i < rounded / 4; ++i) {
      const uint4 four = shared[i];
      const int others[4] = {static_cast<int>(four.x), static_cast<int>(four.y), static_cast<int>(four.z), static_cast<int>(four.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) count += others[j] < id + (ranks && 4 * i + j < item ? 1 : 0);
    }
    if (ranks) {
      args.row_slot[count] = item;
      args.slot_row[item] = count;
    } else {
      args.offsets[id - 1] = count;
    }
  }
}

template <int PER_LANE, int BY, int THREADS>
__global__ void __launch_bounds__(THREADS) router_one_block(const RouterArguments args) {
  await_previous_kernel();
  route_in_one_block<PER_LANE, BY, THREADS>(args);
}

// Computes x @ weight.T first, a warp per expert. The last block chooses. Each logit doubles as its own ready flag: a zero word
// means not yet written. This takes one latency of the L2 cache; a counter and a second read would take three. Blocks start in
// the order of their indices, so the blocks that it waits for are running.
template <bool BF16, int PER_LANE, int BY, int THREADS, int TOKENS, bool NORM>
__global__ void __launch_bounds__(THREADS) router_linear(const RouterLinearArguments args) {
  __shared__ uint32_t received[TOKENS * 32 * PER_LANE];  // the logits, in their own dtype
  constexpr int kAhead = TOKENS == 1 ? 8 : 4;             // parts of 256 weights that are loaded first
  const int lane = threadIdx.x % 32, expert = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const uint16_t* const weight = args.weight + static_cast<int64_t>(min(expert, args.router.num_experts - 1)) * args.hidden_size;
  DYNAMIC_SHARED(uint4, memory);  // with NORM: totals, then rows [TOKENS][H]
  uint16_t* const normed = reinterpret_cast<uint16_t*>(memory);
  Eight ahead[kAhead], norm_weight;
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (8 * lane + 256 * i < args.hidden_size) ahead[i] = load_eight(weight + 8 * lane + 256 * i);
    if (NORM && 8 * static_cast<int>(threadIdx.x) < args.hidden_size) norm_weight = load_eight(args.norm_weight + 8 * static_cast<int>(threadIdx.x));
  };
  if (args.prefetch) load();
  await_previous_kernel();
  if (!args.prefetch) load();
  RouterArguments router = args.router;
  const bool wide = router.logits_dtype == 0;
  if constexpr (NORM) {
    __shared__ float squares[TOKENS][THREADS / 32];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      float square = 0.0f;
      for (int k = 8 * static_cast<int>(threadIdx.x); k < args.hidden_size; k += 8 * THREADS) {
        const int at = t * args.hidden_size + k;
        const Eight total = add_residual<BF16>(args.x + at, args.residual + at, square);
        store_eight(normed + at, total);
      }
      square = sum_of_warp(square);
      if (lane == 0) squares[t][threadIdx.x / 32] = square;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      float square = 0.0f;
#pragma unroll
      for (int other = 0; other < THREADS / 32; ++other) square += squares[t][other];
      const float factor = norm_factor(square, args.hidden_size, args.epsilon);
      for (int k = 8 * static_cast<int>(threadIdx.x); k < args.hidden_size; k += 8 * THREADS) {
        const int at = t * args.hidden_size + k;
        const Eight total = load_eight(normed + at), by = k < 8 * THREADS ? norm_weight : load_eight(args.norm_weight + k);
        const Eight row = normalize<BF16>(total, by, factor);
        store_eight(normed + at, row);
        if (blockIdx.x > 0) continue;
        store_eight(args.total + at, total);
        store_eight(args.normalized + at, row);
      }
    }
    __syncthreads();
  }
  float sum[TOKENS] = {};
  const auto multiply = [&](const Eight& w, int k) {
    Eight x[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) x[t] = load_eight((NORM ? normed : args.x) + t * args.hidden_size + k);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) sum[t] += widen<BF16>(w.of[i]) * widen<BF16>(x[t].of[i]);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (8 * lane + 256 * i < args.hidden_size) multiply(ahead[i], 8 * lane + 256 * i);
#pragma unroll(kAhead)
  for (int k = 8 * lane + 256 * kAhead; k < args.hidden_size; k += 256) multiply(load_eight(weight + k), k);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    float logit = sum_of_warp(sum[t]);
    if (lane != 0 || expert >= router.num_experts) continue;
    if (args.bias != nullptr) logit += widen<BF16>(args.bias[expert]);
    const int at = t * router.num_experts + expert;
    const uint16_t narrow_logit = narrow<BF16>(logit);
    const uint32_t word = wide ? float_to_bits(logit == 0.0f ? -0.0f : logit) : narrow_logit | 0x10000u;
    store_word(args.words + at, word);
    if (wide) static_cast<float*>(const_cast<void*>(router.logits))[at] = logit;
    else static_cast<uint16_t*>(const_cast<void*>(router.logits))[at] = narrow_logit;
  }
  if (blockIdx.x != gridDim.x - 1) return;
  for (int at = threadIdx.x; at < TOKENS * router.num_experts; at += THREADS) {
    uint32_t word;
    while ((word = load_word(args.words + at)) == 0) {
    }
    args.words[at] = 0;
    if (wide) received[at] = word;
    else reinterpret_cast<uint16_t*>(received)[at] = static_cast<uint16_t>(word);
  }
  __syncthreads();
  router.logits = received;
  route_in_one_block<PER_LANE, BY, THREADS>(router);
}

// Chooses, and writes counts[block][expert].
template <int PER_LANE, int BY, int THREADS>
__global__ void __launch_bounds__(THREADS) router_choose(const RouterArguments args) {
  await_previous_kernel();
  __shared__ int count[32 * PER_LANE];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < 32 * PER_LANE; i += THREADS) count[i] = 0;
  __syncthreads();
  const int first = blockIdx.x * args.tokens_per_block, end = min(first + args.tokens_per_block, args.tokens);
  for (int token = first + warp; token < end; token += THREADS / 32) {
    const int id = choose<PER_LANE, BY>(args, token);
    if (lane < args.top_k) atomicAdd(count + id, 1);
  }
  __syncthreads();
  for (int expert = threadIdx.x; expert < args.num_experts; expert += THREADS)
    args.counts[static_cast<int64_t>(blockIdx.x) * args.num_experts + expert] = count[expert];
}

template <int PER_LANE>
__global__ void __launch_bounds__(kThreads) router_scatter(const RouterArguments args) {
  await_previous_kernel();
  DYNAMIC_SHARED(int, rows);                           // [kWarps][E]: of this block; before that, sums over all blocks
  __shared__ int before_block[kWarps][32 * PER_LANE];  // slots of the expert in blocks before this one: each warp's part
  __shared__ int warp_total[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = args.num_experts;
  int totals[PER_LANE] = {}, before[PER_LANE] = {};
  constexpr int kAtOnce = PER_LANE <= 4 ? 8 : PER_LANE <= 8 ? 4 : 2;  // rows of counts, so that their loads overlap
  for (int block = warp; block < static_cast<int>(gridDim.x); block += kAtOnce * kWarps) {
    int count[kAtOnce][PER_LANE];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int row = block + j * kWarps, expert = lane + 32 * i;
        const bool exists = row < static_cast<int>(gridDim.x) && expert < experts;
        count[j][i] = exists ? args.counts[static_cast<int64_t>(row) * experts + expert] : 0;
      }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        totals[i] += count[j][i];
        before[i] += block + j * kWarps < static_cast<int>(blockIdx.x) ? count[j][i] : 0;
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
  const int start = scan_block<kThreads>(total, warp_total, carry) - total;
  if (blockIdx.x == 0 && expert < experts) args.offsets[expert] = start + total;

  const int first = blockIdx.x * args.tokens_per_block * args.top_k;
  const int end = min(first + args.tokens_per_block * args.top_k, args.tokens * args.top_k);
  const int per_warp = (end - first + kThreads - 1) / kThreads * 32;  // slots
  count_slots(args, rows, per_warp, first, end);
  if (expert < experts) {
    int row = start + earlier;
    for (int w = 0; w < kWarps; ++w) {
      const int count = rows[w * experts + expert];
      rows[w * experts + expert] = row;
      row += count;
    }
  }
  __syncthreads();
  scatter_slots(args, rows, per_warp, first, end);
}
