// Register tiles of the CPU's slice kernel: dot products of up to six rows with four columns, accumulated in fp32.
// Included by grouped_mm.cpp; calls the lane count of decode.h.
#pragma once
#include "decode.h"

namespace {

#if defined(HAS_AVX512) || defined(__aarch64__)
constexpr int kTileRows = 6;  // 6 x 4 accumulators + 4 weights + 1 activation of 32 registers
#else
constexpr int kTileRows = 3;  // 3 x 4 of 16 registers
#endif

// acc[r, c] += dot(x[r], w[c]) over k elements, R rows by 4 columns.
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

#if defined(HAS_AVX512)
inline void add_sums(const __m512 (&v)[kTileCols], float* acc) {  // the sums of four vectors, 13 instructions
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512d ab_d = _mm512_castps_pd(ab), cd_d = _mm512_castps_pd(cd);
  const __m512 abcd =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_d, cd_d)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab_d, cd_d)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  const __m128 sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  _mm_storeu_ps(acc, _mm_add_ps(_mm_loadu_ps(acc), sums));
}
#else
inline void add_sums(const Vector (&v)[kTileCols], float* acc) {
  for (int c = 0; c < kTileCols; ++c) {
    float sum = 0.f;
    for (int lane = 0; lane < kLanes; ++lane) sum += v[c][lane];
    acc[c] += sum;
  }
}
#endif

template <int R>
void dot_tile(const float* x, int64_t ldx, const float* w, int64_t k, float* acc, int64_t ldacc) {
  Vector sum[R][kTileCols] = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    const Vector column[kTileCols] = {load(w), load(w + kLanes), load(w + 2 * kLanes), load(w + 3 * kLanes)};
    w += kTileCols * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vector row = load(x + r * ldx + i);
#pragma GCC unroll 8
      for (int c = 0; c < kTileCols; ++c) sum[r][c] += row * column[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) add_sums(sum[r], acc + r * ldacc);
}

#if defined(HAS_AVX512_BF16)
inline __m512bh load(const bf16* from) {
  __m512bh value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <int R>
void dot_tile(const bf16* x, int64_t ldx, const bf16* w, int64_t k, float* acc, int64_t ldacc) {
  __m512 sum[R][kTileCols];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kTileCols; ++c) sum[r][c] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 32) {
    const __m512bh column[kTileCols] = {load(w), load(w + 32), load(w + 64), load(w + 96)};
    w += kTileCols * 32;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512bh row = load(x + r * ldx + i);
#pragma GCC unroll 8
      for (int c = 0; c < kTileCols; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], row, column[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) add_sums(sum[r], acc + r * ldacc);
}
#endif

template <class Element>
void dot_rows(int rows, const Element* x, int64_t ldx, const Element* w, int64_t k, float* acc, int64_t ldacc) {
  switch (rows) {
    case 1:
      return dot_tile<1>(x, ldx, w, k, acc, ldacc);
    case 2:
      return dot_tile<2>(x, ldx, w, k, acc, ldacc);
    case 3:
      return dot_tile<3>(x, ldx, w, k, acc, ldacc);
#if defined(HAS_AVX512) || defined(__aarch64__)
    case 4:
      return dot_tile<4>(x, ldx, w, k, acc, ldacc);
    case 5:
      return dot_tile<5>(x, ldx, w, k, acc, ldacc);
    case 6:
      return dot_tile<6>(x, ldx, w, k, acc, ldacc);
#endif
  }
}

}  // namespace
