// The wgmma instructions (SM90): 64 rows of weights in registers times 8 * N tokens in shared memory, asynchronously.
// Compiled behind grouped_mm.cuh and in front of grouped_mm_wgmma.cu, tiled_wgmma.cu or tiled_cluster.cu (kernels/cuda/configs.py), or in
// front of wgmma_shared.cuh (linear.py, wgrad.py); calls nothing.
// tests/emulator/cuda_emulator.h has a CPU version of each.

#if !defined(CUDA_EMULATOR) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stands behind the wait for products, and keeps later uses of the sums there. The compiler does not know that products are
// asynchronous: it takes the sums for results of the issuing instruction, and has moved additions to them in front of the wait.
template <int R, int C>
DEVICE void keep_behind(float (&acc)[R][C][4]) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < C; ++c) asm volatile("" : "+f"(acc[r][c][0]), "+f"(acc[r][c][1]), "+f"(acc[r][c][2]), "+f"(acc[r][c][3])::"memory");
}

// Pieces of code with different numbers are not merged: merged, accumulators of one would move to the registers of the other, and
// ptxas would serialise the products (its warning C7512).
template <int NUMBER>
DEVICE void keep_apart() { asm volatile("// %0" ::"n"(NUMBER) : "memory"); }

// The matrix descriptor (PTX ISA, "Matrix descriptor") of a tile [tokens][64 k] with 128-byte swizzle: its address and the
// stride of 1024 bytes from 8 tokens to the next 8. Adding 1 moves it by 16 bytes. The leading offset is ignored for swizzled
// K-major tiles.
typedef uint64_t MatrixDescriptor;
DEVICE MatrixDescriptor matrix_descriptor(const uint4* tile) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(1) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

#define ACC1(i) "+f"(acc[i][0]), "+f"(acc[i][1]), "+f"(acc[i][2]), "+f"(acc[i][3])
#define ACC2(i) ACC1(i), ACC1(i + 1)
#define ACC4(i) ACC2(i), ACC2(i + 2)
#define ACC8(i) ACC4(i), ACC4(i + 4)
#define ACC16(i) ACC8(i), ACC8(i + 8)
#define WGMMA_TYPED(N, TYPE, REGISTERS, A, B, ...)                                                                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE " {" REGISTERS "}, {" A "}, " B ", 1, 1, 1, 0;" \
               : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA(N, REGISTERS, A, B, ...)                                                       \
  do {                                                                                       \
    if constexpr (BF16) WGMMA_TYPED(N, "bf16.bf16", REGISTERS, A, B, __VA_ARGS__);           \
    else WGMMA_TYPED(N, "f16.f16", REGISTERS, A, B, __VA_ARGS__);                            \
  } while (false)
#define R4 "%0,%1,%2,%3"
#define R8 R4 ",%4,%5,%6,%7"
#define R12 R8 ",%8,%9,%10,%11"
#define R16 R12 ",%12,%13,%14,%15"
#define R20 R16 ",%16,%17,%18,%19"
#define R24 R20 ",%20,%21,%22,%23"
#define R28 R24 ",%24,%25,%26,%27"
#define R32 R28 ",%28,%29,%30,%31"
#define R36 R32 ",%32,%33,%34,%35"
#define R40 R36 ",%36,%37,%38,%39"
#define R44 R40 ",%40,%41,%42,%43"
#define R48 R44 ",%44,%45,%46,%47"
#define R52 R48 ",%48,%49,%50,%51"
#define R56 R52 ",%52,%53,%54,%55"
#define R60 R56 ",%56,%57,%58,%59"
#define R64 R60 ",%60,%61,%62,%63"
#define R68 R64 ",%64,%65,%66,%67"
#define R72 R68 ",%68,%69,%70,%71"
#define R76 R72 ",%72,%73,%74,%75"
#define R80 R76 ",%76,%77,%78,%79"
#define R84 R80 ",%80,%81,%82,%83"
#define R88 R84 ",%84,%85,%86,%87"
#define R92 R88 ",%88,%89,%90,%91"
#define R96 R92 ",%92,%93,%94,%95"
#define R100 R96 ",%96,%97,%98,%99"
#define R104 R100 ",%100,%101,%102,%103"
#define R108 R104 ",%104,%105,%106,%107"
#define R112 R108 ",%108,%109,%110,%111"
#define R116 R112 ",%112,%113,%114,%115"
#define R120 R116 ",%116,%117,%118,%119"
#define R124 R120 ",%120,%121,%122,%123"
#define R128 R124 ",%124,%125,%126,%127"

// acc[c] += the warpgroup's 64 rows by 16 k (the warp's 16 rows in `a`) times the first 8 * N tokens, asynchronously; `step`
// selects 16 of the tile's 64 k.
template <bool BF16, int N, int C>
DEVICE void wgmma(float (&acc)[C][4], const uint32_t (&a)[4], MatrixDescriptor tile, int step) {
  static_assert(N <= C, "acc holds as many tokens");
  const uint64_t b = tile + 2 * step;
  if constexpr (N == 1) WGMMA(8, R4, "%4,%5,%6,%7", "%8", ACC1(0));
  else if constexpr (N == 2) WGMMA(16, R8, "%8,%9,%10,%11", "%12", ACC2(0));
  else if constexpr (N == 3) WGMMA(24, R12, "%12,%13,%14,%15", "%16", ACC2(0), ACC1(2));
  else if constexpr (N == 4) WGMMA(32, R16, "%16,%17,%18,%19", "%20", ACC4(0));
  else if constexpr (N == 5) WGMMA(40, R20, "%20,%21,%22,%23", "%24", ACC4(0), ACC1(4));
  else if constexpr (N == 6) WGMMA(48, R24, "%24,%25,%26,%27", "%28", ACC4(0), ACC2(4));
  else if constexpr (N == 7) WGMMA(56, R28, "%28,%29,%30,%31", "%32", ACC4(0), ACC2(4), ACC1(6));
  else if constexpr (N == 8) WGMMA(64, R32, "%32,%33,%34,%35", "%36", ACC8(0));
  else if constexpr (N == 9) WGMMA(72, R36, "%36,%37,%38,%39", "%40", ACC8(0), ACC1(8));
  else if constexpr (N == 10) WGMMA(80, R40, "%40,%41,%42,%43", "%44", ACC8(0), ACC2(8));
  else if constexpr (N == 12) WGMMA(96, R48, "%48,%49,%50,%51", "%52", ACC8(0), ACC4(8));
  else if constexpr (N == 14) WGMMA(112, R56, "%56,%57,%58,%59", "%60", ACC8(0), ACC4(8), ACC2(12));
  else if constexpr (N == 16) WGMMA(128, R64, "%64,%65,%66,%67", "%68", ACC16(0));
  else if constexpr (N == 18) WGMMA(144, R72, "%72,%73,%74,%75", "%76", ACC16(0), ACC2(16));
  else if constexpr (N == 20) WGMMA(160, R80, "%80,%81,%82,%83", "%84", ACC16(0), ACC4(16));
  else if constexpr (N == 22) WGMMA(176, R88, "%88,%89,%90,%91", "%92", ACC16(0), ACC4(16), ACC2(20));
  else if constexpr (N == 24) WGMMA(192, R96, "%96,%97,%98,%99", "%100", ACC16(0), ACC8(16));
  else if constexpr (N == 32) WGMMA(256, R128, "%128,%129,%130,%131", "%132", ACC16(0), ACC16(16));
  else static_assert(N < 0, "no wgmma instance for this number of tokens");
}
#endif
