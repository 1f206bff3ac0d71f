// Grouped GEMM of many 16-bit rows per expert with packed weights in layout "linear", by wgmma (SM90).
// Compiled at run time by kernels/cuda/nvrtc.py behind wgmma.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// A warpgroup owns 64 * R rows of weights, decoded from memory into registers, and multiplies them with a tile of
// tokens in shared memory that all warpgroups of the block read. A thread loads 32 consecutive k of a row of weights and
// has to supply pair t of every 8 of the tensor cores' k: so order_rows writes the tokens beforehand in the order of k
// that makes them the same k. While the tensor cores work on one half of a chunk, the threads decode the next one.

// Gathers the rows, each chunk of them in another order of k: where step 2 * i + j of the tensor cores has its k of
// numbers 2 * t + h and 8 more (h = 0, 1), thread t has the codes of k = 32 * t + 8 * i + 4 * j + h and 2 more.
__global__ void __launch_bounds__(256) order_rows(const GatherArguments args) {
  await_previous_kernel();
  const int units = (args.k + kChunk - 1) / kChunk * 16;  // of 8 numbers
  const int64_t items = static_cast<int64_t>(rows_to_gather(args)) * units;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; item < items;
       item += static_cast<int64_t>(gridDim.x) * 256) {
    const int row = static_cast<int>(item / units), unit = static_cast<int>(item - static_cast<int64_t>(row) * units);
    const int token = args.row_slot != nullptr ? slot_of_row(args.row_slot, row, args.rows) / args.top_k : row;
    const uint16_t* from = args.x + static_cast<int64_t>(token) * args.k;
    const int k = unit / 16 * kChunk + unit % 16 * 2;
    uint32_t pairs[4];
#pragma unroll
    for (int t = 0; t < 4; ++t)
      pairs[t] = k + 32 * t < args.k ? *reinterpret_cast<const uint32_t*>(from + k + 32 * t) : 0;
    reinterpret_cast<uint4*>(args.out)[item] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// C: blocks of 8 tokens of a tile; R: blocks of 64 weight rows of a warpgroup (SwiGLU: one of gate, one of up); WG:
// warpgroups; STAGES: chunks of tokens in shared memory. Persistent.
template <bool BF16, bool SWIGLU, bool FULL, int C, int R, int WG, int STAGES>
__global__ void __launch_bounds__(128 * WG, 1) grouped_mm_wgmma(const GemmArguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(STAGES >= 3, "a stage is filled while two are read");
  constexpr int kThreads = 128 * WG, kTokens = 8 * C;
  // A stage in units of 16 bytes: [2 halves of a chunk][kTokens][8], then with FULL each thread's part of its rows,
  // codes [kCodePieces][R][2][kThreads] and scales (4 bytes each; a thread needs kThreadScales of them) [R][2][kThreads].
  constexpr int kCodes = kTokens * 16, kScales = kCodes + 2 * R * kCodePieces * kThreads;
  constexpr int kStage = FULL ? kScales + 2 * R * kThreads / 4 : kCodes;
  constexpr int kTileRows = WG * 64 * (SWIGLU ? 1 : R);
  DYNAMIC_SHARED(uint4, memory);  // [STAGES][kStage]
  __shared__ int tile_start[kMaxExperts + 1], row_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  uint4* const stages = align_shared(memory, 1024);
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int chunks = (args.k + kChunk - 1) / kChunk;

  // Each thread copies one of a token's 16 units of 16 bytes, of every kStep-th token, to [half of the chunk][token]
  // [8 units], where a token's units are in the order of the 128-byte swizzle. Rows that are not the expert's are read
  // and not stored.
  constexpr int kStep = kThreads / 16;
  static_assert(kStep % 8 == 0, "a thread's tokens are swizzled alike");
  const int unit = threadIdx.x % 16, token = threadIdx.x / 16;
  const int64_t row_size = static_cast<int64_t>(chunks) * kChunk;  // of the output of order_rows
  uint4* const to = stages + (unit / 8 * kTokens + token) * 8 + (unit % 8 ^ token % 8);

  count_tiles<kThreads>(args, kTokens, tile_start, row_start, warp_total);
  const int tiles = tile_start[args.num_experts] * tiles_n;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto [expert, row0, end, tile_n] = tile_of(args, tile_start, row_start, tile, tiles_n, kTokens);
    const int n0 = tile_n * kTileRows + warpgroup * 64 * (SWIGLU ? 1 : R) + 16 * warp;

    Rows rows[R];
    find_rows<SWIGLU, R, 64>(rows, args, expert, n0, g, 32 * t);
    const uint16_t* from = args.x + (row0 + token) * row_size + 8 * unit;
    auto fetch = [&](int stage, bool exists) {  // the next chunk
      uint4* const in = stages + stage * kStage;
      if (exists) {
        const uint16_t* row = from;
#pragma unroll
        for (int i = 0; i < kTokens; i += kStep, row += kStep * row_size) {
          if (kTokens % kStep != 0 && token + i >= kTokens) break;
          cp_async16(to + stage * kStage + i * 8, row, true);
        }
        from += kChunk;
        if constexpr (FULL) {
#pragma unroll
          for (int r = 0; r < R; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int slot = (2 * r + half) * kThreads + threadIdx.x;
#pragma unroll
              for (int piece = 0; piece < kCodePieces; ++piece)
                cp_async16(in + kCodes + piece * (2 * R * kThreads) + slot, rows[r].codes[half] + 16 * piece, true);
              cp_async4(reinterpret_cast<uint32_t*>(in + kScales) + slot, rows[r].scales[half] - kThreadScales * (t % (4 / kThreadScales)));
              rows[r].codes[half] += kChunk / kCodesPerByte, rows[r].scales[half] += kChunk / kScaleK;
            }
        }
      }
      cp_async_commit();
    };
    Weights ahead[R];  // without FULL: of the next chunk
    if constexpr (!FULL)
#pragma unroll
      for (int r = 0; r < R; ++r) load_weights<false>(ahead[r], rows[r], 0, args.k - 32 * t);
    for (int stage = 0; stage < STAGES - 2; ++stage) fetch(stage, stage < chunks);
    int reading = 0, filling = STAGES - 2;  // stages

    float acc[R][C][4] = {};
    uint32_t a[2][4][4];  // of the half chunk that the tensor cores read, and of the next one
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint4* stage = stages + reading * kStage;
      reading = next_stage<STAGES>(reading);
      cp_async_wait<STAGES - 3>();
      fence_proxy_async();
      __syncthreads();  // this chunk has arrived; the products of the one before the last are done in all warpgroups
      fetch(filling, chunk + STAGES - 2 < chunks);
      filling = next_stage<STAGES>(filling);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        Weights now;
        if constexpr (FULL) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int slot = (2 * r + half) * kThreads + threadIdx.x;
#pragma unroll
            for (int piece = 0; piece < kCodePieces; ++piece) now.codes[half][piece] = stage[kCodes + piece * (2 * R * kThreads) + slot];
            now.scales[half] = reinterpret_cast<const uint32_t*>(stage + kScales)[slot] >> (8 * kThreadScales * (t % (4 / kThreadScales)));
          }
        } else {
          now = ahead[r];
          if (chunk + 1 < chunks) load_weights<false>(ahead[r], rows[r], chunk + 1, args.k - 32 * t - (chunk + 1) * kChunk);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          wgmma_wait<1>();  // the wgmma that read a[half] before have ended
          decode_half_chunk<BF16>(a[half], now, half);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < 4; ++step) wgmma<BF16, C>(acc[r], a[half][step], matrix_descriptor(stage + half * kTokens * 8), step);
          wgmma_commit();
        }
      }
    }
    wgmma_wait<0>();
    keep_behind(acc);
    store<BF16, SWIGLU, C, R, 64>(args, acc, expert, row0, end, n0, g, t);
    cp_async_wait<0>();
    __syncthreads();
  }
}
#endif
