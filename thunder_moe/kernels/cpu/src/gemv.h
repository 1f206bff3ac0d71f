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
// What gemv kernels ask of a number format, 128 k of a column at a time: Packed codes and their Scales. A step has
// kGroups groups of vectors; the sums of a group are multiplied by its vector of factors, and kSumScale multiplies the
// whole sum. Values are fp32, eight vectors of a step, in the order of spread_row; words are bf16, four vectors, in the
// order of permute_row. Decoding leaves codes in these orders, and activations follow them.
template <class Format>
struct Gemv;

template <>
struct Gemv<Nvfp4> {
  static constexpr int kGroups = 1;
  static constexpr float kSumScale = 256.f;
  struct Packed {
    __m512i codes;
  };
  static Packed load_codes(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
  static Packed load_codes(const uint8_t* from, int64_t left) {
    return {_mm512_maskz_loadu_epi8((__mmask64(1) << (left / 2)) - 1, from)};
  }
  static __m128i load_scales(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  static __m128i load_scales(const uint8_t* from, int64_t left) {
    return _mm_maskz_loadu_epi8(__mmask16((1u << (left / 16)) - 1), from);
  }

  __m512 values = _mm512_load_ps(kE2M1);
  __m512i words;  // bf16 of e2m1, twice
  Gemv() {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 32; ++i) table[i] = uint16_t(bits_of(kE2M1[i & 15]) >> 16);
    words = _mm512_load_si512(table);
  }

  // 64 bytes of codes are 16 words of eight codes: word w shifted right by 4 j holds code 8 w + j in its low bits, so
  // vpermps (it reads four bits) gives the values of codes j, 8 + j, 16 + j, ...
  struct Values {
    __m512i codes;
    __m512 table;
    Values(const Gemv& gemv, const Packed& packed, int) : codes(packed.codes), table(gemv.values) {}
    __m512 operator[](int j) const { return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * j), table); }
  };
  // Handles both columns at once: they share the conversion.
  static void factors_of_values(__m128i scale0, __m128i scale1, __m512 (&factor)[2][kGroups]) {
    const __m512i pairs = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512 both = e4m3_over_256(_mm256_cvtepi8_epi16(_mm_unpacklo_epi64(scale0, scale1)));
    factor[0][0] = _mm512_permutexvar_ps(pairs, both);
    factor[1][0] = _mm512_permutexvar_ps(_mm512_add_epi32(pairs, _mm512_set1_epi32(8)), both);
  }
  // 64 bytes of codes are 32 words of four codes: word w shifted right by 4 j holds code 4 w + j in its low bits, so
  // vpermw with the table repeated (it reads five bits) gives the values of codes j, 4 + j, 8 + j, ...
  void decode_words(const Packed& packed, __m512i (&out)[4]) const {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) out[j] = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed.codes, 4 * j), words);
  }
  static void factors_of_words(__m128i scale, __m512 (&factor)[kGroups]) {
    factor[0] = e4m3_over_256(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(scale, scale)));
  }
};

template <>
struct Gemv<Mxfp8> {
  static constexpr int kGroups = 2;
  static constexpr float kSumScale = 1.f;
  struct Packed {
    __m512i codes[2];
  };
  static Packed load_codes(const uint8_t* from) { return {{_mm512_loadu_si512(from), _mm512_loadu_si512(from + 64)}}; }
  static Packed load_codes(const uint8_t* from, int64_t left) {
    const __mmask64 all = ~__mmask64(0), some = left % 64 == 0 ? 0 : (__mmask64(1) << (left % 64)) - 1;
    return {{_mm512_maskz_loadu_epi8(left >= 64 ? all : some, from),
             left > 64 ? _mm512_maskz_loadu_epi8(some, from + 64) : _mm512_setzero_si512()}};
  }
  static __m128i load_scales(const uint8_t* from) { return _mm_loadu_si32(from); }
  static __m128i load_scales(const uint8_t* from, int64_t left) {
    return _mm_maskz_loadu_epi8(__mmask16((1u << (left / 32)) - 1), from);
  }

  E4M3Decoder decode;

  struct Values {
    E4M3Words words;
    Values(const Gemv& gemv, const Packed& packed, int group) : words(gemv.decode(packed.codes[group])) {}
    __m512 operator[](int j) const {
      const __m512i pair = j < 2 ? words.low : words.high;
      return _mm512_castsi512_ps(j % 2 == 0 ? _mm512_slli_epi32(pair, 16)
                                            : _mm512_and_si512(pair, _mm512_set1_epi32(int32_t(0xFFFF0000u))));
    }
  };
  // Eight lanes of each scale: its byte becomes the exponent. The least, 0 here, and NaN are left to exact.h.
  static void factors_of_words(__m128i scale, __m512 (&factor)[kGroups]) {
    const __m512i all = _mm512_broadcastd_epi32(scale);
    const __m512i first = _mm512_mask_mov_epi32(all, 0xFF00, _mm512_srli_epi32(all, 8));
    const __m512i mask = _mm512_set1_epi32(0xFF);
    factor[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(first, mask), 23));
    factor[1] = _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_and_si512(_mm512_srli_epi32(first, 16), mask), 23));
  }
  static void factors_of_values(__m128i scale0, __m128i scale1, __m512 (&factor)[2][kGroups]) {
    factors_of_words(scale0, factor[0]);
    factors_of_words(scale1, factor[1]);
  }
  void decode_words(const Packed& packed, __m512i (&out)[4]) const {
#pragma GCC unroll 2
    for (int group = 0; group < 2; ++group) {
      const E4M3Words words = decode(packed.codes[group]);
      out[2 * group] = words.low;
      out[2 * group + 1] = words.high;
    }
  }
};

// sums[row, column] of a task, two columns at a time, which share the loads of x. step(codes of 128 k of either column,
// their scales, x of these k, sums of both columns) adds products over kSumScale. So many k at a time that x stays in
// L1: 8 rows, (1536, 2048), Xeon without AMX: 0.97 ms against 1.40 ms.
template <class Format, int R, class Element, class F>
inline __attribute__((always_inline)) void walk_columns(const Problem& problem, const Task& task, const Element* x,
                                                        float (*sums)[kGemvCols], const F& step) {
  using G = Gemv<Format>;
  constexpr int64_t depth = (32 << 10) / int64_t(R * sizeof(Element)) / 128 * 128;
  constexpr int64_t code_step = Format::bytes(128), scale_step = 128 / Format::kBlock;
  const int64_t end = task.column + task.columns;
  std::fill(sums[0], sums[0] + R * kGemvCols, 0.f);
  for (int64_t first = 0; first < problem.k; first += depth, x += R * depth) {
    const int64_t count = std::min(depth, problem.k - first), whole = count / 128, left = count - 128 * whole;
    for (int64_t column = task.column; column < end; column += 2) {
      const int64_t columns[2] = {column, std::min(column + 1, end - 1)};
      const uint8_t *codes[2], *scale[2];
      __m512 sum[2][R];
      for (int c = 0; c < 2; ++c) {
        codes[c] = problem.codes(task.expert, columns[c]) + Format::bytes(first);
        scale[c] = problem.scales(task.expert, columns[c]) + first / Format::kBlock;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[c][r] = _mm512_setzero_ps();
      }
      for (int64_t i = 0; i < whole; ++i) {
        const uint8_t *codes0 = codes[0] + code_step * i, *codes1 = codes[1] + code_step * i;
#pragma GCC unroll 2
        for (int64_t line = 0; line < code_step; line += 64) {
          prefetch(codes0 + line);
          prefetch(codes1 + line);
        }
        step(G::load_codes(codes0), G::load_codes(codes1), G::load_scales(scale[0] + scale_step * i),
             G::load_scales(scale[1] + scale_step * i), x + 128 * R * i, sum);
      }
      if (left != 0)
        step(G::load_codes(codes[0] + code_step * whole, left), G::load_codes(codes[1] + code_step * whole, left),
             G::load_scales(scale[0] + scale_step * whole, left), G::load_scales(scale[1] + scale_step * whole, left),
             x + 128 * R * whole, sum);
      for (int c = 0; c < 2 && column + c < end; ++c)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sums[r][column + c - task.column] += _mm512_reduce_add_ps(sum[c][r]) * G::kSumScale;
    }
  }
}

// ---- fma ----

// [j, w] = x[8 w + j] of 128 k, as Gemv<Nvfp4>::Values.
template <class T>
void spread_row(Nvfp4, const T* x, int64_t k, int64_t rows, float* out) {
  for (int64_t base = 0; base < k; base += 128, out += 128 * rows) {
    const int64_t left = std::min<int64_t>(128, k - base);
    if (left < 128) std::fill(out, out + 128, 0.f);
    for (int64_t w = 0; w < left / 8; ++w)
      for (int64_t j = 0; j < 8; ++j) out[16 * j + w] = to_float(x[base + 8 * w + j]);
  }
}
// [group, half, odd, lane, i] = x[64 group + 16 lane + 8 half + 2 i + odd], as E4M3Words split into floats.
template <class T>
void spread_row(Mxfp8, const T* x, int64_t k, int64_t rows, float* out) {
  for (int64_t base = 0; base < k; base += 128, out += 128 * rows) {
    const int64_t left = std::min<int64_t>(128, k - base);
    if (left < 128) std::fill(out, out + 128, 0.f);
    for (int64_t eight = 0; eight < left / 8; ++eight)
      for (int64_t j = 0; j < 8; ++j)
        out[64 * (eight / 8) + 32 * (eight % 2) + 16 * (j % 2) + 4 * (eight / 2 % 4) + j / 2] =
            to_float(x[base + 8 * eight + j]);
  }
}

// R rows by two columns, which share the conversion of the scales. Up to four rows scales multiply the sums of 128 k;
// for more rows there are too few registers for these sums, so scales multiply the weights, which is exact.
template <class Format, int R>
void fma_task(const Problem& problem, const Task& task, float (*sums)[kGemvCols]) {
  using G = Gemv<Format>;
  constexpr bool scaled = R > 4;
  constexpr int vectors = 8 / G::kGroups;
  const float* x = problem.spread + task.permuted * round_up(problem.k, 128);
  const G gemv;
  const auto step = [&](const typename G::Packed& packed0, const typename G::Packed& packed1, __m128i scale0,
                        __m128i scale1, const float* from, __m512 (&sum)[2][R]) __attribute__((always_inline)) {
    __m512 factor[2][G::kGroups];
    G::factors_of_values(scale0, scale1, factor);
#pragma GCC unroll 2
    for (int group = 0; group < G::kGroups; ++group) {
      const typename G::Values values0(gemv, packed0, group), values1(gemv, packed1, group);
      const __m512 factor0 = factor[0][group], factor1 = factor[1][group];
      __m512 dot[2][R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2; ++c) dot[c][r] = scaled ? sum[c][r] : _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int j = 0; j < vectors; ++j) {
        __m512 weight0 = values0[j], weight1 = values1[j];
        if constexpr (scaled) weight0 = _mm512_mul_ps(weight0, factor0), weight1 = _mm512_mul_ps(weight1, factor1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512 row = _mm512_loadu_ps(from + 128 * r + 16 * (vectors * group + j));
          dot[0][r] = _mm512_fmadd_ps(weight0, row, dot[0][r]);
          dot[1][r] = _mm512_fmadd_ps(weight1, row, dot[1][r]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sum[0][r] = scaled ? dot[0][r] : _mm512_fmadd_ps(dot[0][r], factor0, sum[0][r]);
        sum[1][r] = scaled ? dot[1][r] : _mm512_fmadd_ps(dot[1][r], factor1, sum[1][r]);
      }
    }
  };
  walk_columns<Format, R>(problem, task, x, sums, step);
}

// No template over the dtype of rows: compiled once for all.
template <class Format>
__attribute__((noinline)) void fma_sums(const Problem& problem, const Task& task, float (*sums)[kGemvCols]) {
  switch (task.rows) {
    case 1:
      return fma_task<Format, 1>(problem, task, sums);
    case 2:
      return fma_task<Format, 2>(problem, task, sums);
    case 3:
      return fma_task<Format, 3>(problem, task, sums);
    case 4:
      return fma_task<Format, 4>(problem, task, sums);
    case 5:
      return fma_task<Format, 5>(problem, task, sums);
    case 6:
      return fma_task<Format, 6>(problem, task, sums);
    case 7:
      return fma_task<Format, 7>(problem, task, sums);
    case 8:
      return fma_task<Format, 8>(problem, task, sums);
  }
}

template <class Format, class T>
void run_fma(const Problem& problem, const Task& task) {
  float sums[kFmaRows][kGemvCols];
  fma_sums<Format>(problem, task, sums);
  write_rows<Format, T>(problem, task, 0, task.rows, sums[0], kGemvCols);
}

// ---- dots ----

#if defined(HAS_AVX512_BF16)
// [j, w] = x[4 w + j] of 128 k, as Gemv<Nvfp4>::decode_words.
void permute_row(Nvfp4, const bf16* x, int64_t k, int64_t rows, bf16* out) {
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

// [group, half, lane, i] = x[64 group + 16 lane + 8 half + i], as E4M3Words.
void permute_row(Mxfp8, const bf16* x, int64_t k, int64_t rows, bf16* out) {
  for (int64_t base = 0; base < k; base += 128, out += 128 * rows)
    for (int64_t eight = 0; eight < 16; ++eight) {
      bf16* to = out + 64 * (eight / 8) + 32 * (eight % 2) + 8 * (eight / 2 % 4);
      if (base + 8 * eight < k)
        std::memcpy(to, x + base + 8 * eight, 16);
      else
        std::memset(static_cast<void*>(to), 0, 16);
    }
}

template <class Format, int R>
void dots_task(const Problem& problem, const Task& task, float (*sums)[kGemvCols]) {
  using G = Gemv<Format>;
  constexpr int vectors = 4 / G::kGroups;
  const bf16* x = problem.permuted + task.permuted * round_up(problem.k, 128);
  const G gemv;
  const auto step = [&](const typename G::Packed& packed0, const typename G::Packed& packed1, __m128i scale0,
                        __m128i scale1, const bf16* from, __m512 (&sum)[2][R]) __attribute__((always_inline)) {
    __m512i weight[2][4];
    gemv.decode_words(packed0, weight[0]);
    gemv.decode_words(packed1, weight[1]);
    __m512 factor[2][G::kGroups];
    G::factors_of_words(scale0, factor[0]);
    G::factors_of_words(scale1, factor[1]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int group = 0; group < G::kGroups; ++group) {
        __m512 dot0 = _mm512_setzero_ps(), dot1 = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int j = group * vectors; j < (group + 1) * vectors; ++j) {
          const __m512bh row = load(from + 128 * r + 32 * j);
          dot0 = _mm512_dpbf16_ps(dot0, (__m512bh)weight[0][j], row);
          dot1 = _mm512_dpbf16_ps(dot1, (__m512bh)weight[1][j], row);
        }
        sum[0][r] = _mm512_fmadd_ps(dot0, factor[0][group], sum[0][r]);
        sum[1][r] = _mm512_fmadd_ps(dot1, factor[1][group], sum[1][r]);
      }
  };
  walk_columns<Format, R>(problem, task, x, sums, step);
}

// Rows of bf16, which are kParts<T> times as many as of T.
template <class Format>
__attribute__((noinline)) void dots_sums(const Problem& problem, const Task& task, int64_t rows,
                                         float (*sums)[kGemvCols]) {
  switch (rows) {
    case 1:
      return dots_task<Format, 1>(problem, task, sums);
    case 2:
      return dots_task<Format, 2>(problem, task, sums);
    case 3:
      return dots_task<Format, 3>(problem, task, sums);
    case 4:
      return dots_task<Format, 4>(problem, task, sums);
    case 5:
      return dots_task<Format, 5>(problem, task, sums);
    case 6:
      return dots_task<Format, 6>(problem, task, sums);
    case 7:
      return dots_task<Format, 7>(problem, task, sums);
    case 8:
      return dots_task<Format, 8>(problem, task, sums);
  }
}

template <class Format, class T>
void run_dots(const Problem& problem, const Task& task) {
  float sums[kDotsRows][kGemvCols];
  const int64_t rows = task.rows, all = rows * kParts<T>;
  dots_sums<Format>(problem, task, all, sums);
  for (int64_t r = rows; r < all; ++r)
    for (int64_t c = 0; c < task.columns; ++c) sums[r - rows][c] += sums[r][c];
  write_rows<Format, T>(problem, task, 0, rows, sums[0], kGemvCols);
}
#endif
#endif

}  // namespace
