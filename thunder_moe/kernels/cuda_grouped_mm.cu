// Grouped GEMM of 16-bit rows with NVFP4 weights by mma.sync (SM80 and newer): from memory straight into registers.
// Compiled at run time by kernels/cuda.py behind cuda_grouped_mm.cuh; run on a CPU by tests/kernels/cuda_emulator.h.
//
// A thread reads 16 bytes (32 weights) of a row of weights at a time, always the same 32 k of a chunk, and the same
// 32 k of its token: within a chunk the order of k is free, so neither operand is exchanged between threads and both
// keep their natural order in memory. `grouped_mm` reads tokens from memory and splits K over the warps of a block
// (few rows per expert); `grouped_mm_staged` shares tokens between warps in shared memory.

// C: blocks of 8 tokens of a tile; R: blocks of 16 weight rows of a warp (SwiGLU: one of gate, one of up); WN, WK: warps
// along N and along K; DEPTH: chunks in flight. One block runs tile after tile.
template <bool BF16, bool SWIGLU, bool FULL, int C, int R, int WN, int WK, int DEPTH>
__global__ void __launch_bounds__(32 * WN * WK) grouped_mm(const Arguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(DEPTH % 2 == 0, "the tokens alternate between two buffers");
  constexpr int kThreads = 32 * WN * WK, kTokens = 8 * C;
  constexpr int kTileRows = WN * 16 * (SWIGLU ? 1 : R);  // output features of a tile
  __shared__ int tile_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];
  __shared__ float partial[WK > 1 ? WK - 1 : 1][WN][R * C * 4 * 32];

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp_n = threadIdx.x / 32 % WN, warp_k = threadIdx.x / 32 / WN;
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int chunks = (args.k + kChunk - 1) / kChunk;
  const int k_first = warp_k * kChunk + 32 * t;  // of this thread

  count_tiles<kThreads>(args, kTokens, tile_start, warp_total);
  const int tiles = tile_start[args.experts] * tiles_n;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int tile_m = tile / tiles_n, tile_n = tile - tile_m * tiles_n;
    const int expert = expert_of_tile(tile_start, args.experts, tile_m);
    const int end = args.offsets[expert];
    const int row0 = (expert ? args.offsets[expert - 1] : 0) + (tile_m - tile_start[expert]) * kTokens;
    const int n0 = tile_n * kTileRows + warp_n * (SWIGLU ? 16 : 16 * R);

    Rows rows[R];
    find_rows<SWIGLU, R, 16>(rows, args, expert, n0, g, k_first);
    const uint16_t* token[C];
#pragma unroll
    for (int c = 0; c < C; ++c) {
      token[c] = token_of_row(args, row0 + 8 * c + g, end) + k_first;
    }

    float acc[R][C][4] = {};
    Weights ring[DEPTH][R];
    uint4 x[2][C][4];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
      if (warp_k + d * WK < chunks)
#pragma unroll
        for (int r = 0; r < R; ++r) load_weights<FULL>(ring[d][r], rows[r], d * WK, args.k - k_first - d * WK * kChunk);
    if (warp_k < chunks) load_tokens<FULL, C>(x[0], token, 0, args.k - k_first);
    int left = chunks - warp_k, k_left = args.k - k_first;  // from this warp's, and this thread's, position on
    for (; left > 0; left -= WK * DEPTH, k_left -= WK * DEPTH * kChunk) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (left <= d * WK) break;
        if (left > (d + 1) * WK) load_tokens<FULL, C>(x[(d + 1) % 2], token, (d + 1) * WK, k_left - (d + 1) * WK * kChunk);
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            uint32_t a[4][4];
            decode_half_chunk<BF16>(a, ring[d][r], part);
#pragma unroll
            for (int c = 0; c < C; ++c) multiply<BF16>(acc[r][c], a, x[d % 2][c], part);
          }
          if (left > (d + DEPTH) * WK)
            load_weights<FULL>(ring[d][r], rows[r], (d + DEPTH) * WK, k_left - (d + DEPTH) * WK * kChunk);
        }
      }
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows[r].codes[half] += WK * DEPTH * (kChunk / 2);
          rows[r].scales[half] += WK * DEPTH * (kChunk / 16);
        }
#pragma unroll
      for (int c = 0; c < C; ++c) token[c] += WK * DEPTH * kChunk;
    }

    if constexpr (WK > 1) {  // add the shares of K in the order of the warps, so that the sum does not depend on timing
      if (warp_k > 0) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int c = 0; c < C; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) partial[warp_k - 1][warp_n][((r * C + c) * 4 + i) * 32 + lane] = acc[r][c][i];
      }
      __syncthreads();
      if (warp_k == 0) {
        for (int other = 0; other < WK - 1; ++other)
#pragma unroll
          for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c)
#pragma unroll
              for (int i = 0; i < 4; ++i) acc[r][c][i] += partial[other][warp_n][((r * C + c) * 4 + i) * 32 + lane];
      }
    }
    if (warp_k == 0) store<BF16, SWIGLU, C, R, 16>(args, acc, expert, row0, end, n0, g, t);
    if constexpr (WK > 1) __syncthreads();
  }
}

// Where the 16 bytes (8 k) `unit` of a token stand in its 256 bytes of shared memory: the 8 threads that read together
// (4 t of 2 tokens) meet all banks.
DEVICE int place_of_unit(int token, int unit) { return ((unit % 4 * 4 + unit / 4) ^ (token % 2 * 4)); }

// As grouped_mm, for many rows per expert: WN warps share the 8 * C tokens of a tile, STAGES chunks of them in flight.
template <bool BF16, bool SWIGLU, bool FULL, int C, int R, int WN, int STAGES>
__global__ void __launch_bounds__(32 * WN) grouped_mm_staged(const Arguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  constexpr int kThreads = 32 * WN, kTokens = 8 * C, kDepth = 2;
  constexpr int kTileRows = WN * 16 * (SWIGLU ? 1 : R);
  DYNAMIC_SHARED(uint4, stages);  // [STAGES][kTokens][16]
  __shared__ int tile_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];
  __shared__ const uint16_t* token_of[kTokens];

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int chunks = (args.k + kChunk - 1) / kChunk;

  const int token = threadIdx.x / 16;
  const TokenCopies<FULL, kThreads, kTokens, 16> fetch(
      token_of, args.k, stages + token * 16 + place_of_unit(token, threadIdx.x % 16));
  static_assert(fetch.kStep % 2 == 0, "a thread's tokens are placed alike");

  count_tiles<kThreads>(args, kTokens, tile_start, warp_total);
  const int tiles = tile_start[args.experts] * tiles_n;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto [expert, row0, end, tile_n] = tile_of(args, tile_start, tile, tiles_n, kTokens);
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
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // this chunk has come, and the one before is no longer read
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
    wait_for_copies<0>();
    __syncthreads();
  }
}
