// Gradient of a CPU grouped GEMM with packed weights: out[m, k] = sum_n grad[m, n] w[e, n, k], 16-bit grad.
// Called through ctypes by kernels/cpu/backend.py, where thunder_moe_kernels() tells of panels; calls panels.h.
//
// Like the panel kernel of grouped_mm.cpp: panels of 64 k are decoded to bf16 pairs of n, exactly from 2^-126 on, and
// multiplied by brgemm, two at a time, because 128 k of NVFP4 are a cache line of codes. fp16 gradients are two bf16
// summands. The global scale of an expert multiplies the sum; global scales of the columns, which are summed over here,
// multiply the gradient, which is rounded once more.
#include "panels.h"

#if defined(HAS_BRGEMM)
namespace {

thread_local Scratch scratch;

constexpr int64_t kGradientCols = 2 * kPanelCols;
constexpr int64_t kRowsAhead = 16;  // rows of weights between a prefetch and its use

// `columns` k of `count` rows of weights, k apart -> panels of pairs of rows, `panel_size` apart:
// out[column / 64][row / 2][column % 64][2].
template <class Format>
void decode_row_pairs(const uint8_t* codes, const uint8_t* scale, int64_t k, int64_t columns, int64_t count,
                      int64_t panel_size, bf16* out) {
  for (int64_t row = 0; row < count; row += 2) {
    const bool both = row + 1 < count;
    const uint8_t *code0 = codes + row * Format::bytes(k), *code1 = both ? code0 + Format::bytes(k) : code0;
    const uint8_t *scale0 = scale + row * (k / Format::kBlock), *scale1 = both ? scale0 + k / Format::kBlock : scale0;
    for (int64_t line = 0; line < Format::bytes(columns); line += 64) {
      __builtin_prefetch(code0 + kRowsAhead * Format::bytes(k) + line);
      __builtin_prefetch(code1 + kRowsAhead * Format::bytes(k) + line);
    }
    for (int64_t block = 0; block < columns / 16; ++block) {
      const int64_t panel = block / 4, width = std::min(kPanelCols, columns - panel * kPanelCols);
      bf16* to = out + panel * panel_size + row * width + 32 * (block % 4);
      const __m512 factor0 = _mm512_set1_ps(block_scale<Format>(scale0, block));
      const __m512 factor1 = _mm512_set1_ps(both ? block_scale<Format>(scale1, block) : 0.f);
      const int64_t at = Format::bytes(16) * block;
      const __m512 first = _mm512_mul_ps(Format::values(code0 + at), factor0);
      const __m512 second = _mm512_mul_ps(Format::values(code1 + at), factor1);
      // MXFP8's weights below 2^-133 have bits in the lower half, too: without the mask they would overwrite `first`.
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16), upper = _mm512_set1_epi32(-65536);
      _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(low, _mm512_castps_si512(second), upper, 0xF8));  // a | (b & c)
    }
  }
}

struct Gradient {
  const uint8_t *qdata, *scale;
  const float* global;
  bool per_column;
  Parts parts;  // of the gradient
  int64_t count, n, padded_n, k;  // padded_n is even
  void* out;                      // [M, K]
};
struct GradientTask {
  int64_t expert, row, rows, column, columns;
};

template <class Format, class T>
void run_task(const Gradient& problem, const GradientTask& task) {
  const int64_t n = problem.n, padded_n = problem.padded_n, k = problem.k;
  const int64_t depth = panel_depth(padded_n), blocks = (task.rows + kBlockRows - 1) / kBlockRows;
  const int64_t panel_size = depth * kPanelCols, acc_size = blocks * kBlockRows * kPanelCols;
  char* memory = scratch.get(size_t(2 * panel_size) * sizeof(bf16) + size_t(2 * acc_size) * sizeof(float));
  float* acc = reinterpret_cast<float*>(memory);
  bf16* panels = reinterpret_cast<bf16*>(acc + 2 * acc_size);
  const float global = problem.global == nullptr || problem.per_column ? 1.f : problem.global[task.expert];
  for (int64_t first = 0; first < padded_n; first += depth) {
    const int64_t count = std::min(depth, padded_n - first), row_of_weights = task.expert * n + first;
    decode_row_pairs<Format>(problem.qdata + Format::bytes(row_of_weights * k + task.column),
                     problem.scale + (row_of_weights * k + task.column) / Format::kBlock, k, task.columns,
                     std::min(count, n - first), panel_size, panels);
    for (int64_t i = 0; i < 2 * blocks; ++i) {
      const int64_t panel = i % 2, column = panel * kPanelCols, row = i / 2 * kBlockRows;
      const int64_t width = std::min(kPanelCols, task.columns - column);
      if (width <= 0) continue;
      const int64_t rows = std::min(kBlockRows, task.rows - row), padded = padded_rows(rows);
      float* sums = acc + panel * acc_size + row * width;
      for (int64_t part = 0; part < kParts<T>; ++part) {
        const bf16* from = problem.parts.row(part, task.row + row) + first;
        const int64_t readable = problem.parts.readable(task.row + row, padded);
        multiply_panel(readable, width, count, from, problem.parts.stride, panels + panel * panel_size,
                       first > 0 || part > 0, sums);
      }
      if (first + count < padded_n) continue;
      for (int64_t r = 0; r < rows; ++r) {
        T* to = static_cast<T*>(problem.out) + (task.row + row + r) * k + task.column + column;
        for (int64_t c = 0; c < width; ++c) to[c] = from_float<T>(sums[r * width + c] * global);
      }
    }
  }
}

// The summands of rows [first, last) of the gradient, multiplied by the global scales of columns.
template <class T>
Parts as_parts(const T* grad, const Gradient& problem, const int32_t* offsets, int64_t num_experts, int64_t first,
               int64_t last, Scratch& memory) {
  const int64_t n = problem.n, padded_n = problem.padded_n;
  if constexpr (std::is_same<T, bf16>::value)
    if (n == padded_n && !problem.per_column && !has_matrix_unit()) return {grad, 0, problem.count, n};
  return copy_parts<T>(first, last, padded_n, memory, [&](int64_t row, bf16* high, bf16* low) {
    const int64_t expert = std::upper_bound(offsets, offsets + num_experts, row) - offsets;
    const T* from = grad + row * n;
    if (padded_n > n) high[n] = bf16{0};
    if (padded_n > n && kParts<T> == 2) low[n] = bf16{0};
    if (!problem.per_column || expert >= num_experts) {
      for (int64_t i = 0; i < n; ++i) split(from[i], high + i, low + i);
      return;
    }
    const float* global = problem.global + expert * n;
    for (int64_t i = 0; i < n; ++i) {
      const float value = to_float(from[i]) * global[i];
      high[i] = from_float<bf16>(value);
      if constexpr (kParts<T> == 2) {
        const float rest = value - to_float(high[i]);
        low[i] = from_float<bf16>(std::isfinite(rest) ? rest : 0.f);
      }
    }
  });
}

// Experts [first_expert, last_expert), whose rows are [first_row, last_row); memory for a copy of these.
template <class Format, class T>
void grouped_mm_dgrad(Gradient problem, const T* grad, const int32_t* offsets, int64_t num_experts,
                      int64_t first_expert, int64_t last_expert, int64_t first_row, int64_t last_row,
                      Scratch& memory) {
  std::vector<GradientTask> tasks;
  const auto within = [&](int64_t row) { return std::min(std::max(row, first_row), last_row); };
  for (int64_t e = first_expert; e < last_expert; ++e) {
    const int64_t begin = e == 0 ? 0 : within(offsets[e - 1]), rows = within(offsets[e]) - begin;
    const int64_t groups = (rows + kPanelTaskRows - 1) / kPanelTaskRows;
    for (int64_t column = 0; rows > 0 && column < problem.k; column += kGradientCols)
      for (int64_t g = 0; g < groups; ++g)
        tasks.push_back({e, begin + rows * g / groups, rows * (g + 1) / groups - rows * g / groups, column,
                         std::min(kGradientCols, problem.k - column)});
  }
  if (tasks.empty()) return;
  problem.parts = as_parts(grad, problem, offsets, num_experts, first_row, last_row, memory);
  for_each(
      int64_t(tasks.size()), [&](int64_t i) { run_task<Format, T>(problem, tasks[size_t(i)]); },
      [] { at::native::cpublas::brgemm_release(); });
}

}  // namespace
#endif

extern "C" {

// grad (count, n), bf16 or fp16 -> out (count, k); row ends are clamped to count, rows of no expert are not written.
// Returns the result of guarded, or -1 if this CPU has no panel kernel.
int32_t thunder_moe_grouped_mm_dgrad(const void* grad, int64_t count, const uint8_t* qdata, const uint8_t* scale,
                                     const float* global, int32_t per_column, const int32_t* offsets,
                                     int64_t num_experts, int64_t n, int64_t k, int32_t dtype, int32_t format,
                                     void* out) {
#if defined(HAS_BRGEMM)
  if (dtype == kFloat32) return -1;
  return guarded([&] {
    const Gradient problem{qdata, scale, global, per_column != 0, {}, count, n, n + n % 2, k, out};
    for_ranges(offsets, num_experts, count, 2 * (dtype == kFloat16 ? 2 : 1) * n,
               [&](int64_t first, int64_t last, int64_t row, int64_t end, Scratch& memory) {
                 const auto run = [&](auto* rows) {
                   if (format == kNvfp4)
                     grouped_mm_dgrad<Nvfp4>(problem, rows, offsets, num_experts, first, last, row, end, memory);
                   if (format == kMxfp8)
                     grouped_mm_dgrad<Mxfp8>(problem, rows, offsets, num_experts, first, last, row, end, memory);
                 };
                 if (dtype == kBFloat16) run(static_cast<const bf16*>(grad));
                 if (dtype == kFloat16) run(static_cast<const fp16*>(grad));
               });
  });
#else
  (void)grad, (void)count, (void)qdata, (void)scale, (void)global, (void)per_column, (void)offsets, (void)num_experts;
  (void)n, (void)k, (void)dtype, (void)format, (void)out;
  return -1;
#endif
}

}  // extern "C"
