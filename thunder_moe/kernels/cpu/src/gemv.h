// The gemv kernels of a CPU grouped GEMM, for few rows: codes become numbers in registers and are multiplied at once; a
// weight is read once and never stored. Included by grouped_mm.cpp; calls exact.h and register_tiles.h.
//   dots  16-bit rows by bf16 dot products, which are fast on AMD's CPUs
//   fma   rows of any dtype by fp32 multiply-adds, which are faster on Intel's (per 32 products: 1 cycle, dots 2.5)
#pragma once
#include "exact.h"
#include "register_tiles.h"

namespace {

constexpr int64_t kGemvCols = 32;  // outputs per task
constexpr int64_t kDotsRows = 8;   // rows at a time: 2 x 8 sums + 2 x 4 weights + 2 dots of 32 registers
constexpr int64_t kFmaRows = 8;    // 2 x 8 sums + 2 weights + 2 factors

#if defined(HAS_AVX512)
// sums[row, column] of a task, two columns at a time, which share the loads of x. step(codes of 128 k of either column,
// their eight scales, x of these k, sums of both columns) adds products over 256. So many k at a time that x stays in
// L1: 8 rows, (1536, 2048), Xeon without AMX: 0.97 ms against 1.40 ms.
template <int R, class Element, class F>
inline __attribute__((always_inline)) void walk_columns(const Problem& problem, const Task& task, const Element* x,
                                                        float (&sums)[R][kGemvCols], const F& step) {
  constexpr int64_t depth = (32 << 10) / int64_t(R * sizeof(Element)) / 128 * 128;
  const int64_t end = task.column + task.columns;
  std::fill(sums[0], sums[0] + R * kGemvCols, 0.f);
  for (int64_t first = 0; first < problem.k; first += depth, x += R * depth) {
    const int64_t count = std::min(depth, problem.k - first), whole = count / 128, left = count - 128 * whole;
    const __mmask64 code_mask = (__mmask64(1) << (left / 2)) - 1;
    const __mmask16 scale_mask = __mmask16((1u << (left / 16)) - 1);
    for (int64_t column = task.column; column < end; column += 2) {
      const int64_t columns[2] = {column, std::min(column + 1, end - 1)};
      const uint8_t *codes[2], *scale[2];
      __m512 sum[2][R];
      for (int c = 0; c < 2; ++c) {
        codes[c] = problem.codes(task.expert, columns[c]) + first / 2;
        scale[c] = problem.scales(task.expert, columns[c]) + first / 16;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[c][r] = _mm512_setzero_ps();
      }
      const auto bytes = [](const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); };
      for (int64_t i = 0; i < whole; ++i) {
        prefetch(codes[0] + 64 * i);
        prefetch(codes[1] + 64 * i);
        step(_mm512_loadu_si512(codes[0] + 64 * i), _mm512_loadu_si512(codes[1] + 64 * i), bytes(scale[0] + 8 * i),
             bytes(scale[1] + 8 * i), x + 128 * R * i, sum);
      }
      if (left != 0)
        step(_mm512_maskz_loadu_epi8(code_mask, codes[0] + 64 * whole),
             _mm512_maskz_loadu_epi8(code_mask, codes[1] + 64 * whole),
             _mm_maskz_loadu_epi8(scale_mask, scale[0] + 8 * whole),
             _mm_maskz_loadu_epi8(scale_mask, scale[1] + 8 * whole), x + 128 * R * whole, sum);
      for (int c = 0; c < 2 && column + c < end; ++c)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][column + c - task.column] += _mm512_reduce_add_ps(sum[c][r]) * 256.f;
    }
  }
}

// ---- fma ----

// 64 bytes of codes are 16 words of eight codes: word w shifted right by 4 j holds code 8 w + j in its low bits, so
// vpermps (it reads four bits) gives the values of codes j, 8 + j, 16 + j, ... Activations are stored in that order:
// [j, w] = x[8 w + j].
template <class T>
void spread_row(const T* x, int64_t k, int64_t rows, float* out) {
  for (int64_t base = 0; base < k; base += 128, out += 128 * rows) {
    const int64_t left = std::min<int64_t>(128, k - base);
    if (left < 128) std::fill(out, out + 128, 0.f);
    for (int64_t w = 0; w < left / 8; ++w)
      for (int64_t j = 0; j < 8; ++j) out[16 * j + w] = to_float(x[base + 8 * w + j]);
  }
}

// R rows by two columns, which share the conversion of the scales. Up to four rows scales multiply the sums of 128 k;
// for more rows registers for those sums would be missing, and scales multiply the weights, which is exact.
template <class T, int R>
void fma_task(const Problem& problem, const Task& task) {
  constexpr bool scaled = R > 4;
  const float* x = problem.spread + task.permuted * round_up(problem.k, 128);
  const __m512 table = _mm512_load_ps(kE2M1);
  const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i other_pairs = _mm512_add_epi32(pairs, _mm512_set1_epi32(8));
  const auto step = [&](__m512i packed0, __m512i packed1, __m128i scale0, __m128i scale1, const float* from,
                        __m512 (&sum)[2][R]) __attribute__((always_inline)) {
    const __m512 factors = scales_over_256(_mm256_cvtepi8_epi16(_mm_unpacklo_epi64(scale0, scale1)));
    const __m512 factor0 = _mm512_permutexvar_ps(pairs, factors);
    const __m512 factor1 = _mm512_permutexvar_ps(other_pairs, factors);
    __m512 dot[2][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) dot[c][r] = scaled ? sum[c][r] : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __m512 weight0 = _mm512_permutexvar_ps(_mm512_srli_epi32(packed0, 4 * j), table);
      __m512 weight1 = _mm512_permutexvar_ps(_mm512_srli_epi32(packed1, 4 * j), table);
      if constexpr (scaled) weight0 = _mm512_mul_ps(weight0, factor0), weight1 = _mm512_mul_ps(weight1, factor1);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512 row = _mm512_loadu_ps(from + 128 * r + 16 * j);
        dot[0][r] = _mm512_fmadd_ps(weight0, row, dot[0][r]);
        dot[1][r] = _mm512_fmadd_ps(weight1, row, dot[1][r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[0][r] = scaled ? dot[0][r] : _mm512_fmadd_ps(dot[0][r], factor0, sum[0][r]);
      sum[1][r] = scaled ? dot[1][r] : _mm512_fmadd_ps(dot[1][r], factor1, sum[1][r]);
    }
  };
  float sums[R][kGemvCols];
  walk_columns<R>(problem, task, x, sums, step);
  write_rows<T>(problem, task, 0, R, sums[0], kGemvCols);
}

template <class T>
void run_fma(const Problem& problem, const Task& task) {
  switch (task.rows) {
    case 1:
      return fma_task<T, 1>(problem, task);
    case 2:
      return fma_task<T, 2>(problem, task);
    case 3:
      return fma_task<T, 3>(problem, task);
    case 4:
      return fma_task<T, 4>(problem, task);
    case 5:
      return fma_task<T, 5>(problem, task);
    case 6:
      return fma_task<T, 6>(problem, task);
    case 7:
      return fma_task<T, 7>(problem, task);
    case 8:
      return fma_task<T, 8>(problem, task);
  }
}

// ---- dots ----

#if defined(HAS_AVX512_BF16)
// 64 bytes of codes are 32 words of four codes: word w shifted right by 4 j holds code 4 w + j in its low bits, so
// vpermw with the table repeated (it reads five bits) gives the values of codes j, 4 + j, 8 + j, ... Activations are
// stored in that order: [j, w] = x[4 w + j].
void permute_row(const bf16* x, int64_t k, int64_t rows, bf16* out) {
  for (int64_t base = 0; base < k; base += 128, out += 128 * rows) {
    for (int64_t part = 0; part < 4; ++part) {
      const int64_t left = std::min<int64_t>(32, std::max<int64_t>(0, k - base - 32 * part));
      const __mmask32 mask = left == 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
      const __m512i values = _mm512_maskz_loadu_epi16(mask, x + base + 32 * part);
      for (int j = 0; j < 4; ++j)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 32 * j + 8 * part),
                         _mm512_cvtepi64_epi16(_mm512_srli_epi64(values, 16 * j)));
    }
  }
}

struct GemvTables {
  __m512i values;  // bf16 of e2m1, twice
  GemvTables() {
    alignas(64) uint16_t words[32];
    for (int i = 0; i < 32; ++i) words[i] = uint16_t(bits_of(kE2M1[i & 15]) >> 16);
    values = _mm512_load_si512(words);
  }
};

// The eight block scales of 128 codes over 256, each in two lanes.
inline __m512 block_scales(__m128i scale) {
  return scales_over_256(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(scale, scale)));
}

// R rows of bf16, which are kParts<T> times as many as of T.
template <class T, int R>
void dots_task(const Problem& problem, const Task& task) {
  const bf16* x = problem.permuted + task.permuted * round_up(problem.k, 128);
  const __m512i table = GemvTables().values;
  const auto step = [&](__m512i packed0, __m512i packed1, __m128i scale0, __m128i scale1, const bf16* from,
                        __m512 (&sum)[2][R]) __attribute__((always_inline)) {
    __m512bh weight[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      weight[0][j] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(packed0, 4 * j), table);
      weight[1][j] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(packed1, 4 * j), table);
    }
    const __m512 factor0 = block_scales(scale0), factor1 = block_scales(scale1);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      __m512 dot0 = _mm512_setzero_ps(), dot1 = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512bh row = load(from + 128 * r + 32 * j);
        dot0 = _mm512_dpbf16_ps(dot0, weight[0][j], row);
        dot1 = _mm512_dpbf16_ps(dot1, weight[1][j], row);
      }
      sum[0][r] = _mm512_fmadd_ps(dot0, factor0, sum[0][r]);
      sum[1][r] = _mm512_fmadd_ps(dot1, factor1, sum[1][r]);
    }
  };
  float sums[R][kGemvCols];
  walk_columns<R>(problem, task, x, sums, step);
  constexpr int rows = R / int(kParts<T>);
  for (int r = rows; r < R; ++r)
    for (int64_t c = 0; c < task.columns; ++c) sums[r - rows][c] += sums[r][c];
  write_rows<T>(problem, task, 0, rows, sums[0], kGemvCols);
}

template <class T>
void run_dots(const Problem& problem, const Task& task) {
  switch (task.rows * kParts<T>) {
    case 1:
      return dots_task<T, 1>(problem, task);
    case 2:
      return dots_task<T, 2>(problem, task);
    case 3:
      return dots_task<T, 3>(problem, task);
    case 4:
      return dots_task<T, 4>(problem, task);
    case 5:
      return dots_task<T, 5>(problem, task);
    case 6:
      return dots_task<T, 6>(problem, task);
    case 7:
      return dots_task<T, 7>(problem, task);
    case 8:
      return dots_task<T, 8>(problem, task);
  }
}
#endif
#endif

}  // namespace
