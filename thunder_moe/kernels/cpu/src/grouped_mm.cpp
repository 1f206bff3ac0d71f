// CPU grouped GEMM with NVFP4 weights: out[m, n] = sum_k x[m, k] e2m1(code[e, n, k]) scale[e, n, k / 16] global[e, n].
// Called through ctypes by kernels/cpu.py, which compiles it with -O3 -march=native: C functions on raw pointers.
// Calls at::parallel_for (torch's own thread pool) and nothing else of torch.
//
// e2m1 * e4m3 has 6 significant bits, so a weight before its global scale is exact in bf16 as well as in fp32; the
// global scale multiplies the fp32 sum. Products are therefore exact: only the accumulation and the last rounding err.
//   gemv   few rows, bf16, AVX512_BF16: codes become bf16 in registers, dot, block scale on the partial sum; a weight
//          is read once and never stored.
//   slice  any rows, dtype and machine: a slice of N is dequantised into L2 and rows walk over it in register tiles;
//          bf16 dots where the machine has them, else fp32 FMA on GCC/clang vectors (AVX512, AVX2, NEON, ...).
//   exact  outputs that flushed subnormals or an overflow of the sum could have spoilt, once more in fp64.
// Every output is the work of one task in a fixed order: results do not depend on the number of threads.
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
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
#if defined(HAS_AVX512) || defined(__aarch64__)
constexpr int kTileRows = 6;  // 6 x 4 accumulators + 4 weights + 1 activation of 32 registers
#else
constexpr int kTileRows = 3;  // 3 x 4 of 16 registers
#endif
constexpr int kTileCols = 4;
// A dequantised slice stays in L2. fp16, 64 rows, (N, K) = (1536, 2048), one thread: 75 ms, with 256 KiB 85 ms.
constexpr int64_t kSliceBytes = 512 << 10;
constexpr int64_t kMaxSliceCols = 64;
constexpr int64_t kChunkBytes = 4096;  // of K at a time: 6 activation rows + 4 weight rows of 4 KiB stay in a 48 KiB L1
constexpr int64_t kStridePad = 64;     // bytes between packed rows, so that they are not a power of two apart
constexpr int64_t kTaskRows = 384;     // rows of one task of the slice kernel; more rows dequantise the slice again
constexpr int64_t kGemvCols = 32;      // outputs per task of the gemv kernel
constexpr int64_t kGemvRows = 8;       // rows at a time there: 2 x 8 sums + 2 x 4 weights + 2 dots of 32 registers

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

// ---- dequantisation: one block of 16 codes (8 bytes) times one factor ----

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

#if defined(HAS_AVX512_BF16)
// 16 scales from 16 words, an e4m3 sign-extended in each, divided by 256: shifted left by 7 it is an fp16, subnormals
// too. NaN stays NaN.
inline __m512 scales_over_256(__m256i words) {
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(int16_t(0xBFFF)));
  const __mmask16 nan =
      _mm256_cmpeq_epi16_mask(_mm256_and_si256(words, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7F));
  return _mm512_mask_mov_ps(_mm512_cvtph_ps(half), nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}

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

// ---- register tiles: acc[r, c] += dot(x[r], w[c]) over k elements, R rows by 4 columns ----

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

// ---- the problem and its tasks ----

struct Problem {
  const void* x;         // [M, K]
  const uint8_t* qdata;  // [E, N, K / 2]
  const uint8_t* scale;  // [E, N, K / 16]
  const float* global;   // [E] or [E, N]
  void* out;             // [M, N]
  int64_t n, k;
  bool per_column;       // global is [E, N]
  const bf16* permuted;  // rows of gemv tasks, K rounded up to 128, in the order that gemv reads

  const uint8_t* codes(int64_t e, int64_t column) const { return qdata + (e * n + column) * (k / 2); }
  const uint8_t* scales(int64_t e, int64_t column) const { return scale + (e * n + column) * (k / 16); }
  float global_scale(int64_t e, int64_t column) const { return per_column ? global[e * n + column] : global[e]; }
};
struct Task {
  int64_t expert, row, rows, column, columns;
  int64_t permuted;  // the first row in Problem::permuted; -1 for the slice kernel
};

// ---- outputs computed once more ----

// bf16 dots take subnormal inputs and products for zeros, and a sum can overflow before its global scale makes it
// small. In all, less than K * 2^-114 is lost of a sum, so sums from 2^-80 on are right. Smaller sums, and those that
// are not finite, are wrong only if their row has a tiny or a huge number: without one, products are normal and sums
// finite, or the operands hold NaN or infinities. Such outputs are computed again in fp64.
constexpr float kLeastSum = 0x1.0p-80f, kTiny = 0x1.0p-90f, kHuge = 0x1.0p+96f, kLargest = 0x1.FFFFFEp+127f;

inline bool is_doubtful(float sum) { return !(std::fabs(sum) >= kLeastSum && std::fabs(sum) <= kLargest); }
inline bool has_doubtful(const float* sums, int64_t count) {  // without a branch, so that compilers vectorise it
  uint32_t least = ~0u, most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(sums[i]) & 0x7FFFFFFFu;
    least = std::min(least, magnitude);
    most = std::max(most, magnitude);
  }
  return least < bits_of(kLeastSum) || most > bits_of(kLargest);
}

inline bool has_tiny_or_huge(const fp16*, int64_t) { return false; }
// By the bits of floats, or of bf16, their upper halves; without a branch, so that compilers vectorise it. Rows of
// zeros or NaN, whose sums are doubtful, take 0 to 7 % longer than others, rows of subnormals alone 14 to 40 times as
// long.
template <class T>
bool has_tiny_or_huge(const T* x, int64_t k) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr int shift = 32 - 8 * int(sizeof(T));
  const Bits tiny = Bits(bits_of(kTiny) >> shift), huge = Bits(bits_of(kHuge) >> shift);
  const Bits infinity = Bits(0x7F800000u >> shift), magnitudes = Bits(0x7FFFFFFFu >> shift);
  Bits found = 0;
  for (int64_t i = 0; i < k; ++i) {
    Bits bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= magnitudes;
    found |= Bits(Bits(bits - 1) < Bits(tiny - 1) ? 1 : 0) | Bits(Bits(bits - huge) < Bits(infinity - huge) ? 1 : 0);
  }
  return found != 0;
}

template <class T>
double exact_sum(const T* x, const uint8_t* codes, const uint8_t* scale, int64_t k) {
  double sums[16] = {};
  for (int64_t block = 0; block < k / 16; ++block) {
    float values[16];
    dequantize_block(codes + 8 * block, kTables.e4m3[scale[block]], values);
    for (int i = 0; i < 16; ++i) sums[i] += double(to_float(x[16 * block + i])) * double(values[i]);
  }
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

template <class T>
__attribute__((noinline)) void settle_doubts(const Problem& problem, const Task& task, int64_t row, const float* sums) {
  const T* x = static_cast<const T*>(problem.x) + row * problem.k;
  if (!has_tiny_or_huge(x, problem.k)) return;
  T* out = static_cast<T*>(problem.out) + row * problem.n;
  for (int64_t c = 0; c < task.columns; ++c) {
    if (!is_doubtful(sums[c])) continue;
    const int64_t e = task.expert, column = task.column + c;
    const double sum = exact_sum(x, problem.codes(e, column), problem.scales(e, column), problem.k);
    out[column] = from_float<T>(float(sum * double(problem.global_scale(e, column))));
  }
}

// Sums before the global scale, of rows [first, first + rows) of a task -> out.
template <class T>
void write_rows(const Problem& problem, const Task& task, int64_t first, int64_t rows, const float* sums,
                int64_t stride) {
  float global[kMaxSliceCols];
  for (int64_t c = 0; c < task.columns; ++c) global[c] = problem.global_scale(task.expert, task.column + c);
  for (int64_t row = task.row + first; row < task.row + first + rows; ++row, sums += stride) {
    T* out = static_cast<T*>(problem.out) + row * problem.n + task.column;
    for (int64_t c = 0; c < task.columns; ++c) out[c] = from_float<T>(sums[c] * global[c]);
    if (has_doubtful(sums, task.columns)) settle_doubts<T>(problem, task, row, sums);
  }
}

// A worker's buffer: kept between calls, because fresh pages cost more than a small GEMM.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};
thread_local Scratch scratch;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
template <class Element>
int64_t padded_k(int64_t k) {
  return round_up(k, sizeof(Element) == 2 ? 32 : 16);
}
template <class Element>
int64_t slice_columns(int64_t k) {
  const int64_t fit = kSliceBytes / (padded_k<Element>(k) * int64_t(sizeof(Element)));
  return std::max<int64_t>(kTileCols, std::min(kMaxSliceCols, fit / kTileCols * kTileCols));
}

inline const float* as_element(const float* x, float*) { return x; }
inline const bf16* as_element(const bf16* x, bf16*) { return x; }
// Anything else needs a conversion.
template <class T, class Element>
const Element* as_element(const T*, Element*) {
  return nullptr;
}
inline void convert(bf16 from, bf16* to) { *to = from; }
template <class T>
void convert(T from, float* to) {
  *to = to_float(from);
}

template <class T, class Element>
void slice_task(const Problem& problem, const Task& task) {
  const int64_t k = problem.k, padded = padded_k<Element>(k), columns = round_up(task.columns, kTileCols),
                stride = padded + kStridePad / int64_t(sizeof(Element));
  Element* weight = reinterpret_cast<Element*>(scratch.get((columns * padded + kTileRows * stride) * sizeof(Element)));
  Element* packed = weight + columns * padded;
  constexpr int64_t vector = sizeof(Element) == 2 ? 32 : kLanes;
  if (task.columns < columns)
    std::memset(static_cast<void*>(weight + (columns - kTileCols) * padded), 0, kTileCols * padded * sizeof(Element));
  for (int64_t c = 0; c < task.columns; ++c)
    dequantize_column(problem.codes(task.expert, task.column + c), problem.scales(task.expert, task.column + c), k,
                      padded, weight + c / kTileCols * kTileCols * padded + c % kTileCols * vector);
  float acc[kTileRows * kMaxSliceCols];
  const int64_t tiles = (task.rows + kTileRows - 1) / kTileRows, chunk = kChunkBytes / int64_t(sizeof(Element));
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = task.rows * tile / tiles, rows = task.rows * (tile + 1) / tiles - first;
    const T* source = static_cast<const T*>(problem.x) + (task.row + first) * k;
    const Element* x = padded == k ? as_element(source, packed) : nullptr;
    int64_t ldx = k;
    if (x == nullptr) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < k; ++i) convert(source[r * k + i], packed + r * stride + i);
        std::memset(static_cast<void*>(packed + r * stride + k), 0, (padded - k) * sizeof(Element));
      }
      x = packed;
      ldx = stride;
    }
    std::fill(acc, acc + rows * columns, 0.f);
    for (int64_t i = 0; i < padded; i += chunk)
      for (int64_t c = 0; c < columns; c += kTileCols)
        dot_rows(int(rows), x + i, ldx, weight + c * padded + kTileCols * i, std::min(chunk, padded - i), acc + c,
                 columns);
    write_rows<T>(problem, task, first, rows, acc, columns);
  }
}

// ---- few rows, bf16: a fused dequantise and dot ----

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

template <int R>
void gemv_task(const Problem& problem, const Task& task) {
  const int64_t k = problem.k, padded = round_up(k, 128), whole = k / 128;
  const int64_t left = k - 128 * whole;  // a multiple of 16
  const __mmask64 code_mask = (__mmask64(1) << (left / 2)) - 1;
  const __mmask16 scale_mask = __mmask16((1u << (left / 16)) - 1);
  const bf16* x = problem.permuted + task.permuted * padded;
  const __m512i table = GemvTables().values;
  float sums[R][kGemvCols];
  // Two columns share the loads of x.
  for (int64_t column = task.column; column < task.column + task.columns; column += 2) {
    const int64_t other = std::min(column + 1, task.column + task.columns - 1);
    const uint8_t* codes[2] = {problem.codes(task.expert, column), problem.codes(task.expert, other)};
    const uint8_t* scale[2] = {problem.scales(task.expert, column), problem.scales(task.expert, other)};
    __m512 sum[2][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[0][r] = sum[1][r] = _mm512_setzero_ps();
    const auto step = [&](__m512i packed0, __m512i packed1, __m128i scale0, __m128i scale1,
                          const bf16* from) __attribute__((always_inline)) {
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
    const auto bytes = [](const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); };
    for (int64_t i = 0; i < whole; ++i) {
      prefetch(codes[0] + 64 * i);
      prefetch(codes[1] + 64 * i);
      step(_mm512_loadu_si512(codes[0] + 64 * i), _mm512_loadu_si512(codes[1] + 64 * i), bytes(scale[0] + 8 * i),
           bytes(scale[1] + 8 * i), x + 128 * R * i);
    }
    if (left != 0)
      step(_mm512_maskz_loadu_epi8(code_mask, codes[0] + 64 * whole),
           _mm512_maskz_loadu_epi8(code_mask, codes[1] + 64 * whole),
           _mm_maskz_loadu_epi8(scale_mask, scale[0] + 8 * whole),
           _mm_maskz_loadu_epi8(scale_mask, scale[1] + 8 * whole), x + 128 * R * whole);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sums[r][column - task.column] = _mm512_reduce_add_ps(sum[0][r]) * 256.f;
      sums[r][other - task.column] = _mm512_reduce_add_ps(sum[1][r]) * 256.f;
    }
  }
  write_rows<bf16>(problem, task, 0, R, sums[0], kGemvCols);
}

void run_gemv(const Problem& problem, const Task& task) {
  switch (task.rows) {
    case 1:
      return gemv_task<1>(problem, task);
    case 2:
      return gemv_task<2>(problem, task);
    case 3:
      return gemv_task<3>(problem, task);
    case 4:
      return gemv_task<4>(problem, task);
    case 5:
      return gemv_task<5>(problem, task);
    case 6:
      return gemv_task<6>(problem, task);
    case 7:
      return gemv_task<7>(problem, task);
    case 8:
      return gemv_task<8>(problem, task);
  }
}
#endif

void run_task(const Problem& problem, const Task& task, int32_t dtype) {
  if (dtype == kFloat32) return slice_task<float, float>(problem, task);
  if (dtype == kFloat16) return slice_task<fp16, float>(problem, task);
#if defined(HAS_AVX512_BF16)
  return task.permuted >= 0 ? run_gemv(problem, task) : slice_task<bf16, bf16>(problem, task);
#else
  return slice_task<bf16, float>(problem, task);
#endif
}

template <class T>
void dequantize_rows(const uint8_t* qdata, const uint8_t* scale, const float* global, bool per_row, int64_t rows,
                     int64_t n, int64_t k, T* out) {
  constexpr int64_t kRows = 16;
  for_each((rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t row = kRows * i; row < std::min(rows, kRows * (i + 1)); ++row) {
      const float factor = global[per_row ? row : row / n];
      for (int64_t block = 0; block < k / 16; ++block) {
        float values[16];
        dequantize_block(qdata + row * (k / 2) + 8 * block, kTables.e4m3[scale[row * (k / 16) + block]] * factor,
                         values);
        for (int j = 0; j < 16; ++j) out[row * k + 16 * block + j] = from_float<T>(values[j]);
      }
    }
  });
}

}  // namespace

extern "C" {

// 1 when bf16 activations are multiplied as bf16 (twice the speed of fp32), 0 when they are converted to fp32.
int32_t thunder_moe_has_bf16() {
#if defined(HAS_AVX512_BF16)
  return 1;
#else
  return 0;
#endif
}

// out[row, k] for rows of [E, N]; per_row: global is [E * N] rather than [E]. Returns 0, or 1 when out of memory.
int32_t thunder_moe_dequantize(const uint8_t* qdata, const uint8_t* scale, const float* global, int32_t per_row,
                               int64_t rows, int64_t n, int64_t k, int32_t dtype, void* out) {
  try {
    if (dtype == kFloat32) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<float*>(out));
    if (dtype == kBFloat16) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<bf16*>(out));
    if (dtype == kFloat16) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<fp16*>(out));
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// x (count, k); row ends are held to count. Experts whose number of rows is above max_rows are left out. gemv_rows:
// rows up to which bf16 takes the gemv kernel.
int32_t thunder_moe_grouped_mm(const void* x, int64_t count, const uint8_t* qdata, const uint8_t* scale,
                               const float* global, int32_t per_column, const int32_t* offsets, int64_t experts,
                               int64_t n, int64_t k, int32_t dtype, int64_t max_rows, int64_t gemv_rows, void* out) {
  try {
    Problem problem{x, qdata, scale, global, out, n, k, per_column != 0, nullptr};
    std::vector<Task> tasks;
    struct Row {
      int64_t row, group, rows;  // the row of x, the first permuted row of its group, the rows of that group
    };
    std::vector<Row> permute;
    const bool native = dtype == kBFloat16 && thunder_moe_has_bf16() != 0;
    const int64_t slice = native ? slice_columns<bf16>(k) : slice_columns<float>(k);
    const auto within = [&](int64_t row) { return std::min(std::max<int64_t>(row, 0), count); };
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t begin = e == 0 ? 0 : within(offsets[e - 1]), rows = within(offsets[e]) - begin;
      if (rows <= 0 || rows > max_rows) continue;
      if (native && rows <= gemv_rows) {
        const int64_t groups = (rows + kGemvRows - 1) / kGemvRows, base = int64_t(permute.size());
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t first = rows * g / groups, last = rows * (g + 1) / groups;
          for (int64_t row = first; row < last; ++row) permute.push_back({begin + row, base + first, last - first});
        }
        for (int64_t column = 0; column < n; column += kGemvCols)
          for (int64_t g = 0; g < groups; ++g) {
            const int64_t first = rows * g / groups, last = rows * (g + 1) / groups;
            tasks.push_back({e, begin + first, last - first, column, std::min(kGemvCols, n - column), base + first});
          }
        continue;
      }
      for (int64_t row = 0; row < rows; row += kTaskRows)
        for (int64_t column = 0; column < n; column += slice)
          tasks.push_back({e, begin + row, std::min(kTaskRows, rows - row), column, std::min(slice, n - column), -1});
    }
    Scratch permuted;
#if defined(HAS_AVX512_BF16)
    if (!permute.empty()) {
      const int64_t padded = round_up(k, 128), permuted_rows = int64_t(permute.size());
      bf16* to = reinterpret_cast<bf16*>(permuted.get(permuted_rows * padded * sizeof(bf16)));
      problem.permuted = to;
      for_each((permuted_rows + 15) / 16, [&](int64_t i) {
        for (int64_t j = 16 * i; j < std::min(permuted_rows, 16 * (i + 1)); ++j) {
          const Row& row = permute[j];
          permute_row(static_cast<const bf16*>(x) + row.row * k, k, row.rows,
                      to + row.group * padded + 128 * (j - row.group));
        }
      });
    }
#endif
    for_each(int64_t(tasks.size()), [&](int64_t i) { run_task(problem, tasks[i], dtype); });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
