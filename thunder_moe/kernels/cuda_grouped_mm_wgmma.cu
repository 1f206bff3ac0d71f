// Grouped GEMM of 16-bit rows with NVFP4 weights by wgmma (SM90): for experts with many rows.
// Compiled at run time by kernels/cuda.py behind cuda_grouped_mm.cuh; run on a CPU by tests/kernels/cuda_emulator.h.
//
// A warpgroup owns 64 * R rows of weights, decoded from memory into registers, and multiplies them with a tile of
// tokens in shared memory that all warpgroups of the block read. Shared memory has its k in natural order, so the four
// threads that share a row exchange bytes: each loads 32 k of its own and needs pair t of every 8 k.
// While the tensor cores work on one block of 64 rows, the threads decode the next one.

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

#ifndef CUDA_EMULATOR
DEVICE void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of a tile of [tokens][64 k] with 128-byte swizzle, 16 k at `step`: its start, and 1024 bytes from 8
// tokens to the next 8. (PTX ISA, "Matrix descriptor"; the leading offset does not count for swizzled K-major tiles.)
DEVICE uint64_t descriptor(const uint4* tile, int step) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(tile)) + 32 * step;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(1) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

#define ACC4(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define ACC16(i) ACC4(i), ACC4(i + 1), ACC4(i + 2), ACC4(i + 3)
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define WGMMA(TYPE, REGISTERS, A, B, ...)                                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" TYPE " {" REGISTERS "}, {" A "}, " B ", 1, 1, 1, 0;" : __VA_ARGS__ : OPERANDS)
#define R8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define R32 R8(0,1,2,3,4,5,6,7) "," R8(8,9,10,11,12,13,14,15) "," R8(16,17,18,19,20,21,22,23) "," R8(24,25,26,27,28,29,30,31)
#define R64 R32 "," R8(32,33,34,35,36,37,38,39) "," R8(40,41,42,43,44,45,46,47) "," R8(48,49,50,51,52,53,54,55) "," R8(56,57,58,59,60,61,62,63)

// acc[c] += the warpgroup's 64 rows by 16 k (the warp's 16 in `a`) times 8 * C tokens, asynchronously.
template <bool BF16, int C>
DEVICE void wgmma(float (&acc)[C][4], const uint32_t (&a)[4], const uint4* tile, int step) {
  static_assert(C == 8 || C == 16, "written out for 64 and 128 tokens");
  const uint64_t b = descriptor(tile, step);
  if constexpr (C == 8) {
    if constexpr (BF16) WGMMA("64k16.f32.bf16.bf16", R32, "%32,%33,%34,%35", "%36", ACC16(0), ACC16(4));
    else WGMMA("64k16.f32.f16.f16", R32, "%32,%33,%34,%35", "%36", ACC16(0), ACC16(4));
  } else {
    if constexpr (BF16) WGMMA("128k16.f32.bf16.bf16", R64, "%64,%65,%66,%67", "%68", ACC16(0), ACC16(4), ACC16(8), ACC16(12));
    else WGMMA("128k16.f32.f16.f16", R64, "%64,%65,%66,%67", "%68", ACC16(0), ACC16(4), ACC16(8), ACC16(12));
  }
}
#endif

// The four threads of a row hold words 4 t + i (8 k each); afterwards thread t holds byte t of word 4 j + i as byte i
// of out[j]: pair t of every 8 k, in the order of k.
DEVICE void exchange_bytes(uint32_t (&out)[4], const uint4& words, int t) {
  const bool odd = t % 2, high = t / 2;
  // With the neighbour: bytes 0, 2 against 1, 3. Of two words, (w0 a, w0 b, w1 a, w1 b).
  const uint32_t keep1 = odd ? 0x7531u : 0x6420u, give1 = odd ? 0x6420u : 0x7531u;
  const uint32_t mine01 = permute_bytes(words.x, words.y, keep1), mine23 = permute_bytes(words.z, words.w, keep1);
  const uint32_t theirs01 = __shfl_xor_sync(0xffffffffu, permute_bytes(words.x, words.y, give1), 1);
  const uint32_t theirs23 = __shfl_xor_sync(0xffffffffu, permute_bytes(words.z, words.w, give1), 1);
  // With the pair beyond: the first of each two bytes against the second.
  const uint32_t keep2 = high ? 0x7531u : 0x6420u, give2 = high ? 0x6420u : 0x7531u;
  const uint32_t own = permute_bytes(mine01, mine23, keep2), next = permute_bytes(theirs01, theirs23, keep2);
  const uint32_t beyond = __shfl_xor_sync(0xffffffffu, permute_bytes(mine01, mine23, give2), 2);
  const uint32_t opposite = __shfl_xor_sync(0xffffffffu, permute_bytes(theirs01, theirs23, give2), 2);
  // own, next, beyond, opposite come from threads t, t ^ 1, t ^ 2, t ^ 3.
  const uint32_t even0 = odd ? next : own, odd0 = odd ? own : next;
  const uint32_t even2 = odd ? opposite : beyond, odd2 = odd ? beyond : opposite;
  out[0] = high ? even2 : even0, out[1] = high ? odd2 : odd0;
  out[2] = high ? even0 : even2, out[3] = high ? odd0 : odd2;
}

// Byte i of `bytes`: two codes -> a register of two 16-bit floats, for i = 0..3; word i has scale[i / 2].
template <bool BF16>
DEVICE void decode_pairs(uint32_t (&out)[4], uint32_t bytes, const uint32_t (&scale)[2]) {
  const uint32_t shifted = bytes << 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = decode_byte<BF16>(bytes, shifted, i, scale[i / 2]);
}

// A chunk's 8 steps of 16 k in natural order: step 2 * j + i takes words 4 * j + 2 * i and the next.
template <bool BF16>
DEVICE void decode_chunk_in_order(uint32_t (&a)[8][4], const Weights& w, int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t bytes[4];
    exchange_bytes(bytes, w.codes[half], t);
    const uint32_t own = decode_scales<BF16>(w.scales[half]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t scale[2], values[4];  // the two scales of words 4 j .. 4 j + 3, which thread j of the row holds
      const int from = (static_cast<int>(threadIdx.x) % 32 & ~3) + j;
      spread_scales(scale, __shfl_sync(0xffffffffu, own, from));
      decode_pairs<BF16>(values, bytes[j], scale);
      a[2 * j][half] = values[0], a[2 * j][2 + half] = values[1];
      a[2 * j + 1][half] = values[2], a[2 * j + 1][2 + half] = values[3];
    }
  }
}

// C: blocks of 8 tokens of a tile; R: blocks of 64 weight rows of a warpgroup (SwiGLU: one of gate, one of up); WG:
// warpgroups; STAGES: chunks of tokens in shared memory. One block runs tile after tile.
template <bool BF16, bool SWIGLU, bool FULL, int C, int R, int WG, int STAGES>
__global__ void __launch_bounds__(128 * WG, 1) grouped_mm_wgmma(const Arguments args) {
  await_previous_kernel();
  static_assert(!SWIGLU || R == 2, "SwiGLU takes one block of rows of gate and one of up");
  static_assert(STAGES >= 3, "a stage is filled while two are read");
  constexpr int kThreads = 128 * WG, kTokens = 8 * C, kStage = kTokens * 16;  // in units of 16 bytes
  constexpr int kTileRows = WG * 64 * (SWIGLU ? 1 : R);
  DYNAMIC_SHARED(uint4, memory);  // [STAGES][2 halves of a chunk][kTokens][8]
  __shared__ int tile_start[kMaxExperts + 1];
  __shared__ int warp_total[kThreads / 32];
  __shared__ const uint16_t* token_of[kTokens];

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  uint4* const stages = align_shared(memory, 1024);
  const int features = SWIGLU ? args.n / 2 : args.n;
  const int tiles_n = (features + kTileRows - 1) / kTileRows;
  const int chunks = (args.k + kChunk - 1) / kChunk;

  // [half of the chunk][token][8 units], each token's units in the order of the 128-byte swizzle.
  const int unit = threadIdx.x % 16, token = threadIdx.x / 16;
  const TokenCopies<FULL, kThreads, kTokens, 8> fetch(
      token_of, args.k, stages + (unit / 8 * kTokens + token) * 8 + (unit % 8 ^ token % 8));
  static_assert(fetch.kStep % 8 == 0, "a thread's tokens are swizzled alike");

  count_tiles<kThreads>(args, kTokens, tile_start, warp_total);
  const int tiles = tile_start[args.experts] * tiles_n;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto [expert, row0, end, tile_n] = tile_of(args, tile_start, tile, tiles_n, kTokens);
    const int n0 = tile_n * kTileRows + warpgroup * 64 * (SWIGLU ? 1 : R) + 16 * warp;

    for (int i = threadIdx.x; i < kTokens; i += kThreads) token_of[i] = token_of_row(args, row0 + i, end);
    __syncthreads();
    Rows rows[R];
    find_rows<SWIGLU, R, 64>(rows, args, expert, n0, g, 32 * t);
    Weights ahead[R];
#pragma unroll
    for (int r = 0; r < R; ++r) load_weights<FULL>(ahead[r], rows[r], 0, args.k - 32 * t);
    for (int stage = 0; stage < STAGES - 2; ++stage) fetch(stage, stage, stage < chunks);
    int reading = 0, filling = STAGES - 2;  // stages

    float acc[R][C][4] = {};
    uint32_t a[2][8][4];  // of the block that the tensor cores read, and of the next one
    for (int base = 0; base < chunks; base += 2) {
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        const int chunk = base + d;
        if (chunk >= chunks) break;
#pragma unroll
        for (int r = 0; r < R; ++r) {
          uint32_t(&mine)[8][4] = a[(d * R + r) % 2];
          wait_for_products<1>();  // those that read `mine` before
          decode_chunk_in_order<BF16>(mine, ahead[r], t);
          if (chunk + 1 < chunks) load_weights<FULL>(ahead[r], rows[r], chunk + 1, args.k - 32 * t - (chunk + 1) * kChunk);
          if (r == 0) {
            wait_for_copies<STAGES - 3>();
            fence_shared();
            __syncthreads();  // this chunk has come; the products of the one before the last are done in all warpgroups
            fetch(filling, chunk + STAGES - 2, chunk + STAGES - 2 < chunks);
            filling = next_stage<STAGES>(filling);
          }
          fence_registers();
          const uint4* stage = stages + reading * kStage;
#pragma unroll
          for (int step = 0; step < 8; ++step)
            wgmma<BF16, C>(acc[r], mine[step], stage + step / 4 * kTokens * 8, step % 4);
          commit_products();
        }
        reading = next_stage<STAGES>(reading);
      }
    }
    wait_for_products<0>();
    store<BF16, SWIGLU, C, R, 64>(args, acc, expert, row0, end, n0, g, t);
    wait_for_copies<0>();
    __syncthreads();
  }
}
#endif
