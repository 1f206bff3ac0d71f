// Grouped GEMM of 16-bit rows with packed weights by mma.sync (SM80 and newer): from memory straight into registers.
// Compiled at run time by kernels/cuda/nvrtc.py behind grouped_mm.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// A thread reads 32 weights of a row of weights at a time, always the same 32 k of a chunk, and the same
// 32 k of its token: the order of k within a chunk does not matter, so threads exchange no operand, and both operands
// keep their natural order in memory. `grouped_mm` can split K over the warps of a block and waits rarely (few rows per
// expert); `grouped_mm_staged` stages many tokens' chunks in shared memory.

// The place of the 16 bytes (8 k) `unit` of a chunk of a token in its 256 bytes of shared memory, swizzled so that the 8 threads
// that read together (4 t of 2 tokens) use all banks.
DEVICE int place_of_unit(int token, int unit) { return ((unit % 4 * 4 + unit / 4) ^ (token % 2 * 4)); }

// C: blocks of 8 tokens of a tile; R: blocks of 16 weight rows of a warp (SwiGLU: one of gate, one of up); WN, WK: warps
// along N and along K; DEPTH: chunks of weights in flight. Persistent. Shared memory holds its tokens' k of a segment of
// kSegment chunks, while the next segment is copied.
template <bool BF16, bool SWIGLU, bool FULL, int C, int R, int WN, int WK, int DEPTH>
__global__ void __launch_bounds__(32 * WN * WK) grouped_mm(const GemmArguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(4 % DEPTH == 0, "a warp takes four chunks at a time");
  constexpr int kThreads = 32 * WN * WK, kTokens = 8 * C, kGroup = 4 * WK;  // chunks that the warps take at a time
  constexpr int kSegment = kGroup * C < 8 ? 8 / C : kGroup, kUnits = 16 * kSegment;
  constexpr int kTileRows = WN * 16 * (SWIGLU ? 1 : R);  // output features of a tile
  DYNAMIC_SHARED(uint4, tokens);  // [2 segments][kTokens][kSegment chunks][16 units]
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];
  __shared__ float partial[WK > 1 ? WK - 1 : 1][WN][R * C * 4 * 32];
  __shared__ const uint16_t* token_of[kTokens];

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_n = threadIdx.x / 32 % WN, warp_k = threadIdx.x / 32 / WN;
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int chunks = (args.k + kChunk - 1) / kChunk;
  const int k_first = warp_k * kChunk + 32 * t;  // of this thread

  count_tiles<kThreads>(args, kTokens, tile_start, row_start, warp_total);
  const int tiles = tile_start[args.num_experts] * tiles_n;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int tile_m = tile / tiles_n, tile_n = tile - tile_m * tiles_n;
    const int expert = expert_of_tile(tile_start, args.num_experts, tile_m);
    const int end = row_start[expert + 1];
    const int row0 = row_start[expert] + (tile_m - tile_start[expert]) * kTokens;
    const int n0 = tile_n * kTileRows + warp_n * (SWIGLU ? 16 : 16 * R);
    const int live = min(end - row0, kTokens);  // tokens; the others' places are multiplied and not stored

    Rows rows[R];
    find_rows<SWIGLU, R, 16>(rows, args, expert, n0, g, k_first);
    Weights ring[DEPTH][R];
    ChunkScales scales[R][2];  // FULL: thread t has the scales of all four threads, for chunk t of the next four
    int left = chunks - warp_k, k_left = args.k - k_first;  // from this warp's, and this thread's, position on
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
        if (left > d * WK) load_weights<FULL, !FULL>(ring[d][r], rows[r], d * WK, k_left - d * WK * kChunk);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (!FULL) continue;
        rows[r].scales[half] += t * (WK * kChunk / kScaleK - kThreadScales);  // from its own in a chunk to all of chunk t
        scales[r][half] = left > t * WK ? load_chunk_scales(rows[r].scales[half]) : no_scales();
      }
    }

    prefetch_for_epilogue<SWIGLU, R, 16>(args, expert, n0, g);
    if (threadIdx.x < live) token_of[threadIdx.x] = token_of_row(args, row0 + threadIdx.x, end);
    __syncthreads();
    auto fetch = [&](int segment) {
      for (int i = threadIdx.x; i < live * kUnits; i += kThreads) {
        const int token = i / kUnits, unit = i % kUnits, k = segment * (kSegment * kChunk) + 8 * unit;
        uint4* to = tokens + ((segment % 2 * kTokens + token) * kUnits + (unit & ~15) + place_of_unit(token, unit % 16));
        cp_async16(to, token_of[token] + (k < args.k ? k : 0), k < args.k);
      }
      cp_async_commit();
    };
    fetch(0);

    float acc[R][C][4] = {};
    for (int first = 0; first < chunks; first += kGroup) {  // the warps' next four chunks each
      const int segment = first / kSegment;
      if (first % kSegment == 0) {
        cp_async_wait<0>();
        __syncthreads();  // this segment has arrived, and the one before is no longer read
        if (first + kSegment < chunks) fetch(segment + 1);
      }
      ChunkScales own[R][2];
      if constexpr (FULL) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            own[r][half] = exchange_scales(scales[r][half], t);
            rows[r].scales[half] += kGroup * (kChunk / kScaleK);
            if (left > (4 + t) * WK) scales[r][half] = load_chunk_scales(rows[r].scales[half]);
          }
      }
      const uint4* from = tokens + (segment % 2 * kTokens + g) * kUnits + (first % kSegment + warp_k) * 16;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (left <= d * WK) break;
        uint4 x[C][4];
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i) x[c][i] = from[8 * c * kUnits + d * WK * 16 + place_of_unit(g, 4 * t + i)];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          Weights& now = ring[d % DEPTH][r];
          if constexpr (FULL) {
#pragma unroll
            for (int half = 0; half < 2; ++half) now.scales[half] = scales_of_chunk(own[r][half], d);
          }
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            uint32_t a[4][4];
            decode_half_chunk<BF16>(a, now, part);
#pragma unroll
            for (int c = 0; c < C; ++c) multiply<BF16>(acc[r][c], a, x[c], part);
          }
          if (left > (d + DEPTH) * WK) load_weights<FULL, !FULL>(now, rows[r], (d + DEPTH) * WK, k_left - (d + DEPTH) * WK * kChunk);
        }
      }
      left -= kGroup, k_left -= kGroup * kChunk;
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows[r].codes[half] += kGroup * (kChunk / kCodesPerByte);
          if constexpr (!FULL) rows[r].scales[half] += kGroup * (kChunk / kScaleK);
        }
    }

    if constexpr (WK > 1) {  // sum over the warps along K in their order: deterministic
      if (warp_k > 0) for_each_sum(acc, [&](float& sum, int i) { partial[warp_k - 1][warp_n][i * 32 + lane] = sum; });
      __syncthreads();
      if (warp_k == 0)
        for (int other = 0; other < WK - 1; ++other)
          for_each_sum(acc, [&](float& sum, int i) { sum += partial[other][warp_n][i * 32 + lane]; });
    }
    if (warp_k == 0) store<BF16, SWIGLU, C, R, 16>(args, acc, expert, row0, end, n0, g, t);
    __syncthreads();
  }
}

// Asynchronous copies of chunks of a tile's tokens into stages of shared memory: each thread copies one of a token's 16
// units of 16 bytes, of every kStep-th token.
template <bool FULL, int THREADS, int TOKENS>
struct TokenCopies {
  static constexpr int kStep = THREADS / 16;
  uint4* to;               // the thread's unit of its first token in stage 0
  const uint16_t* const* from;  // each token's row of x, from the thread's first token on
  int first, k, end_k;     // the first token; k of the unit in a chunk; K

  METHOD TokenCopies(const uint16_t* const* rows, int end_k, uint4* place)
      : to(place), from(rows + threadIdx.x / 16), first(threadIdx.x / 16), k(threadIdx.x % 16 * 8), end_k(end_k) {}

  METHOD void operator()(int stage, int chunk, bool exists) const {
    if (exists) {
      const bool valid = FULL || chunk * kChunk + k < end_k;
      const int offset = valid ? chunk * kChunk + k : 0;
#pragma unroll
      for (int i = 0; i < TOKENS; i += kStep) {
        if (TOKENS % kStep != 0 && first + i >= TOKENS) break;
        cp_async16(to + (stage * TOKENS + i) * 16, from[i] + offset, valid);
      }
    }
    cp_async_commit();
  }
};

// Like grouped_mm, for many rows per expert: WN warps share the 8 * C tokens of a tile, STAGES chunks of them in flight.
template <bool BF16, bool SWIGLU, bool FULL, int C, int R, int WN, int STAGES>
__global__ void __launch_bounds__(32 * WN) grouped_mm_staged(const GemmArguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  constexpr int kThreads = 32 * WN, kTokens = 8 * C, kDepth = 2;
  constexpr int kTileRows = WN * 16 * (SWIGLU ? 1 : R);
  DYNAMIC_SHARED(uint4, stages);  // [STAGES][kTokens][16]
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];
  __shared__ const uint16_t* token_of[kTokens];

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int chunks = (args.k + kChunk - 1) / kChunk;

  const int token = threadIdx.x / 16;
  const TokenCopies<FULL, kThreads, kTokens> fetch(
      token_of, args.k, stages + token * 16 + place_of_unit(token, threadIdx.x % 16));
  static_assert(fetch.kStep % 2 == 0, "a thread's tokens are placed alike");

  count_tiles<kThreads>(args, kTokens, tile_start, row_start, warp_total);
  const int tiles = tile_start[args.num_experts] * tiles_n;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto [expert, row0, end, tile_n] = tile_of(args, tile_start, row_start, tile, tiles_n, kTokens);
    const int n0 = tile_n * kTileRows + warp * (SWIGLU ? 16 : 16 * R);

    for (int i = threadIdx.x; i < kTokens; i += kThreads) token_of[i] = token_of_row(args, row0 + i, end);
    __syncthreads();
    Rows rows[R];
    find_rows<SWIGLU, R, 16>(rows, args, expert, n0, g, 32 * t);
    Weights ring[kDepth][R];
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
      if (d < chunks)
#pragma unroll
        for (int r = 0; r < R; ++r) load_weights<FULL>(ring[d][r], rows[r], d, args.k - 32 * t - d * kChunk);
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage, stage, stage < chunks);
    int reading = 0, filling = STAGES - 1;  // stages

    float acc[R][C][4] = {};
    for (int base = 0; base < chunks; base += kDepth) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const int chunk = base + d;
        if (chunk >= chunks) break;
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this chunk has arrived, and the one before is no longer read
        fetch(filling, chunk + STAGES - 1, chunk + STAGES - 1 < chunks);
        filling = next_stage<STAGES>(filling);
        uint32_t a[R][2][4][4];
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int part = 0; part < 2; ++part) decode_half_chunk<BF16>(a[r][part], ring[d][r], part);
          if (chunk + kDepth < chunks)
            load_weights<FULL>(ring[d][r], rows[r], chunk + kDepth, args.k - 32 * t - (chunk + kDepth) * kChunk);
        }
        const uint4* stage = stages + reading * kTokens * 16;
        reading = next_stage<STAGES>(reading);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          uint4 x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = stage[(8 * c + g) * 16 + place_of_unit(8 * c + g, 4 * t + i)];
#pragma unroll
          for (int r = 0; r < R; ++r)
#pragma unroll
            for (int part = 0; part < 2; ++part) multiply<BF16>(acc[r][c], a[r][part], x, part);
        }
      }
    }
    store<BF16, SWIGLU, C, R, 16>(args, acc, expert, row0, end, n0, g, t);
    cp_async_wait<0>();
    __syncthreads();
  }
}
