// The operands of a CPU grouped GEMM, and its epilogue, which computes doubtful outputs again in fp64.
// Included by grouped_mm.cpp; calls decode.h.
#pragma once
#include "decode.h"

namespace {

constexpr int64_t kMaxSliceCols = 64;  // outputs of a row that are written at a time, at most

// Rows [first, first + rows) of a 16-bit matrix as bf16 summands [kParts, rows, stride]: the matrix itself, or a copy,
// which has rows behind its last one that may be read.
struct Parts {
  const bf16* data;
  int64_t first, rows, stride;
  const bf16* row(int64_t part, int64_t index) const { return data + (part * rows + index - first) * stride; }
  int64_t readable(int64_t index, int64_t wanted) const { return std::min(wanted, first + rows - index); }
};

struct Problem {
  const void* x;         // [M, K]
  const uint8_t* qdata;  // [E, N, bytes of codes of K]
  const uint8_t* scale;  // [E, N, K / block]
  const float* global;   // [E] or [E, N]; null where the format has none
  void* out;             // [M, N]
  int64_t n, k;
  int64_t code_stride, scale_stride;  // bytes of a column
  bool per_column;       // global is [E, N]
  int64_t count;         // M
  Parts parts;           // x as bf16 summands, of gemv and panel tasks
  const bf16* permuted;  // rows of dots tasks, K rounded up to 128, in the order that they read
  const float* spread;   // rows of fma tasks, likewise
  const bf16* tiled;     // rows of tile tasks, likewise

  const uint8_t* codes(int64_t e, int64_t column) const { return qdata + (e * n + column) * code_stride; }
  const uint8_t* scales(int64_t e, int64_t column) const { return scale + (e * n + column) * scale_stride; }
  float global_scale(int64_t e, int64_t column) const {
    return global == nullptr ? 1.f : per_column ? global[e * n + column] : global[e];
  }
};
enum class Kernel : int32_t { dots, fma, tile, slice, slice_fp32, panel };
struct Task {
  Kernel kernel;
  int64_t expert, row, rows, column, columns;
  int64_t permuted;  // dots, fma, tile: the first row in Problem::permuted, spread, tiled
};

// Calls run(first expert, last expert, first row, last row, memory for the copy of these rows) for ranges of experts
// of few enough rows that the copy can be kept for the next call: fresh pages for 34 MB took 12 ms.
template <class F>
void for_ranges(const int32_t* offsets, int64_t num_experts, int64_t count, int64_t bytes_of_a_row, const F& run) {
  constexpr int64_t kKept = 16 << 20;
  static thread_local Scratch kept;
  const auto end = [&](int64_t e) { return e < 0 ? 0 : std::min(std::max<int64_t>(offsets[e], 0), count); };
  for (int64_t first = 0, last; first < num_experts; first = last) {
    const int64_t row = end(first - 1);
    for (last = first + 1; last < num_experts && (end(last) - row) * bytes_of_a_row <= kKept;) ++last;
    const int64_t last_row = std::max(row, end(last - 1));
    Scratch once;
    run(first, last, row, last_row, (last_row - row) * bytes_of_a_row <= kKept ? kept : once);
  }
}

// ---- outputs that are computed again in fp64 ----

// bf16 dots take subnormal inputs and products for zeros, and a sum can overflow before its global scale makes it
// small. In all, less than K * 2^-114 is lost of a sum, so sums from 2^-80 on are right. Smaller sums, and those that
// are not finite, are wrong only if their row has a tiny or a huge number: without one, products are normal and sums
// finite, or the operands hold NaN or infinities. Such outputs are computed again in fp64.
// This holds for weights from 2^-45 to 2^17. MXFP8's can be smaller and larger: see unusual_columns.
constexpr float kLeastSum = 0x1.0p-80f, kTiny = 0x1.0p-80f, kHuge = 0x1.0p+27f, kLargest = 0x1.FFFFFEp+127f;

inline bool is_doubtful(float sum) { return !(std::fabs(sum) >= kLeastSum && std::fabs(sum) <= kLargest); }
inline bool has_doubtful(const float* sums, int64_t count) {  // without a branch, so that compilers vectorize it
  uint32_t least = ~0u, most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(sums[i]) & 0x7FFFFFFFu;
    least = std::min(least, magnitude);
    most = std::max(most, magnitude);
  }
  return least < bits_of(kLeastSum) || most > bits_of(kLargest);
}

inline bool has_tiny_or_huge(const fp16*, int64_t) { return false; }
// Compares the bits of floats, or of bf16, their upper halves; without a branch, so that compilers vectorize it. Rows of
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

// Columns of a task, by bit. `extreme`: their scales would make bf16 weights inexact; these columns are always computed
// again. `small`: their weights are so small that products may be subnormal; doubtful sums are computed again.
struct Columns {
  uint64_t extreme = 0, small = 0;
};
inline Columns unusual_columns(Nvfp4, const Problem&, const Task&) { return {}; }
inline Columns unusual_columns(Mxfp8, const Problem& problem, const Task& task) {
  constexpr uint8_t least = 127 - 100, usual = 127 - 36, most = 127 + 8;
  Columns found;
  for (int64_t c = 0; c < task.columns; ++c) {
    const uint8_t* scale = problem.scales(task.expert, task.column + c);
    uint8_t some = 0;  // without a branch, so that compilers vectorize it
    for (int64_t i = 0; i < problem.scale_stride; ++i) some |= uint8_t(uint8_t(scale[i] - usual) > most - usual);
    if (some == 0) continue;
    const uint8_t* codes = problem.codes(task.expert, task.column + c);
    for (int64_t i = 0; i < problem.scale_stride; ++i) {
      if (scale[i] >= usual && scale[i] <= most) continue;
      uint8_t all = scale[i];  // blocks of zeros, whose scale is the least, are nothing special
      for (int64_t j = 0; j < Mxfp8::kBlock; ++j) all |= uint8_t(codes[i * Mxfp8::kBlock + j] & 0x7F);
      if (all == 0) continue;
      if (scale[i] < usual) found.small |= uint64_t(1) << c;
      if (scale[i] < least || scale[i] > most) found.extreme |= uint64_t(1) << c;
    }
  }
  return found;
}

template <class Format, class T>
double exact_sum(const T* x, const uint8_t* codes, const uint8_t* scale, int64_t k) {
  double sums[16] = {};
  for (int64_t block = 0; block < k / 16; ++block) {
    float values[16];
    dequantize_block<Format>(codes + Format::bytes(16) * block, block_scale<Format>(scale, block), values);
    for (int i = 0; i < 16; ++i) sums[i] += double(to_float(x[16 * block + i])) * double(values[i]);
  }
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

template <class Format, class T>
__attribute__((noinline)) void settle_doubts(const Problem& problem, const Task& task, int64_t row, const float* sums,
                                             Columns unusual) {
  const T* x = static_cast<const T*>(problem.x) + row * problem.k;
  const bool doubts = has_tiny_or_huge(x, problem.k);
  if (!doubts && (unusual.extreme | unusual.small) == 0) return;
  T* out = static_cast<T*>(problem.out) + row * problem.n;
  for (int64_t c = 0; c < task.columns; ++c) {
    const bool is_extreme = unusual.extreme >> c & 1, is_small = unusual.small >> c & 1;
    if (!is_extreme && !((doubts || is_small) && is_doubtful(sums[c]))) continue;
    const int64_t e = task.expert, column = task.column + c;
    const double sum = exact_sum<Format>(x, problem.codes(e, column), problem.scales(e, column), problem.k);
    out[column] = from_float<T>(float(sum * double(problem.global_scale(e, column))));
  }
}

// Sums before the global scale, of rows [first, first + rows) of a task -> out.
template <class Format, class T>
void write_rows(const Problem& problem, const Task& task, int64_t first, int64_t rows, const float* sums,
                int64_t stride) {
  const Columns unusual = unusual_columns(Format{}, problem, task);
  float global[kMaxSliceCols];
  for (int64_t c = 0; c < task.columns; ++c) global[c] = problem.global_scale(task.expert, task.column + c);
  for (int64_t row = task.row + first; row < task.row + first + rows; ++row, sums += stride) {
    T* out = static_cast<T*>(problem.out) + row * problem.n + task.column;
    for (int64_t c = 0; c < task.columns; ++c) out[c] = from_float<T>(sums[c] * global[c]);
    if (unusual.extreme != 0 || has_doubtful(sums, task.columns))
      settle_doubts<Format, T>(problem, task, row, sums, unusual);
  }
}

}  // namespace
