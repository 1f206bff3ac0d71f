// The asynchronous wgmma instructions (SM90) of two operands in shared memory; each operand may be read transposed.
// Compiled behind wgmma.cuh and in front of wgrad_wgmma.cu or linear_wgmma.cu (kernels/cuda/wgrad.py, linear.py); calls nothing.
// tests/emulator/cuda_emulator.h has a CPU version of each.

#if !defined(CUDA_EMULATOR) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Like matrix_descriptor, of boxes [64 rows][64 columns] that are read transposed: 1024 bytes from 8 rows to the next 8, a box of
// 8192 bytes from 64 columns to the next 64. Adding 128 moves it by 16 rows.
DEVICE MatrixDescriptor row_descriptor(const uint8_t* box) {
  return static_cast<uint64_t>((shared_address(box) & 0x3FFFF) >> 4) | static_cast<uint64_t>(8192 >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

#define WGMMA_SHARED_TYPED(N, TYPE, REGISTERS, A, B, FLAG, ROWS_A, ROWS_B, ...)                                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " FLAG ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               " {" REGISTERS "}, " A ", " B ", add, 1, 1, " ROWS_A ", " ROWS_B ";\n}"                                   \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(TRANSPOSED_A)), "n"(static_cast<int>(TRANSPOSED_B)))
#define WGMMA_SHARED(N, REGISTERS, A, B, FLAG, ROWS_A, ROWS_B, ...)                                                   \
  do {                                                                                                                \
    if constexpr (BF16) WGMMA_SHARED_TYPED(N, "bf16.bf16", REGISTERS, A, B, FLAG, ROWS_A, ROWS_B, __VA_ARGS__);       \
    else WGMMA_SHARED_TYPED(N, "f16.f16", REGISTERS, A, B, FLAG, ROWS_A, ROWS_B, __VA_ARGS__);                        \
  } while (false)

// acc += (add) or = 64 by 16 numbers of `a` times 16 by 8 C of `b`, asynchronously. An operand's 16 numbers are in a row of its
// descriptor's box or, TRANSPOSED, in a column.
template <bool BF16, bool TRANSPOSED_A, bool TRANSPOSED_B, int C>
DEVICE void wgmma_shared(float (&acc)[C][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  if constexpr (C == 2) WGMMA_SHARED(16, R8, "%8", "%9", "%10", "%11", "%12", ACC2(0));
  else if constexpr (C == 4) WGMMA_SHARED(32, R16, "%16", "%17", "%18", "%19", "%20", ACC4(0));
  else if constexpr (C == 8) WGMMA_SHARED(64, R32, "%32", "%33", "%34", "%35", "%36", ACC8(0));
  else if constexpr (C == 16) WGMMA_SHARED(128, R64, "%64", "%65", "%66", "%67", "%68", ACC16(0));
  else if constexpr (C == 24) WGMMA_SHARED(192, R96, "%96", "%97", "%98", "%99", "%100", ACC16(0), ACC8(16));
  else if constexpr (C == 32) WGMMA_SHARED(256, R128, "%128", "%129", "%130", "%131", "%132", ACC16(0), ACC16(16));
  else static_assert(C < 0, "no wgmma instance for this number of columns");
}

#define WGMMA_E4M3(N, REGISTERS, A, B, FLAG, ...)                                                                              \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " FLAG ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" \
               REGISTERS "}, " A ", " B ", add, 1, 1;\n}"                                                                      \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// The same of 64 by 32 E4M3 numbers of `a` times 32 by 8 C of `b`; an operand's 32 numbers are in a row of its descriptor's box.
template <int C>
DEVICE void wgmma_e4m3(float (&acc)[C][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  if constexpr (C == 8) WGMMA_E4M3(64, R32, "%32", "%33", "%34", ACC8(0));
  else if constexpr (C == 16) WGMMA_E4M3(128, R64, "%64", "%65", "%66", ACC16(0));
  else if constexpr (C == 24) WGMMA_E4M3(192, R96, "%96", "%97", "%98", ACC16(0), ACC8(16));
  else static_assert(C < 0, "no wgmma instance for this number of columns");
}
#endif

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Later code reads the sums from here: otherwise ptxas moves parts of the epilogue up, and has each product wait for the one
// before it (the weights' gradient, Mixtral, 4096 rows per expert, H200: 15.8 ms for 12.6).
template <int C>
DEVICE void fence_sums(float (&acc)[C][4]) {
#ifndef CUDA_EMULATOR
#pragma unroll
  for (int i = 0; i < C; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(acc[i][j])::"memory");
#endif
}

// acc += (64, `valid`) E4M3 numbers of `a` times (`valid`, 8 C) of `b`, from boxes of 128; waits for the products. `valid` is 128 or a
// smaller multiple of 32. The tensor cores keep some 14 bits of sums: these are added up in float32. (4096 positive products: 6.7 % off.)
template <int C>
DEVICE void multiply_e4m3(float (&acc)[C][4], MatrixDescriptor a, MatrixDescriptor b, int valid) {
  constexpr int kPart = C > 24 ? C / 2 : C;  // more do not fit the registers beside acc
#pragma unroll
  for (int first = 0; first < C; first += kPart) {
    float sums[kPart][4];
    wgmma_fence();
    if (valid >= 128) {
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_e4m3(sums, a + 2 * step, b + first * 64 + 2 * step, step > 0);
    } else {
#pragma unroll 1
      for (int step = 0; 32 * step < valid; ++step) wgmma_e4m3(sums, a + 2 * step, b + first * 64 + 2 * step, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_sums(sums);
#pragma unroll
    for (int i = 0; i < 4 * kPart; ++i) acc[first + i / 4][i % 4] += sums[i / 4][i % 4];
  }
}

// Multiplies a warpgroup's sums by the scales of their rows and columns: the first of 64 rows and of 8 C columns, and how many exist.
template <int C>
DEVICE void scale_sums(float (&acc)[C][4], const float* of_rows, int rows, const float* of_columns, int columns) {
  const int lane = threadIdx.x % 32, row = static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane / 4;
  const float upper = row < rows ? of_rows[row] : 0.0f, lower = row + 8 < rows ? of_rows[row + 8] : 0.0f;
  float scales[C / 4];  // of columns 32 i + lane
#pragma unroll
  for (int i = 0; i < C / 4; ++i) scales[i] = 32 * i + lane < columns ? of_columns[32 * i + lane] : 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * C; ++i) {
    const float scale = broadcast(scales[i / 8], i / 2 % 4 * 8 + 2 * (lane % 4) + i % 2);
    acc[i / 2][i % 2] *= upper * scale, acc[i / 2][2 + i % 2] *= lower * scale;
  }
}
#endif
