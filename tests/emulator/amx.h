// AMX tiles in plain C++, for the CPU kernels that multiply by them: put before every source by -include.
// Called by tests/kernels/cpu/test_tiles.py, which builds the CPU backend with it; calls AVX512 intrinsics' headers alone.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef __AMX_TILE__
#undef __AMX_BF16__
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define EMULATED_TILES 1

struct EmulatedTiles {
  bool configured = false;
  uint16_t bytes[16];
  uint8_t rows[16];
  uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles emulated_tiles;

inline void emulated_loadconfig(const void* from) {
  auto& tiles = emulated_tiles;
  std::memcpy(tiles.bytes, static_cast<const char*>(from) + 16, 32);
  std::memcpy(tiles.rows, static_cast<const char*>(from) + 48, 16);
  tiles.configured = static_cast<const char*>(from)[0] == 1;
  for (int tile = 0; tile < 8; ++tile)
    if (tiles.rows[tile] > 16 || tiles.bytes[tile] > 64 || tiles.bytes[tile] % 4 != 0) __builtin_trap();
}
inline void emulated_check() {
  if (!emulated_tiles.configured) __builtin_trap();
}
inline void emulated_zero(int tile) {
  emulated_check();
  std::memset(emulated_tiles.data[tile], 0, sizeof emulated_tiles.data[tile]);
}
inline void emulated_load(int tile, const void* from, int64_t stride) {
  emulated_zero(tile);
  for (int row = 0; row < emulated_tiles.rows[tile]; ++row)
    std::memcpy(emulated_tiles.data[tile][row], static_cast<const char*>(from) + row * stride,
                emulated_tiles.bytes[tile]);
}
inline void emulated_store(int tile, void* to, int64_t stride) {
  emulated_check();
  for (int row = 0; row < emulated_tiles.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles.data[tile][row], emulated_tiles.bytes[tile]);
}
// Subnormal inputs and results are zeros, as in the hardware.
inline float emulated_flush(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7F800000u) == 0) bits &= 0x80000000u;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float emulated_bf16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return emulated_flush(value);
}
inline void emulated_dot(int sums, int left, int right) {
  emulated_check();
  auto& tiles = emulated_tiles;
  for (int row = 0; row < tiles.rows[sums]; ++row)
    for (int column = 0; column < tiles.bytes[sums] / 4; ++column) {
      float sum;
      std::memcpy(&sum, tiles.data[sums][row] + 4 * column, 4);
      for (int pair = 0; pair < tiles.bytes[left] / 4; ++pair)
        for (int which = 0; which < 2; ++which) {
          uint16_t a, b;
          std::memcpy(&a, tiles.data[left][row] + 4 * pair + 2 * which, 2);
          std::memcpy(&b, tiles.data[right][pair] + 4 * column + 2 * which, 2);
          sum = emulated_flush(sum + emulated_flush(emulated_bf16(a) * emulated_bf16(b)));
        }
      std::memcpy(tiles.data[sums][row] + 4 * column, &sum, 4);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated_loadconfig(from)
#define _tile_release() (void)(emulated_tiles.configured = false)
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) emulated_dot(sums, left, right)
