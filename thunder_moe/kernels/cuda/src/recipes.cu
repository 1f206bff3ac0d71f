// Rounds operands of products to E4M3: along rows, or along the rows of each expert; as numbers, or as codes with scales.
// Compiled at run time for kernels/cuda/recipes.py behind activation.cu; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// MX: blocks of 32 share a power of two, results are numbers. Otherwise all numbers that are summed share a float32 scale; results
// are codes / 1 as numbers, or bytes (CODES). The arithmetic is kernels/recipes.py's, operation by operation. Bound by memory.
// Largest magnitudes are integers here, the bits of the floats: NaN is above Inf. Their atomics give the same bits in any order.

struct RecipeArguments {
  const void* values;  // (R, C), contiguous; C a multiple of 8
  const int* ends;     // (E,) row ends, which never decrease and are at most R; null: each expert has group_rows
  void* out;           // numbers: (R, C). codes: quantize_rows (R, C), quantize_columns (E, C, group_rows), with ends (C, code_rows)
  float* scales;       // quantize_rows (R,), quantize_columns (E, C); null for MX
  uint32_t* amax;      // quantize_columns (E, C): bits of the largest magnitudes, 0 to begin with
  int* progress;       // quantize_columns: the number of blocks that have begun, and (E, tiles of C) measured tiles; 0 to begin with
  int* code_ends;      // (E,), result: row ends among the codes, where each expert has a multiple of 32 rows
  int64_t rows, code_rows;
  int columns, num_experts, group_rows;
  int lead;  // tiles that are measured before the first one is rounded, at least as many as an expert has below each other
};

constexpr int kTile = 128;  // rows and columns of a block of quantize_columns

// The product rounded to float32, apart from an addition behind it.
DEVICE float rounded_product(float a, float b) {
#ifdef CUDA_EMULATOR
  return a * b;
#else
  return __fmul_rn(a, b);
#endif
}

DEVICE uint32_t bits_of_magnitude(float value) { return float_to_bits(value) & 0x7FFFFFFF; }

// The nearest E4M3 number, at a tie the even one: steps of 2^-3 of the power of two, at least 2^-9. Beyond 464 NaN.
DEVICE float nearest_e4m3(float value) {
  const float shift = bits_to_float((max(float_to_bits(value) & 0x7F800000, 121u << 23) + (20u << 23)) | 0x400000);
  return fabsf(value) <= 464.0f ? (value + shift) - shift : bits_to_float(0x7FC00000);
}

// The codes of two numbers of at most 464, or NaN; the first in the low byte.
DEVICE uint32_t two_codes(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  uint32_t codes = 0;
  const float values[2] = {low, high};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float nearest = nearest_e4m3(values[i]), magnitude = fabsf(nearest);
    const uint32_t code = magnitude < 0.015625f ? static_cast<uint32_t>(magnitude * 512.0f) : (float_to_bits(magnitude) >> 20) - (120 << 3);
    codes |= (magnitude == magnitude ? code | float_to_bits(nearest) >> 31 << 7 : 0x7F) << (8 * i);
  }
  return codes;
#endif
}

// A block's numbers are multiplied by `inverse`, rounded, and multiplied by `scale`.
struct Scaling {
  float inverse, scale;
};
DEVICE Scaling fp8_scaling(uint32_t amax) {
  const float scale = rounded_product(bits_to_float(max(amax, 27u << 23)), 1.0f / 448.0f);  // amax at least 2^-100
#ifdef CUDA_EMULATOR
  return {1.0f / scale, scale};
#else
  return {__frcp_rn(scale), scale};
#endif
}
DEVICE Scaling mxfp8_scaling(uint32_t amax) {
  const int exponent = max(static_cast<int>(amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000), 0);
  if (exponent == 0) return {0.0f, 0.0f};
  return {bits_to_float(static_cast<uint32_t>(254 - exponent) << 23), bits_to_float(static_cast<uint32_t>(exponent) << 23)};
}

// Rounds eight numbers and stores them: as numbers, or as bytes.
template <int DTYPE, bool MX, bool CODES>
DEVICE void store_rounded(void* to, int64_t at, const float (&values)[8], const Scaling& by) {
  float rounded[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    rounded[i] = rounded_product(values[i], by.inverse);
    if constexpr (!CODES) rounded[i] = nearest_e4m3(rounded[i]) * (MX ? by.scale : 1.0f);
  }
  if constexpr (CODES) {
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(to) + at) =
        make_uint2(two_codes(rounded[0], rounded[1]) | two_codes(rounded[2], rounded[3]) << 16,
                   two_codes(rounded[4], rounded[5]) | two_codes(rounded[6], rounded[7]) << 16);
  } else {
    store8<DTYPE>(to, at, rounded);
  }
}

DEVICE uint32_t largest_of(const float (&values)[8], uint32_t largest = 0) {
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, bits_of_magnitude(values[i]));
  return largest;
}

// PER_ROW threads round a row, 8 numbers each at a time: 32, or all threads of the block.
template <int DTYPE, bool MX, bool CODES, int PER_ROW>
__global__ void __launch_bounds__(PER_ROW > kRowThreads ? PER_ROW : kRowThreads) quantize_rows(const RecipeArguments args) {
  await_previous_kernel();
  constexpr int kRows = PER_ROW > kRowThreads ? 1 : kRowThreads / PER_ROW, kStep = 8 * PER_ROW;
  constexpr int kHeld = PER_ROW == 32 ? 8 : 4;  // loads of a thread that stay in registers
  __shared__ uint32_t of_warp[32];
  const int first = threadIdx.x % PER_ROW * 8;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / PER_ROW; row < args.rows; row += static_cast<int64_t>(gridDim.x) * kRows) {
    const int64_t row_at = row * args.columns;
    if constexpr (MX) {
      for (int base = 0; base < args.columns; base += kStep) {  // four neighbours share a block
        const int column = base + first;
        float values[8] = {};
        if (column < args.columns) load8<DTYPE>(values, args.values, row_at + column);
        uint32_t largest = largest_of(values);
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        if (column < args.columns) store_rounded<DTYPE, true, false>(args.out, row_at + column, values, mxfp8_scaling(largest));
      }
    } else {
      Eight<DTYPE> held[kHeld];
      float values[8];
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (first + i * kStep < args.columns) held[i].load(args.values, row_at + first + i * kStep);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kStep >= args.columns) continue;
        widen8<DTYPE>(values, held[i]);
        largest = largest_of(values, largest);
      }
      for (int column = first + kHeld * kStep; column < args.columns; column += kStep) {
        load8<DTYPE>(values, args.values, row_at + column);
        largest = largest_of(values, largest);
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
      if constexpr (PER_ROW > 32) {
        __syncthreads();  // the row before is read
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
        __syncthreads();
        for (int warp = 0; warp < PER_ROW / 32; ++warp) largest = max(largest, of_warp[warp]);
      }
      const Scaling by = fp8_scaling(largest);
      if (first == 0) args.scales[row] = by.scale;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kStep >= args.columns) continue;
        widen8<DTYPE>(values, held[i]);
        store_rounded<DTYPE, false, CODES>(args.out, row_at + first + i * kStep, values, by);
      }
      for (int column = first + kHeld * kStep; column < args.columns; column += kStep) {
        load8<DTYPE>(values, args.values, row_at + column);
        store_rounded<DTYPE, false, CODES>(args.out, row_at + column, values, by);
      }
    }
  }
}

// ---- along the rows of each expert: a block takes up to kTile rows of one expert, from a multiple of kTile on, and kTile columns.
// A thread has 8 neighbouring rows and 8 neighbouring columns.

struct Tile {
  int expert, column, chunk, chunks, live;  // -1 for no expert; its place in the expert, which has `chunks` below each other; its rows
  int64_t begin, code_begin;                // the expert's first row, and its first among the codes
};

DEVICE int code_rows_of(int rows) { return (rows + 31) / 32 * 32; }

// Tiles below each other follow each other.
DEVICE Tile find_tile(const RecipeArguments& args, int number) {
  const int across = (args.columns + kTile - 1) / kTile;
  if (args.ends == nullptr) {
    const int chunks = (args.group_rows + kTile - 1) / kTile, expert = number / (chunks * across), chunk = number % chunks;
    return {expert < args.num_experts ? expert : -1, number / chunks % across * kTile, chunk, chunks, min(args.group_rows - chunk * kTile, kTile),
            static_cast<int64_t>(expert) * args.group_rows, 0};
  }
  __shared__ int warp_total[kRowThreads / 32];
  __shared__ Tile found;
  if (threadIdx.x == 0) found.expert = -1;
  __syncthreads();
  int carry = 0, code_carry = 0;
  for (int base = 0; base < args.num_experts && carry <= number; base += kRowThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    const bool exists = expert < args.num_experts;
    const int begin = exists && expert > 0 ? args.ends[expert - 1] : 0, rows = exists ? args.ends[expert] - begin : 0;
    const int chunks = exists ? max((rows + kTile - 1) / kTile, 1) : 0, codes = exists ? code_rows_of(rows) : 0, mine = chunks * across;
    const int through = scan_block<kRowThreads>(mine, warp_total, carry), codes_through = scan_block<kRowThreads>(codes, warp_total, code_carry);
    const int inside = number - (through - mine);
    if (inside >= 0 && inside < mine) {
      const int chunk = inside % chunks;
      found = {expert, inside / chunks * kTile, chunk, chunks, min(rows - chunk * kTile, kTile), begin, codes_through - codes};
    }
  }
  __syncthreads();
  return found;
}

// A thread's 8 rows; zeros outside of the tile's.
template <int DTYPE>
DEVICE void load_rows(Eight<DTYPE> (&rows)[8], const RecipeArguments& args, const Tile& tile, int column) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = threadIdx.x / 16 * 8 + i;
    if (row < tile.live && column < args.columns) {
      rows[i].load(args.values, (tile.begin + tile.chunk * kTile + row) * args.columns + column);
    } else {
#pragma unroll
      for (int piece = 0; piece < Eight<DTYPE>::kPieces; ++piece) rows[i].pieces[piece] = make_uint4(0, 0, 0, 0);
    }
  }
}

// The largest magnitudes of each column in a thread's rows, and in the warp's 16.
template <int DTYPE>
DEVICE void largest_of_columns(uint32_t (&largest)[8], const Eight<DTYPE> (&rows)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float values[8];
    widen8<DTYPE>(values, rows[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest[j] = max(i ? largest[j] : 0u, bits_of_magnitude(values[j]));
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) largest[j] = max(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], 16));
}

// The largest magnitudes in a tile go to args.amax.
template <int DTYPE>
DEVICE void measure_tile(const RecipeArguments& args, const Tile& tile, const Eight<DTYPE> (&rows)[8]) {
  __shared__ uint32_t of_warp[kRowThreads / 32][kTile];
  uint32_t largest[8];
  largest_of_columns<DTYPE>(largest, rows);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (threadIdx.x % 32 < 16) of_warp[threadIdx.x / 32][threadIdx.x % 16 * 8 + j] = largest[j];
  __syncthreads();
  const int column = tile.column + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kTile || column >= args.columns) return;
  uint32_t all = 0;
#pragma unroll
  for (int warp = 0; warp < kRowThreads / 32; ++warp) all = max(all, of_warp[warp][threadIdx.x]);
  if (all != 0) atomicMax(args.amax + static_cast<int64_t>(tile.expert) * args.columns + column, all);
}

// Without MX a tile is read twice, by two blocks: one measures it, and `lead` tiles later one rounds it, while it still is in L2. A
// block takes the next turn, so the blocks that it waits for have begun: first `lead` to measure, then to round and to measure.
template <int DTYPE, bool MX, bool CODES>
__global__ void __launch_bounds__(kRowThreads) quantize_columns(const RecipeArguments args) {
  await_previous_kernel();
  int number = blockIdx.x;
  bool measures = false;
  if constexpr (!MX) {
    __shared__ int turn;
    if (threadIdx.x == 0) turn = atomicAdd(args.progress, 1);
    __syncthreads();
    const int behind = turn - args.lead;
    measures = behind < 0 || behind % 2 != 0;
    number = behind < 0 ? turn : measures ? args.lead + behind / 2 : behind / 2;
  }
  const Tile tile = find_tile(args, number);
  if (tile.expert < 0) return;
  const int thread = threadIdx.x, group = thread % 16, first = tile.column, column = first + group * 8;
  const int64_t of_expert = static_cast<int64_t>(tile.expert) * args.columns;
  Eight<DTYPE> rows[8];
  load_rows<DTYPE>(rows, args, tile, column);
  if constexpr (!MX) {
    int* const measured = args.progress + 1 + tile.expert * ((args.columns + kTile - 1) / kTile) + first / kTile;
    if (measures) {
      measure_tile<DTYPE>(args, tile, rows);
      __syncthreads();
      if (thread == 0) __threadfence(), atomicAdd(measured, 1);
      return;
    }
    if (thread == 0) {
      while (load_word(reinterpret_cast<const uint32_t*>(measured)) < static_cast<uint32_t>(tile.chunks)) {}
      __threadfence();
    }
    __syncthreads();
  }
  Scaling by[8];
  if constexpr (MX) {  // two warps have the 32 rows of a block
    __shared__ uint32_t of_warp[kRowThreads / 32][kTile];
    uint32_t largest[8];
    largest_of_columns<DTYPE>(largest, rows);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (thread % 32 < 16) of_warp[thread / 32][group * 8 + j] = largest[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) by[j] = mxfp8_scaling(max(largest[j], of_warp[thread / 32 ^ 1][group * 8 + j]));
  } else {
    __shared__ float inverses[kTile];
    if (thread < kTile) {
      const bool exists = first + thread < args.columns;
      const Scaling scaling = fp8_scaling(exists ? load_word(args.amax + of_expert + first + thread) : 0);
      inverses[thread] = scaling.inverse;
      if (tile.chunk == 0 && exists) args.scales[of_expert + first + thread] = scaling.scale;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) by[j].inverse = inverses[group * 8 + j];
  }
  if constexpr (!CODES) {
    if (column >= args.columns) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = thread / 16 * 8 + i;
      if (row >= tile.live) return;
      float values[8];
      widen8<DTYPE>(values, rows[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = nearest_e4m3(rounded_product(values[j], by[j].inverse)) * (MX ? by[j].scale : 1.0f);
      store8<DTYPE>(args.out, (tile.begin + tile.chunk * kTile + row) * args.columns + column, values);
    }
  } else {
    // Column c of the tile has its 16 pieces of 8 rows in an order of its own, so that neighbours are in different banks.
    __shared__ uint2 turned[kTile][16];
    uint32_t words[8][2] = {};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float upper[8], lower[8];
      widen8<DTYPE>(upper, rows[i]);
      widen8<DTYPE>(lower, rows[i + 1]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        words[j][i / 4] |= two_codes(rounded_product(upper[j], by[j].inverse), rounded_product(lower[j], by[j].inverse)) << (8 * (i % 4));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) turned[group * 8 + j][thread / 16 ^ group] = make_uint2(words[j][0], words[j][1]);
    __syncthreads();
    const int written = args.ends == nullptr ? tile.live : code_rows_of(tile.live);
    const int64_t stride = args.ends == nullptr ? args.group_rows : args.code_rows;
    uint8_t* const out = static_cast<uint8_t*>(args.out) + (args.ends == nullptr ? of_expert * stride : tile.code_begin) + tile.chunk * kTile;
#pragma unroll
    for (int i = 0; i < kTile * 8 / kRowThreads; ++i) {  // 8 threads write a column, 16 rows each
      const int c = (i * kRowThreads + thread) / 8, piece = thread % 8 * 2;
      if (first + c >= args.columns || piece * 8 >= written) continue;
      const uint2 upper = turned[c][piece ^ c / 8], lower = turned[c][piece + 1 ^ c / 8];
      store16(out + (first + c) * stride + piece * 8, upper.x, upper.y, lower.x, lower.y);
    }
    if (args.ends != nullptr && tile.chunk == 0 && first == 0 && thread == 0)
      args.code_ends[tile.expert] = static_cast<int>(tile.code_begin) + code_rows_of(args.ends[tile.expert] - static_cast<int>(tile.begin));
  }
}
