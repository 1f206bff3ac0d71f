// The tile kernel of a CPU grouped GEMM, for few 16-bit rows where there is a matrix unit (AMX): codes become bf16 in the
// L1 cache and are multiplied at once; a weight is read once. Included by grouped_mm.cpp; calls exact.h and panels.h.
//
// A tile of weights is 16 columns by 32 k, one of activations 32 k by up to 16 rows. Weights are decoded in fp16, in
// which code times scale is exact, and the bits are moved to where bf16 has them, which makes numbers 2^112 times too
// small: the bias of the exponent differs. Activations are copied 2^100 times too large, and sums multiplied by 2^12.
// An activation from 2^28 on is infinite here; exact.h computes outputs of such rows again.
#pragma once
#include "exact.h"
#include "panels.h"

#if defined(HAS_BRGEMM) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512FP16__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t kTilesRows = 32;  // rows at a time: two tiles of activations
// The number of rows in the tiles of a group of rows: the rows of one tile, or two tiles of 16.
inline int64_t tiled_rows(int64_t rows) { return rows <= 16 ? rows : kTilesRows; }

#if defined(HAS_TILES)
// The best of 1 and 2 blocks, 1 to 4 steps: 8 rows, 32 experts (2048, 768), two threads, 3.5 ms against 3.8 to 4.7 ms.
constexpr int64_t kTilesCols = 32;  // outputs per task: two tiles of weights share one of activations
constexpr int64_t kChunk = 2;       // steps of 128 k that are decoded at a time
constexpr int64_t kTilesAhead = 4;  // steps between a prefetch and its use
constexpr int64_t kTile = 16 * 32;  // bf16 of a tile

// Linux lends the registers of the matrix unit to processes that ask for them.
inline bool has_tiles() {
#if defined(EMULATED_TILES)
  return true;
#else
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#endif
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_of_a_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, of weights 4 and 5 by activations 6 and 7.
inline void configure_tiles(int64_t width) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = 16;
    config.bytes_of_a_row[tile] = uint16_t(tile == 4 || tile == 5 ? 64 : 4 * width);
  }
  _tile_loadconfig(&config);
}

inline __m512i scaled_up(__m512i words) {  // 32 bf16 times 2^100
  const __m512 up = _mm512_set1_ps(0x1.0p+100f);
  const __m512i even = _mm512_slli_epi32(words, 16);
  const __m512i odd = _mm512_and_si512(words, _mm512_set1_epi32(int32_t(0xFFFF0000u)));
  const __m512i low = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(even), up));
  const __m512i high = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(odd), up));
  return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
}

// Word w of a column's 32 words has the four codes of k = 4 w + j: activations are tiles [step of 128 k][j]
// [half of the rows][w / 2][row][w % 2]. `count` rows of bf16 summands, row(index) each, of K.
template <class F>
void tile_rows(int64_t count, int64_t k, bf16* out, const F& row) {
  const int64_t width = std::min<int64_t>(16, count), halves = count > 16 ? 2 : 1;
  for (int64_t base = 0; base < k; base += 128, out += 4 * halves * 32 * width) {
    for (int64_t half = 0; half < halves; ++half) {
      __m512i words[4][16];
      for (int64_t r = 0; r < 16; ++r) {
        alignas(64) uint16_t ordered[4][32] = {};
        for (int64_t part = 0; part < 4 && 16 * half + r < count; ++part) {
          const int64_t left = std::min<int64_t>(32, std::max<int64_t>(0, k - base - 32 * part));
          const __mmask32 mask = left == 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
          const __m512i values =
              scaled_up(_mm512_maskz_loadu_epi16(mask, row(16 * half + r) + base + 32 * part));
          for (int j = 0; j < 4; ++j)
            _mm_store_si128(reinterpret_cast<__m128i*>(ordered[j] + 8 * part),
                            _mm512_cvtepi64_epi16(_mm512_srli_epi64(values, 16 * j)));
        }
        for (int j = 0; j < 4; ++j) words[j][r] = _mm512_load_si512(ordered[j]);
      }
      for (int j = 0; j < 4; ++j) {
        transpose_words(words[j]);
        bf16* to = out + (j * halves + half) * 32 * width;
        for (int64_t pair = 0; pair < 16; ++pair)
          _mm512_mask_storeu_epi32(to + pair * 2 * width, __mmask16((1u << width) - 1), words[j][pair]);
      }
    }
  }
}

// 128 weights of a column, in the order of tile_rows, times 2^-112: rows of four tiles, `kTile` apart.
inline void decode_to_tiles(__m512i packed, __m512i eight_scales, __m512i table, __m512i spread, bf16* out) {
  const __m512i words = _mm512_srai_epi16(_mm512_shuffle_epi8(eight_scales, spread), 1);
  const __m512h scale = _mm512_castsi512_ph(_mm512_and_si512(words, _mm512_set1_epi16(int16_t(0xBFFF))));
  const __m512i kept = _mm512_set1_epi16(int16_t(0x8FFF));
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i values = _mm512_permutexvar_epi16(_mm512_srli_epi16(packed, 4 * j), table);  // reads 5 bits
    const __m512i scaled = _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(values), scale));
    _mm512_store_si512(out + j * kTile, _mm512_and_si512(_mm512_srai_epi16(scaled, 3), kept));
  }
}

inline bool has_nan_scale(const uint8_t* scale, int64_t blocks) {
  const __m512i magnitude = _mm512_set1_epi8(0x7F);
  for (int64_t block = 0; block < blocks; block += 64) {
    const __mmask64 mask = blocks - block >= 64 ? ~__mmask64(0) : (__mmask64(1) << (blocks - block)) - 1;
    const __m512i bytes = _mm512_and_si512(_mm512_maskz_loadu_epi8(mask, scale + block), magnitude);
    if (_mm512_cmpeq_epi8_mask(bytes, magnitude) != 0) return true;
  }
  return false;
}

template <class T>
void tile_task(const Problem& problem, const Task& task) {
  constexpr int64_t parts = kParts<T>;
  const int64_t k = problem.k, rows = parts * task.rows, width = std::min<int64_t>(16, rows);
  const bool two = rows > 16;
  const int64_t steps = (k + 127) / 128, stride = k / 2, scale_stride = k / 16, part_size = 32 * tiled_rows(rows);
  const bf16* x = problem.tiled + task.permuted * round_up(k, 128);
  const uint8_t *codes = problem.codes(task.expert, task.column), *scale = problem.scales(task.expert, task.column);
  alignas(64) bf16 weight[2][kChunk * 8 * kTile];  // of a chunk: [step][half of the columns][j]
  alignas(64) uint16_t halves[32];
  for (int i = 0; i < 32; ++i) halves[i] = uint16_t(_cvtss_sh(256.f * kE2M1[i & 15], 0));
  const __m512i table = _mm512_load_si512(halves);
  alignas(64) uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(i % 2 == 0 ? 0x80 : 2 * (i / 16) + i / 8 % 2);  // to upper halves
  const __m512i spread = _mm512_load_si512(bytes);
  const auto decode = [&](int64_t chunk, int64_t n) __attribute__((always_inline)) {
    const int64_t column = std::min(n, task.columns - 1);
    const uint8_t *from = codes + column * stride, *scales = scale + column * scale_stride;
    bf16* out = weight[chunk & 1] + n / 16 * 4 * kTile + n % 16 * 32;
    for (int64_t step = kChunk * chunk; step < std::min(steps, kChunk * (chunk + 1)); ++step) {
      // No prefetcher of the CPU follows so many columns. The next codes are in the same columns or in the ones after them.
      const int64_t ahead = step + kTilesAhead, behind = ahead < steps ? 0 : kTilesCols;
      const int64_t next = ahead < steps ? ahead : ahead - steps, left = k - 128 * step;
      __builtin_prefetch(codes + (n + behind) * stride + 64 * next);
      if (step % 4 == 0) __builtin_prefetch(scale + (n + behind) * scale_stride + 8 * next);
      if (left >= 128) {
        int64_t eight;
        std::memcpy(&eight, scales + 8 * step, 8);
        decode_to_tiles(_mm512_loadu_si512(from + 64 * step), _mm512_set1_epi64(eight), table, spread, out);
      } else {
        const __m128i some = _mm_maskz_loadu_epi8(__mmask16((1u << (left / 16)) - 1), scales + 8 * step);
        const __m512i packed = _mm512_maskz_loadu_epi8((__mmask64(1) << (left / 2)) - 1, from + 64 * step);
        decode_to_tiles(packed, _mm512_broadcastq_epi64(some), table, spread, out);
      }
      out += 8 * kTile;
    }
  };
  const auto multiply = [&](int64_t chunk, int64_t product) __attribute__((always_inline)) {
    const bf16* activations = x + (4 * kChunk * chunk + product) * part_size;
    const bf16* from = weight[chunk & 1] + product / 4 * 8 * kTile + product % 4 * kTile;
    _tile_loadd(6, activations, 4 * width);
    _tile_loadd(4, from, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, from + 4 * kTile, 64);
    _tile_dpbf16ps(1, 5, 6);
    if (!two) return;
    _tile_loadd(7, activations + kTile, 4 * width);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  };
  at::native::cpublas::brgemm_release();  // a panel task of this thread before may have left its configuration
  configure_tiles(width);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t chunks = (steps + kChunk - 1) / kChunk;
  for (int64_t n = 0; n < kTilesCols; ++n) decode(0, n);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t products = 4 * std::min(kChunk, steps - kChunk * chunk);
    for (int64_t n = 0, done = 0; n < kTilesCols; ++n) {
      if (chunk + 1 < chunks) decode(chunk + 1, n);
      for (; done < (n + 1) * products / kTilesCols; ++done) multiply(chunk, done);
    }
  }
  alignas(64) float acc[kTilesCols][kTilesRows];
  _tile_stored(0, acc[0], sizeof acc[0]);
  _tile_stored(1, acc[16], sizeof acc[0]);
  if (two) {
    _tile_stored(2, acc[0] + 16, sizeof acc[0]);
    _tile_stored(3, acc[16] + 16, sizeof acc[0]);
  }
  _tile_release();
  float sums[kTilesRows][kTilesCols];
  for (int64_t c = 0; c < task.columns; ++c) {
    const bool nan = has_nan_scale(scale + c * scale_stride, scale_stride);
    for (int64_t r = 0; r < task.rows; ++r) {
      const float sum = parts == 1 ? acc[c][r] : acc[c][r] + acc[c][task.rows + r];
      sums[r][c] = nan ? std::numeric_limits<float>::quiet_NaN() : sum * 0x1.0p+12f;
    }
  }
  write_rows<Nvfp4, T>(problem, task, 0, task.rows, sums[0], kTilesCols);
}

#else
constexpr int64_t kTilesCols = 32;
inline bool has_tiles() { return false; }
#endif

}  // namespace
