// Panels of a CPU grouped GEMM: 64 columns of weights, decoded to bf16 in the order of matrix units, times oneDNN's
// brgemm. Included by grouped_mm.cpp and dgrad.cpp; calls exact.h and at::native::cpublas::brgemm, which takes AMX
// where the CPU has it and AVX512-BF16 elsewhere.
#pragma once
#include "exact.h"

#if defined(HAS_AVX512_BF16)
#include <ATen/native/CPUBlas.h>
#if defined(CPUBLAS_BRGEMM_BF16BF16F32)
#define HAS_BRGEMM 1
#endif
#endif

namespace {

constexpr int64_t kPanelCols = 64;       // the widest row of pairs that brgemm takes
constexpr int64_t kPanelTaskRows = 512;  // rows of one task; more rows decode the panel again

#if defined(HAS_BRGEMM)
constexpr int64_t kPanelBytes = 512 << 10;  // of K at a time: a panel stays in L2, see panel_depth
constexpr int64_t kBlockRows = 64;          // rows of one brgemm
constexpr int64_t kAhead = 512;             // weights of a column between a prefetch and its use

inline int64_t panel_width(int64_t columns) { return std::min(kPanelCols, (columns + 15) / 16 * 16); }
inline bool has_matrix_unit() {
  static const bool found = at::native::cpublas::could_pack(at::kBFloat16);
  return found;
}
// In L1, with 32 KiB, the calls of brgemm cost more than that saves: 8 rows of 24 experts (1536, 2048) on a Xeon with AMX
// 10.9 ms against 7.2 ms.
inline int64_t panel_depth(int64_t k) { return std::min(k, kPanelBytes / (kPanelCols * 2) / 128 * 128); }

// brgemm makes a kernel per number of rows and thread: few numbers make few kernels. A matrix unit has 16 rows anyway.
inline int64_t padded_rows(int64_t rows) {
  const int64_t step = has_matrix_unit() ? 16 : 4;
  return std::min(kBlockRows, (rows + step - 1) / step * step);
}

// acc (rows, width) (+)= a (rows, k) panel (k, width).
inline void multiply_panel(int64_t rows, int64_t width, int64_t k, const bf16* a, int64_t lda, const bf16* panel,
                           bool add, float* acc) {
  at::native::cpublas::brgemm(rows, width, k, lda, width, width, add, reinterpret_cast<const at::BFloat16*>(a),
                              reinterpret_cast<const at::BFloat16*>(panel), acc);
}

inline void transpose_words(__m512i (&r)[16]) {  // 16 x 16 of 32 bits
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// 128 k (fewer: count, a multiple of 16) of 16 columns: the scales over 256, [block][column].
inline void gather_scales(const uint8_t* scale, int64_t stride, float (*out)[16]) {
  const __m512i at = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(stride));
  const __m512i low = _mm512_i64gather_epi64(at, scale, 1);
  const __m512i high = _mm512_i64gather_epi64(at, scale + 8 * stride, 1);
  for (int b = 0; b < 8; ++b) {
    const __m128i bytes = _mm_unpacklo_epi64(_mm512_cvtepi64_epi8(_mm512_srli_epi64(low, 8 * b)),
                                             _mm512_cvtepi64_epi8(_mm512_srli_epi64(high, 8 * b)));
    _mm512_store_ps(out[b], e4m3_over_256(_mm256_cvtepi8_epi16(bytes)));
  }
}

// Up to 16 columns of weights without their global scale, exact, of `count` k, as pairs of k: out[k / 2][column][2],
// `width` columns apart; columns from `columns` on are zeros. A byte of codes is a pair: bytes are transposed, then
// decoded, in fp32, whose upper halves are the bf16. Zen 5, in L2: 20 to 28 weights per ns, as dequantize_column.
void decode_pairs(Nvfp4, const uint8_t* codes, int64_t codes_stride, const uint8_t* scale, int64_t scale_stride,
                  int64_t columns, int64_t count, int64_t width, bf16* out) {
  const __m512 values = _mm512_mul_ps(_mm512_load_ps(kE2M1), _mm512_set1_ps(256.f));
  for (int64_t base = 0; base < count; base += 128) {
    const int64_t left = std::min<int64_t>(128, count - base);
    const __mmask64 mask = left == 128 ? ~__mmask64(0) : (__mmask64(1) << (left / 2)) - 1;
    alignas(64) float factor[8][16];
    if (columns == 16 && left == 128) {
      gather_scales(scale + base / 16, scale_stride, factor);
    } else {  // gathering would read past the end
      uint8_t some[16][8] = {};
      for (int64_t c = 0; c < columns; ++c) std::memcpy(some[c], scale + c * scale_stride + base / 16, left / 16);
      gather_scales(some[0], 8, factor);
    }
    // No prefetcher of the CPU follows 16 columns. The next codes are in the same columns or in the next 16.
    const bool wrap = base + kAhead >= count;
    const int64_t next_k = base + kAhead - (wrap ? count : 0), behind = wrap ? 16 : 0;
    const uint8_t* next_codes = codes + behind * codes_stride + next_k / 2;
    const uint8_t* next_scale = scale + behind * scale_stride + next_k / 16;
    __m512i words[16];  // before: four bytes of a column; after: the bytes of 16 columns
    for (int c = 0; c < 16; ++c) {
      words[c] = _mm512_setzero_si512();
      if (c >= columns) continue;
      __builtin_prefetch(next_codes + c * codes_stride);
      if (base % 512 == 0) __builtin_prefetch(next_scale + c * scale_stride);
      words[c] = _mm512_maskz_loadu_epi8(mask, codes + c * codes_stride + base / 2);
    }
    transpose_words(words);
    bf16* to = out + base * width;
    for (int64_t b = 0; b < left / 16; ++b) {
      const __m512 scales = _mm512_load_ps(factor[b]);
      for (int64_t half = 0; half < 2; ++half)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const __m512i word = words[2 * b + half];
          const __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(word, 8 * j), values);  // reads 4 bits
          const __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(word, 8 * j + 4), values);
          const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(even, scales)), 16);
          const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scales));
          _mm512_storeu_si512(to + (8 * b + 4 * half + j) * 2 * width, _mm512_or_si512(low, high));
        }
    }
  }
}

// The same of MXFP8: columns are decoded, then transposed by pairs; `count` is a multiple of 32.
void decode_pairs(Mxfp8, const uint8_t* codes, int64_t codes_stride, const uint8_t* scale, int64_t scale_stride,
                  int64_t columns, int64_t count, int64_t width, bf16* out) {
  const E4M3Decoder decode;
  for (int64_t base = 0; base < count; base += 64) {
    const bool both = count - base >= 64, wrap = base + kAhead >= count;
    const int64_t next_k = base + kAhead - (wrap ? count : 0), behind = wrap ? 16 : 0;
    const uint8_t* next = codes + behind * codes_stride + next_k;
    __m512i first[16], second[16];
    for (int c = 0; c < 16; ++c) {
      first[c] = second[c] = _mm512_setzero_si512();
      if (c >= columns) continue;
      __builtin_prefetch(next + c * codes_stride);
      const __m512i packed =
          _mm512_maskz_loadu_epi8(both ? ~__mmask64(0) : 0xFFFFFFFFu, codes + c * codes_stride + base);
      const E4M3Words words = in_order(decode, packed);
      const uint8_t* scales = scale + c * scale_stride + base / 32;
      first[c] = times_power(words.low, scales[0]);
      if (both) second[c] = times_power(words.high, scales[1]);
    }
    bf16* to = out + base * width;
    transpose_words(first);
    for (int64_t pair = 0; pair < 16; ++pair) _mm512_storeu_si512(to + 2 * pair * width, first[pair]);
    if (!both) continue;
    transpose_words(second);
    for (int64_t pair = 0; pair < 16; ++pair) _mm512_storeu_si512(to + 2 * (16 + pair) * width, second[pair]);
  }
}

// A copy of rows [first, last) for brgemm, write(row, part 0, part 1) of each. brgemm reads up to kBlockRows - 1 rows
// behind an expert's rows; their products are not used. The distance of rows is not a power of two: otherwise the 16
// rows of a tile would fall into one set of the L1 cache.
template <class T, class F>
Parts copy_parts(int64_t first, int64_t last, int64_t k, Scratch& memory, const F& write) {
  const int64_t rows = last - first + kBlockRows, stride = (k + 31) / 32 * 32 + 32;
  bf16* parts = reinterpret_cast<bf16*>(memory.get(size_t(kParts<T> * rows * stride) * sizeof(bf16)));
  for_each(last - first, [&](int64_t row) { write(first + row, parts + row * stride, parts + (rows + row) * stride); });
  return {parts, first, rows, stride};
}

#endif

}  // namespace
