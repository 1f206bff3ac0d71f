// Decodes NVFP4 on a CPU: E2M1 codes times E4M3 scales -> fp32, or bf16 where the CPU multiplies that.
// Included by grouped_mm.cpp; calls the instruction sets that -march=native finds, with plain C++ elsewhere.
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
  float pair[256][2];  // a byte of qdata: low nibble first
  Tables() {
    for (int byte = 0; byte < 256; ++byte) {
      const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
      const float magnitude = (byte & 127) == 127 ? std::numeric_limits<float>::quiet_NaN()
                              : exponent == 0     ? std::ldexp(float(mantissa), -9)
                                                  : std::ldexp(float(8 + mantissa), exponent - 10);
      e4m3[byte] = byte & 128 ? -magnitude : magnitude;
      pair[byte][0] = kE2M1[byte & 15];
      pair[byte][1] = kE2M1[byte >> 4];
    }
  }
};
const Tables kTables;

// Weights are read once, in order. 57 MB of them, one thread, one row per expert: 2.0 ms against 5.8 ms without.
inline void prefetch(const uint8_t* codes) { __builtin_prefetch(codes + 4096); }

// ---- dequantization: one block of 16 codes (8 bytes) times one factor ----

#if defined(HAS_AVX512)
inline __m512 block_values(const uint8_t* codes) {
  const __m512i dword = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i packed = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m512i nibbles =
      _mm512_srlv_epi32(_mm512_permutexvar_epi32(dword, packed), shift);  // vpermps reads the low 4 bits only
  return _mm512_permutexvar_ps(nibbles, _mm512_load_ps(kE2M1));
}
inline void dequantize_block(const uint8_t* codes, float factor, float* out) {
  _mm512_storeu_ps(out, _mm512_mul_ps(block_values(codes), _mm512_set1_ps(factor)));
}
#elif defined(__AVX2__)
inline void dequantize_block(const uint8_t* codes, float factor, float* out) {
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
inline void dequantize_block(const uint8_t* codes, float factor, float* out) {
  for (int byte = 0; byte < 8; ++byte) {
    out[2 * byte] = kTables.pair[codes[byte]][0] * factor;
    out[2 * byte + 1] = kTables.pair[codes[byte]][1] * factor;
  }
}
#endif

// One column of a slice: a row of weights without its global scale, exact, zero from k to padded. A slice interleaves
// four columns: one vector of each in turn, so that a register tile reads one stream: 29.2 ms against 31.0 ms at 64
// rows, (1536, 2048), one thread.
void dequantize_column(const uint8_t* codes, const uint8_t* scale, int64_t k, int64_t padded, float* out) {
  for (int64_t block = 0; block < padded / 16; ++block) {
    if (block % 8 == 0) prefetch(codes + 8 * block);
    alignas(64) float values[16] = {};
    if (block < k / 16) dequantize_block(codes + 8 * block, kTables.e4m3[scale[block]], values);
    for (int64_t i = 0; i < 16; i += kLanes)
      std::memcpy(out + kTileCols * (16 * block + i), values + i, kLanes * sizeof(float));
  }
}

// A 16-bit float as a sum of bf16: itself, or high + low, of which fp16's 11 bits are 8 and 3. Where high is not finite,
// low is 0.
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
// 16 scales from 16 words, an e4m3 sign-extended in each, divided by 256: shifted left by 7 it is an fp16, subnormals
// too. NaN stays NaN.
inline __m512 scales_over_256(__m256i words) {
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(int16_t(0xBFFF)));
  const __mmask16 nan =
      _mm256_cmpeq_epi16_mask(_mm256_and_si256(words, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7F));
  return _mm512_mask_mov_ps(_mm512_cvtph_ps(half), nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}
#endif

#if defined(HAS_AVX512_BF16)
// Two blocks at a time: vpermw in a table of 32 words, the sixteen values of the first block, then those of the second.
void dequantize_column(const uint8_t* codes, const uint8_t* scale, int64_t k, int64_t padded, bf16* out) {
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
    _mm512_store_ps(factor, scales_over_256(_mm256_cvtepi8_epi16(bytes)));
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
