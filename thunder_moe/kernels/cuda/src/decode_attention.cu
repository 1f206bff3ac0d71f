// Attention of one new token per text behind its projections: norms, rotary embedding, the write to the cache, softmax(q k) v.
// Compiled at run time for kernels/cuda/decode_attention.py behind common.cuh and ptx.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// A cluster of SPLITS blocks has the heads of a text that share keys. Its warps take 16 keys at a time, from global memory into
// registers, as left operands of the tensor cores: scores (16 keys, queries), and then values (D, 16 keys) times the probabilities.
// Every block prepares the queries for itself; the first one prepares the new key and value, and reads them from shared memory,
// so that nobody waits for the cache. At the end each block gets its share of all blocks' sums, by distributed shared memory.

struct DecodeAttentionArguments {
  const uint16_t* query;      // (B, key_heads * groups, D); texts lie query_stride apart
  const uint16_t* key;        // (B, key_heads, D)
  const uint16_t* value;      // (B, key_heads, D)
  uint16_t* key_cache;        // (B, key_heads, L, D)
  uint16_t* value_cache;      // (B, key_heads, L, D)
  const int64_t* position;    // (1,): of the new token in the cache
  const void* mask;           // (B or 1, L): bool or added to the scores; null for none
  const uint16_t* cos;        // (B or 1, D); null without a rotary embedding
  const uint16_t* sin;        // (B or 1, D)
  const uint16_t* query_norm; // (D,); null without norms
  const uint16_t* key_norm;   // (D,)
  uint16_t* out;              // (B, key_heads * groups, D)
  int64_t query_stride, key_stride, value_stride, mask_stride, angle_stride;
  int key_heads, groups, length, bool_mask;
  int prefetch;  // the kernel before does not write the caches
  float epsilon, scale;
};

#if defined(CUDA_EMULATOR) || __CUDA_ARCH__ >= 900
constexpr uint32_t kLanes = 0xffffffffu;
constexpr int kDecodeWarps = 8;  // and one for the new token
constexpr float kLog2E = 1.4426950408889634f;

DEVICE float minus_infinity() { return bits_to_float(0xFF800000); }
// The factor of sums whose largest score is `part`, beside others with `whole`: 0 for sums over no keys, whose NaN stay NaN.
DEVICE float factor_of(float part, float whole) { return part == minus_infinity() ? 0.0f : exp2f(part - whole); }
template <bool BF16>
DEVICE float rounded(float x) { return widen<BF16>(narrow<BF16>(x)); }

// One head of D numbers: norm (null: none), then rotary embedding (null: none), each step rounded as torch rounds it. The warp
// writes it to shared memory, and to global memory unless that is null. Lane l has numbers l and l + 32, ... of each half.
template <bool BF16, int D>
DEVICE void prepare_head(
    const uint16_t* from, const uint16_t* norm, float epsilon, const uint16_t* cos, const uint16_t* sin, uint16_t* to_shared, uint16_t* to_global) {
  constexpr int kHalf = D / 2, kEach = kHalf / 32;
  const int lane = threadIdx.x % 32;
  float x[2][kEach];
  float squares = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      x[half][i] = widen<BF16>(from[half * kHalf + 32 * i + lane]);
      squares += x[half][i] * x[half][i];
    }
  if (norm != nullptr) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += shuffle_xor(squares, step);
    const float factor = 1.0f / sqrtf(squares / D + epsilon);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float weight = widen<BF16>(norm[half * kHalf + 32 * i + lane]);
        x[half][i] = rounded<BF16>(rounded<BF16>(x[half][i] * factor) * weight);
      }
  }
  if (cos != nullptr) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int low = 32 * i + lane, high = kHalf + low;
      const float a = x[0][i], b = x[1][i];
      x[0][i] = rounded<BF16>(a * widen<BF16>(cos[low])) - rounded<BF16>(b * widen<BF16>(sin[low]));
      x[1][i] = rounded<BF16>(b * widen<BF16>(cos[high])) + rounded<BF16>(a * widen<BF16>(sin[high]));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = half * kHalf + 32 * i + lane;
      const uint16_t bits = narrow<BF16>(x[half][i]);
      to_shared[at] = bits;
      if (to_global != nullptr) to_global[at] = bits;
    }
}

// The mask of a key as a number to add to its score times log2(e).
template <bool BF16>
DEVICE float mask_of(const DecodeAttentionArguments& args, const void* mask, int key) {
  if (mask == nullptr) return 0.0f;
  if (args.bool_mask) return static_cast<const uint8_t*>(mask)[key] ? 0.0f : minus_infinity();
  return widen<BF16>(static_cast<const uint16_t*>(mask)[key]) * kLog2E;
}

// 16 keys and values in registers, and the masks of keys g and g + 8. Lane 4 g + t has of these two keys the numbers 32 c + 8 t on,
// and of the values of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9 the numbers 64 c + 8 g on.
template <int D>
struct KeyTile {
  uint4 keys[2][D / 32];
  uint4 values[4][D / 64];
  float mask[2];
};

DEVICE uint32_t word_of(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

// The sums of a warp over the keys that it has seen, for 8 * NT queries. Lane 4 g + t has the sums of queries 8 j + 2 t and
// 8 j + 2 t + 1, and of the numbers 64 c + 8 g + 2 w and the next one of a head, at [4 c + w].
template <int D, int NT>
struct WarpSums {
  float largest[NT][2], total[NT][2];
  float out[D / 16][NT][4];
};

template <bool BF16, int D, int NT>
DEVICE void attend(const KeyTile<D>& tile, const uint4 (&queries)[NT][D / 32], float scale, WarpSums<D, NT>& sums) {
  float scores[NT][4] = {};
#pragma unroll
  for (int c = 0; c < D / 32; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 &low = tile.keys[0][c], &high = tile.keys[1][c];
      const uint32_t a[4] = {half ? low.z : low.x, half ? high.z : high.x, half ? low.w : low.y, half ? high.w : high.y};
#pragma unroll
      for (int j = 0; j < NT; ++j) mma<BF16>(scores[j], a, half ? queries[j][c].z : queries[j][c].x, half ? queries[j][c].w : queries[j][c].y);
    }
  uint32_t probabilities[NT][2];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& low = scores[j][i];
      float& high = scores[j][2 + i];
      low = tile.mask[0] == minus_infinity() ? minus_infinity() : low * scale + tile.mask[0];
      high = tile.mask[1] == minus_infinity() ? minus_infinity() : high * scale + tile.mask[1];
      float largest = fmaxf(low, high);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, shuffle_xor(largest, step));
      largest = fmaxf(largest, sums.largest[j][i]);
      const float base = largest == minus_infinity() ? 0.0f : largest;
      const float factor = exp2f(sums.largest[j][i] - base);
      sums.largest[j][i] = largest;
      low = exp2f(low - base), high = exp2f(high - base);
      sums.total[j][i] = sums.total[j][i] * factor + low + high;
#pragma unroll
      for (int m = 0; m < D / 16; ++m) sums.out[m][j][i] *= factor, sums.out[m][j][2 + i] *= factor;
    }
    probabilities[j][0] = transpose8x8(narrow2<BF16>(scores[j][0], scores[j][1]));
    probabilities[j][1] = transpose8x8(narrow2<BF16>(scores[j][2], scores[j][3]));
  }
#pragma unroll
  for (int m = 0; m < D / 16; ++m) {
    const int c = m / 4, w = m % 4;
    const uint32_t first = word_of(tile.values[0][c], w), second = word_of(tile.values[1][c], w);
    const uint32_t third = word_of(tile.values[2][c], w), fourth = word_of(tile.values[3][c], w);
    const uint32_t a[4] = {
        permute_bytes(first, second, 0x5410), permute_bytes(first, second, 0x7632), permute_bytes(third, fourth, 0x5410),
        permute_bytes(third, fourth, 0x7632)};
#pragma unroll
    for (int j = 0; j < NT; ++j) mma<BF16>(sums.out[m][j], a, probabilities[j][0], probabilities[j][1]);
  }
}

// NT: groups of 8 query heads that share a key head.
template <bool BF16, int D, int NT, int SPLITS>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(32 * kDecodeWarps + 32, 1) decode_attention(const DecodeAttentionArguments args) {
  constexpr int kThreads = 32 * kDecodeWarps + 32, kQueries = 8 * NT, kPitch = D + 8, kOutPitch = D + 2;
  constexpr int kNew = kQueries * kPitch * 2, kTotals = kNew + 2 * D * 2, kOut = kTotals + (kDecodeWarps + 1) * 2 * kQueries * 4;
  constexpr int kSums = kOut + (kDecodeWarps + 1) * kQueries * kOutPitch * 4, kMaxima = kSums + kQueries * D * 4;
  constexpr int kBarrier = kMaxima + SPLITS * kQueries * 16;
  // Queries [kQueries][kPitch], the new key and value [2][D], maxima and totals of warps [warps][2][kQueries], sums of warps
  // [warps][kQueries][kOutPitch], this block's share of the sums of blocks [SPLITS][groups * D / SPLITS], their maxima and totals
  // [SPLITS][kQueries][4], a barrier.
  CLUSTER_SHARED(uint4, memory, SPLITS);
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(memory);
  uint16_t* const queries = reinterpret_cast<uint16_t*>(bytes);
  uint16_t* const fresh = reinterpret_cast<uint16_t*>(bytes + kNew);
  float* const totals = reinterpret_cast<float*>(bytes + kTotals);
  float* const outs = reinterpret_cast<float*>(bytes + kOut);
  float* const received = reinterpret_cast<float*>(bytes + kSums);
  float* const maxima = reinterpret_cast<float*>(bytes + kMaxima);
  Mbarrier* const barrier = reinterpret_cast<Mbarrier*>(bytes + kBarrier);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % SPLITS, pair = blockIdx.x / SPLITS, head = pair % args.key_heads;
  const int64_t text = pair / args.key_heads;
  const int share = args.groups * D / (4 * SPLITS);  // groups of four sums that a block adds
  if (threadIdx.x == 0) {
    mbarrier_init(mbarrier_address(barrier), 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(mbarrier_address(barrier), SPLITS * 16 * (share + args.groups));
  }
  __syncthreads();
  if constexpr (SPLITS > 1) cluster_arrive();

  const int64_t cached = (text * args.key_heads + head) * args.length * D;
  const int tiles = (args.length + 15) / 16;
  const bool old = warp < kDecodeWarps;
  int at = old ? warp * SPLITS + rank : tiles;  // the tile
  KeyTile<D> tile;
  const auto load = [&](int first_key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint16_t* const key = args.key_cache + cached + static_cast<int64_t>(min(first_key + g + 8 * i, args.length - 1)) * D + 8 * t;
#pragma unroll
      for (int c = 0; c < D / 32; ++c) tile.keys[i][c] = *reinterpret_cast<const uint4*>(key + 32 * c);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(first_key + 2 * t + i % 2 + i / 2 * 8, args.length - 1);
      const uint16_t* const value = args.value_cache + cached + static_cast<int64_t>(row) * D + 8 * g;
#pragma unroll
      for (int c = 0; c < D / 64; ++c) tile.values[i][c] = *reinterpret_cast<const uint4*>(value + 64 * c);
    }
  };
  const bool loaded = args.prefetch && at < tiles;
  if (loaded) load(16 * at);
  await_previous_kernel();

  const int64_t position = *args.position;
  const uint8_t* mask = static_cast<const uint8_t*>(args.mask);
  if (mask != nullptr) mask += text * args.mask_stride * (args.bool_mask ? 1 : 2);
  const uint16_t* const cos = args.cos == nullptr ? nullptr : args.cos + text * args.angle_stride;
  const uint16_t* const sin = args.cos == nullptr ? nullptr : args.sin + text * args.angle_stride;
  const auto attends = [&](int first_key) {  // to any key of the tile
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first_key + g + 8 * i;
      tile.mask[i] = key < args.length && key != position ? mask_of<BF16>(args, mask, key) : minus_infinity();
    }
    return __ballot_sync(kLanes, tile.mask[0] != minus_infinity() || tile.mask[1] != minus_infinity()) != 0;
  };
  bool counts = at < tiles && attends(16 * at);
  if (counts && !loaded) load(16 * at);
  if (old) {
    for (int query = warp; query < kQueries; query += kDecodeWarps) {
      uint16_t* const to = queries + query * kPitch;
      if (query < args.groups) {
        const uint16_t* const from = args.query + text * args.query_stride + static_cast<int64_t>(head * args.groups + query) * D;
        prepare_head<BF16, D>(from, args.query_norm, args.epsilon, cos, sin, to, nullptr);
      } else {
        for (int i = lane; i < D; i += 32) to[i] = 0;
      }
    }
  } else if (rank == 0) {
    if (position < 0 || position >= args.length) __trap();
    const int64_t to = cached + position * D;
    prepare_head<BF16, D>(args.key + text * args.key_stride + head * D, args.key_norm, args.epsilon, cos, sin, fresh, args.key_cache + to);
    prepare_head<BF16, D>(args.value + text * args.value_stride + head * D, nullptr, 0.0f, nullptr, nullptr, fresh + D, args.value_cache + to);
    __syncwarp();
    tile.mask[0] = g == 0 ? mask_of<BF16>(args, mask, static_cast<int>(position)) : minus_infinity();
    tile.mask[1] = minus_infinity();
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int c = 0; c < D / 32; ++c) tile.keys[i][c] = *reinterpret_cast<const uint4*>(fresh + 8 * t + 32 * c);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int c = 0; c < D / 64; ++c) tile.values[i][c] = *reinterpret_cast<const uint4*>(fresh + D + 8 * g + 64 * c);
    counts = true;
  }
  __syncthreads();

  uint4 own[NT][D / 32];
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int c = 0; c < D / 32; ++c) own[j][c] = *reinterpret_cast<const uint4*>(queries + (8 * j + g) * kPitch + 32 * c + 8 * t);
  WarpSums<D, NT> sums;
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) sums.largest[j][i] = minus_infinity(), sums.total[j][i] = 0.0f;
#pragma unroll
  for (int m = 0; m < D / 16; ++m)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.out[m][j][i] = 0.0f;
  const float scale = args.scale * kLog2E;
  while (true) {
    if (counts) {
      const int64_t stale = old ? position - 16 * at : -1;  // the row whose value may be NaN; rows behind the last one repeat it
      if (stale >= 0 && stale < 16)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int c = 0; c < D / 64; ++c)
            if (min(2 * t + i % 2 + i / 2 * 8, args.length - 1 - 16 * at) == stale) tile.values[i][c] = make_uint4(0, 0, 0, 0);
      attend<BF16, D, NT>(tile, own, scale, sums);
    }
    at += kDecodeWarps * SPLITS;
    if (at >= tiles) break;
    counts = attends(16 * at);
    if (counts) load(16 * at);
  }

  // The block's sums: each warp hands over its own.
  float* const mine = totals + warp * 2 * kQueries;
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sums.total[j][i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += shuffle_xor(total, step);
      const int query = 8 * j + 2 * t + i;
      if (g == 0) mine[query] = sums.largest[j][i], mine[kQueries + query] = total;
#pragma unroll
      for (int m = 0; m < D / 16; ++m) {
        float* const to = outs + (warp * kQueries + query) * kOutPitch + m / 4 * 64 + 8 * g + m % 4 * 2;
        to[0] = sums.out[m][j][i], to[1] = sums.out[m][j][2 + i];
      }
    }
  __syncthreads();
  const int warps = rank == 0 ? kDecodeWarps + 1 : kDecodeWarps;
  if constexpr (SPLITS > 1) cluster_wait();  // all blocks have begun, their barriers are initialized
  for (int i = threadIdx.x; i < args.groups * SPLITS; i += kThreads) {
    const int query = i % args.groups;
    float largest = minus_infinity(), total = 0.0f;
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, totals[w * 2 * kQueries + query]);
    for (int w = 0; w < warps; ++w) total += totals[(w * 2 + 1) * kQueries + query] * factor_of(totals[w * 2 * kQueries + query], largest);
    const float both[4] = {largest, total, 0.0f, 0.0f};
    send_floats(remote_place(maxima + (rank * kQueries + query) * 4, barrier, i / args.groups), 0, both);
  }
  for (int unit = threadIdx.x; unit < args.groups * D / 4; unit += kThreads) {
    const int query = unit / (D / 4), first = unit % (D / 4) * 4;
    float largest = minus_infinity();
    for (int w = 0; w < warps; ++w) largest = fmaxf(largest, totals[w * 2 * kQueries + query]);
    float four[4] = {};
    for (int w = 0; w < warps; ++w) {
      const float factor = factor_of(totals[w * 2 * kQueries + query], largest);
      const float* const from = outs + (w * kQueries + query) * kOutPitch + first;
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] += from[i] * factor;
    }
    send_floats(remote_place(received + (rank * share + unit % share) * 4, barrier, unit / share), 0, four);
  }
  mbarrier_wait_cluster(mbarrier_address(barrier), 0);
  for (int unit = threadIdx.x; unit < share; unit += kThreads) {
    const int place = rank * share + unit, query = place / (D / 4), first = place % (D / 4) * 4;
    float largest = minus_infinity(), total = 0.0f, four[4] = {};
    for (int block = 0; block < SPLITS; ++block) largest = fmaxf(largest, maxima[(block * kQueries + query) * 4]);
    for (int block = 0; block < SPLITS; ++block) {
      const float factor = factor_of(maxima[(block * kQueries + query) * 4], largest);
      total += maxima[(block * kQueries + query) * 4 + 1] * factor;
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] += received[(block * share + unit) * 4 + i] * factor;
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;  // a text that attends to nothing gets zeros, as torch gives it
    *reinterpret_cast<uint2*>(args.out + (text * args.key_heads * args.groups + head * args.groups + query) * D + first) =
        make_uint2(narrow2<BF16>(four[0] * inverse, four[1] * inverse), narrow2<BF16>(four[2] * inverse, four[3] * inverse));
  }
}
#endif
