// Decodes weights on a CPU, a struct per number format: codes times block scales -> fp32, or bf16 where the CPU
// multiplies that. Included by exact.h; calls the instruction sets that -march=native finds, with plain C++ elsewhere.
//   Nvfp4  E2M1 codes, two in a byte, E4M3 scales per 16
//   Mxfp8  E4M3 codes, E8M0 scales (powers of two) per 32
#pragma once
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#if defined(__AVX512BF16__)
#define HAS_AVX512_BF16 1
#endif
#endif

namespace {

#if defined(HAS_AVX512)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int kTileCols = 4;  // columns of weights that a slice interleaves

alignas(64) constexpr float kE2M1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                         -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
struct Tables {
  float e4m3[256];     // every float8_e4m3fn, NaN included
  float e8m0[256];     // every float8_e8m0fnu: powers of two, the least subnormal, and NaN
  float pair[256][2];  // a byte of qdata: low nibble first
  Tables() {
    for (int byte = 0; byte < 256; ++byte) {
      const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
      const float magnitude = (byte & 127) == 127 ? std::numeric_limits<float>::quiet_NaN()
                              : exponent == 0     ? std::ldexp(float(mantissa), -9)
                                                  : std::ldexp(float(8 + mantissa), exponent - 10);
      e4m3[byte] = byte & 128 ? -magnitude : magnitude;
      e8m0[byte] = byte == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.f, byte - 127);
      pair[byte][0] = kE2M1[byte & 15];
      pair[byte][1] = kE2M1[byte >> 4];
    }
  }
};
const Tables kTables;

// Weights are read once, in order. 57 MB of them, one thread, one row per expert: 2.0 ms against 5.8 ms without.
inline void prefetch(const uint8_t* codes) { __builtin_prefetch(codes + 4096); }

#if defined(HAS_AVX512)
// 16 words, an e4m3 sign-extended in each -> the numbers divided by 256: shifted left by 7 it is an fp16, subnormals
// too. NaN stays NaN.
inline __m512 e4m3_over_256(__m256i words) {
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(int16_t(0xBFFF)));
  const __mmask16 nan =
      _mm256_cmpeq_epi16_mask(_mm256_and_si256(words, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7F));
  return _mm512_mask_mov_ps(_mm512_cvtph_ps(half), nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}
#endif

// The interface of a number format: 16 codes decoded to fp32, and properties of weights without their global scale.
struct Nvfp4 {
  static constexpr int64_t kBlock = 16;  // weights that share a scale
  static constexpr int64_t bytes(int64_t weights) { return weights / 2; }
  static float scale(uint8_t byte) { return kTables.e4m3[byte]; }

#if defined(HAS_AVX512)
  static __m512 values(const uint8_t* codes) {
    const __m512i dword = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i packed = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    const __m512i nibbles =
        _mm512_srlv_epi32(_mm512_permutexvar_epi32(dword, packed), shift);  // vpermps reads the low 4 bits only
    return _mm512_permutexvar_ps(nibbles, _mm512_load_ps(kE2M1));
  }
#elif defined(__AVX2__)
  static void decode(const uint8_t* codes, float factor, float* out) {
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256 magnitudes = _mm256_load_ps(kE2M1);
    for (int half = 0; half < 2; ++half) {
      int32_t packed;
      std::memcpy(&packed, codes + 4 * half, 4);
      const __m256i nibbles = _mm256_srlv_epi32(_mm256_set1_epi32(packed), shift);  // vpermps reads the low 3 bits only
      const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(nibbles, _mm256_set1_epi32(8)), 28);
      const __m256 value = _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, nibbles), _mm256_castsi256_ps(sign));
      _mm256_storeu_ps(out + 8 * half, _mm256_mul_ps(value, _mm256_set1_ps(factor)));
    }
  }
#else
  static void decode(const uint8_t* codes, float factor, float* out) {
    for (int byte = 0; byte < 8; ++byte) {
      out[2 * byte] = kTables.pair[codes[byte]][0] * factor;
      out[2 * byte + 1] = kTables.pair[codes[byte]][1] * factor;
    }
  }
#endif
};

struct Mxfp8 {
  static constexpr int64_t kBlock = 32;
  static constexpr int64_t bytes(int64_t weights) { return weights; }
  static float scale(uint8_t byte) { return kTables.e8m0[byte]; }

#if defined(HAS_AVX512)
  static __m512 values(const uint8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    return _mm512_mul_ps(e4m3_over_256(_mm256_cvtepi8_epi16(bytes)), _mm512_set1_ps(256.f));
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static void decode(const uint8_t* codes, float factor, float* out) {  // as e4m3_over_256
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i magnitude = _mm256_set1_epi16(0x7F);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(words, magnitude), magnitude);
    const __m256i shifted = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(int16_t(0xBFFF)));
    const __m256i half = _mm256_or_si256(shifted, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
    const __m128i parts[2] = {_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)};
    for (int i = 0; i < 2; ++i) {
      const __m256 value = _mm256_mul_ps(_mm256_cvtph_ps(parts[i]), _mm256_set1_ps(256.f));
      _mm256_storeu_ps(out + 8 * i, _mm256_mul_ps(value, _mm256_set1_ps(factor)));
    }
  }
#else
  static void decode(const uint8_t* codes, float factor, float* out) {
    for (int i = 0; i < 16; ++i) out[i] = kTables.e4m3[codes[i]] * factor;
  }
#endif
};

// 16 codes times one factor.
template <class Format>
inline void dequantize_block(const uint8_t* codes, float factor, float* out) {
#if defined(HAS_AVX512)
  _mm512_storeu_ps(out, _mm512_mul_ps(Format::values(codes), _mm512_set1_ps(factor)));
#else
  Format::decode(codes, factor, out);
#endif
}
// The factor of the 16 weights of `block`.
template <class Format>
inline float block_scale(const uint8_t* scale, int64_t block) {
  return Format::scale(scale[16 * block / Format::kBlock]);
}

// One column of a slice: a row of weights without its global scale, exact, zero from k to padded. A slice interleaves
// four columns: one vector of each in turn, so that a register tile reads one stream: 29.2 ms against 31.0 ms at 64
// rows, (1536, 2048), one thread.
template <class Format>
void dequantize_column(Format, const uint8_t* codes, const uint8_t* scale, int64_t k, int64_t padded, float* out) {
  for (int64_t block = 0; block < padded / 16; ++block) {
    const uint8_t* from = codes + block * Format::bytes(16);
    if (Format::bytes(16 * block) % 64 == 0) prefetch(from);
    alignas(64) float values[16] = {};
    if (block < k / 16) dequantize_block<Format>(from, block_scale<Format>(scale, block), values);
    for (int64_t i = 0; i < 16; i += kLanes)
      std::memcpy(out + kTileCols * (16 * block + i), values + i, kLanes * sizeof(float));
  }
}

// A 16-bit float as a sum of bf16: itself, or high + low, which have 8 and 3 of fp16's 11 bits. Where high is not
// finite, low is 0.
template <class T>
constexpr int64_t kParts = std::is_same<T, fp16>::value ? 2 : 1;
inline void split(bf16 from, bf16* high, bf16*) { *high = from; }
inline void split(fp16 from, bf16* high, bf16* low) {
  const float value = to_float(from);
  const bool finite = (from.bits & 0x7C00) != 0x7C00;
  *high = finite ? bf16{uint16_t(bits_of(value) >> 16)} : from_float<bf16>(value);
  *low = bf16{uint16_t(finite ? bits_of(value - to_float(*high)) >> 16 : 0)};
}

#if defined(HAS_AVX512)
// 64 e4m3 -> bf16, exact: low has the values of bytes 0 to 7 of each 16 bytes, high the values of bytes 8 to 15.
struct E4M3Words {
  __m512i low, high;
};
#if defined(__AVX512VBMI__)
struct E4M3Decoder {  // vpermi2b reads seven bits, all but the sign
  __m512i low_bytes[2], high_bytes[2];
  E4M3Decoder() {
    alignas(64) uint8_t low[128], high[128];
    for (int code = 0; code < 128; ++code) {
      const uint32_t bits = bits_of(kTables.e4m3[code]);
      low[code] = uint8_t(bits >> 16);
      high[code] = uint8_t(bits >> 24);
    }
    for (int half = 0; half < 2; ++half) {
      low_bytes[half] = _mm512_load_si512(low + 64 * half);
      high_bytes[half] = _mm512_load_si512(high + 64 * half);
    }
  }
  E4M3Words operator()(__m512i codes) const {
    const __m512i low = _mm512_permutex2var_epi8(low_bytes[0], codes, low_bytes[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high_bytes[0], codes, high_bytes[1]);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), 0xF8);  // a | (b & c)
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }
};
#else
struct E4M3Decoder {
  __m512i subnormals;
  E4M3Decoder() {
    alignas(64) uint16_t words[32] = {};
    for (int code = 0; code < 8; ++code) words[code] = uint16_t(bits_of(kTables.e4m3[code]) >> 16);
    subnormals = _mm512_load_si512(words);
  }
  __m512i decode(__m512i shifted) const {  // the codes in the upper halves of words
    const __m512i sign = _mm512_and_si512(shifted, _mm512_set1_epi16(int16_t(0x8000)));
    const __m512i code = _mm512_and_si512(_mm512_srli_epi16(shifted, 8), _mm512_set1_epi16(0x7F));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_cmplt_epu16_mask(code, _mm512_set1_epi16(8));
    value = _mm512_mask_permutexvar_epi16(value, small, code, subnormals);
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(code, _mm512_set1_epi16(0x7F));
    return _mm512_or_si512(_mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7FC0)), sign);
  }
  E4M3Words operator()(__m512i codes) const {
    const __m512i zero = _mm512_setzero_si512();
    return {decode(_mm512_unpacklo_epi8(zero, codes)), decode(_mm512_unpackhi_epi8(zero, codes))};
  }
};
#endif

// 64 e4m3 in order: bf16 of codes 0 to 31, then of 32 to 63.
inline E4M3Words in_order(const E4M3Decoder& decode, __m512i codes) {
  return decode(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes));
}
// e4m3 in bf16 times 2^(scale - 127), by the exponent; 0 and NaN stay. Right where all results are normal.
inline __m512i times_power(__m512i words, uint8_t scale) {
  const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF)), one = _mm512_set1_epi16(1);
  const __mmask32 numbers =
      _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, one), _mm512_set1_epi16(0x7F80 - 1));
  return _mm512_mask_add_epi16(words, numbers, words, _mm512_set1_epi16(int16_t((int(scale) - 127) * 128)));
}
#endif

#if defined(HAS_AVX512_BF16)
void dequantize_column(Mxfp8, const uint8_t* codes, const uint8_t* scale, int64_t k, int64_t padded, bf16* out) {
  const E4M3Decoder decode;
  for (int64_t base = 0; base < padded; base += 64) {
    prefetch(codes + base);
    const bool both = padded - base >= 64;  // padded is k, a multiple of 32
    const __m512i packed = _mm512_maskz_loadu_epi8(both ? ~__mmask64(0) : 0xFFFFFFFFu, codes + base);
    const E4M3Words words = in_order(decode, packed);
    _mm512_storeu_si512(out + kTileCols * base, times_power(words.low, scale[base / 32]));
    if (both) _mm512_storeu_si512(out + kTileCols * (base + 32), times_power(words.high, scale[base / 32 + 1]));
  }
}

// Two blocks at a time: vpermw in a table of 32 words, the first block's sixteen values, then the second block's.
void dequantize_column(Nvfp4, const uint8_t* codes, const uint8_t* scale, int64_t k, int64_t padded, bf16* out) {
  alignas(64) uint16_t source[32], shift[32], second[32], odd[32];
  for (int i = 0; i < 32; ++i) {
    source[i] = uint16_t(i / 4);
    shift[i] = uint16_t(4 * (i % 4));
    second[i] = uint16_t(i & 16);
    odd[i] = uint16_t(2 * i + 1);
  }
  const __m512i sources = _mm512_load_si512(source), shifts = _mm512_load_si512(shift);
  const __m512i seconds = _mm512_load_si512(second), high = _mm512_load_si512(odd);
  const __m512 values = _mm512_mul_ps(_mm512_load_ps(kE2M1), _mm512_set1_ps(256.f));
  const __m512i nibble = _mm512_set1_epi16(15);
  for (int64_t base = 0; base < padded; base += 256) {
    alignas(64) float factor[16];
    prefetch(codes + base / 2);
    prefetch(codes + base / 2 + 64);
    const int64_t blocks = std::min<int64_t>(16, (k - base) / 16);
    const __m128i bytes = _mm_maskz_loadu_epi8(__mmask16((1u << blocks) - 1), scale + base / 16);
    _mm512_store_ps(factor, e4m3_over_256(_mm256_cvtepi8_epi16(bytes)));
    __asm__("" : "+m"(factor));  // or GCC shuffles each out of a register; decoding alone: 5.0 ms against 4.4 ms
    for (int64_t b = 0; b < blocks; b += 2) {
      const __m128i* from = reinterpret_cast<const __m128i*>(codes + base / 2 + 8 * b);
      const __m512i packed = _mm512_castsi128_si512(b + 1 < blocks ? _mm_loadu_si128(from) : _mm_loadl_epi64(from));
      const __m512i spread = _mm512_srlv_epi16(_mm512_permutexvar_epi16(sources, packed), shifts);
      const __m512i index = _mm512_ternarylogic_epi32(spread, nibble, seconds, 0xEA);  // (spread & nibble) | seconds
      const __m512i first_table = _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(factor[b])));
      const __m512i second_table = _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(factor[b + 1])));
      const __m512i table =
          _mm512_permutex2var_epi16(first_table, high, second_table);  // exact, so the upper halves are the bf16
      _mm512_storeu_si512(out + kTileCols * (base + 16 * b), _mm512_permutexvar_epi16(index, table));
    }
  }
}
#endif

}  // namespace
