// Gradient of a CPU grouped GEMM with NVFP4 weights: out[m, k] = sum_n grad[m, n] w[e, n, k], 16-bit grad.
// Called through ctypes by kernels/cpu/backend.py, where thunder_moe_kernels() tells of panels; calls panels.h.
//
// As the panel kernel of grouped_mm.cpp: a panel of 64 k is decoded, exactly, to bf16 pairs of n, and multiplied by
// brgemm. fp16 gradients are two bf16 summands. The global scale of an expert multiplies the sum; global scales of the
// columns, which are summed over here, multiply the gradient, which is rounded once more.
#include "panels.h"

#if defined(HAS_BRGEMM)
namespace {

thread_local Scratch scratch;

// Columns [column, column + columns) of `count` rows of weights, k apart -> pairs of rows: out[row / 2][column][2].
void decode_row_pairs(const uint8_t* codes, const uint8_t* scale, int64_t k, int64_t columns, int64_t count,
                      int64_t width, bf16* out) {
  for (int64_t row = 0; row < count; row += 2) {
    const bool both = row + 1 < count;
    const uint8_t *code0 = codes + row * (k / 2), *code1 = both ? code0 + k / 2 : code0;
    const uint8_t *scale0 = scale + row * (k / 16), *scale1 = both ? scale0 + k / 16 : scale0;
    bf16* to = out + row * width;
    for (int64_t block = 0; block < columns / 16; ++block) {
      const __m512 factor0 = _mm512_set1_ps(kTables.e4m3[scale0[block]]);
      const __m512 factor1 = _mm512_set1_ps(both ? kTables.e4m3[scale1[block]] : 0.f);
      const __m512 first = _mm512_mul_ps(block_values(code0 + 8 * block), factor0);
      const __m512 second = _mm512_mul_ps(block_values(code1 + 8 * block), factor1);
      const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
      _mm512_storeu_si512(to + 32 * block, _mm512_or_si512(low, _mm512_castps_si512(second)));
    }
  }
}

struct Gradient {
  const uint8_t *qdata, *scale;
  const float* global;
  bool per_column;
  const bf16* parts;  // [kParts, M, n], n even
  int64_t count, n, padded_n, k;
  void* out;  // [M, K]
};
struct GradientTask {
  int64_t expert, row, rows, column, columns;
};

template <class T>
void run_task(const Gradient& problem, const GradientTask& task) {
  const int64_t n = problem.n, padded_n = problem.padded_n, k = problem.k, width = task.columns;
  const int64_t depth = panel_depth(padded_n), blocks = (task.rows + kBlockRows - 1) / kBlockRows;
  const int64_t panel_size = depth * width, copy_size = kBlockRows * padded_n;
  char* memory = scratch.get(size_t(panel_size + copy_size) * sizeof(bf16) +
                             size_t(blocks * kBlockRows * width) * sizeof(float));
  float* acc = reinterpret_cast<float*>(memory);
  bf16* panel = reinterpret_cast<bf16*>(acc + blocks * kBlockRows * width);
  const float global = problem.per_column ? 1.f : problem.global[task.expert];
  for (int64_t first = 0; first < padded_n; first += depth) {
    const int64_t count = std::min(depth, padded_n - first), row_of_weights = task.expert * n + first;
    decode_row_pairs(problem.qdata + row_of_weights * (k / 2) + task.column / 2,
                     problem.scale + row_of_weights * (k / 16) + task.column / 16, k, task.columns,
                     std::min(count, n - first), width, panel);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * kBlockRows, rows = std::min(kBlockRows, task.rows - row), padded = padded_rows(rows);
      float* sums = acc + row * width;
      for (int64_t part = 0; part < kParts<T>; ++part) {
        const bf16* from = problem.parts + (part * problem.count + task.row + row) * padded_n;
        const int64_t left = (kParts<T> - part) * problem.count - task.row - row;
        from = readable_rows(from, rows, padded, left, padded_n, panel + panel_size);
        multiply_panel(padded, width, count, from + first, padded_n, panel, first > 0 || part > 0, sums);
      }
      if (first + count < padded_n) continue;
      for (int64_t r = 0; r < rows; ++r) {
        T* to = static_cast<T*>(problem.out) + (task.row + row + r) * k + task.column;
        for (int64_t c = 0; c < width; ++c) to[c] = from_float<T>(sums[r * width + c] * global);
      }
    }
  }
}

// The summands of the gradient: itself where bf16 of an even n has no global scales of columns to be multiplied by.
template <class T>
const bf16* as_parts(const T* grad, const Gradient& problem, const int32_t* offsets, int64_t num_experts,
                     Scratch& memory) {
  const int64_t n = problem.n, padded_n = problem.padded_n;
  if constexpr (std::is_same<T, bf16>::value)
    if (n == padded_n && !problem.per_column) return grad;
  bf16* parts = reinterpret_cast<bf16*>(memory.get(size_t(kParts<T> * problem.count * padded_n) * sizeof(bf16)));
  for_each(problem.count, [&](int64_t row) {
    const int64_t expert = std::upper_bound(offsets, offsets + num_experts, row) - offsets;
    bf16 *high = parts + row * padded_n, *low = high + problem.count * padded_n;
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
  return parts;
}

template <class T>
void grouped_mm_dgrad(Gradient problem, const T* grad, const int32_t* offsets, int64_t num_experts) {
  std::vector<GradientTask> tasks;
  const auto within = [&](int64_t row) { return std::min(std::max<int64_t>(row, 0), problem.count); };
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t begin = e == 0 ? 0 : within(offsets[e - 1]), rows = within(offsets[e]) - begin;
    const int64_t groups = (rows + kPanelTaskRows - 1) / kPanelTaskRows;
    for (int64_t column = 0; rows > 0 && column < problem.k; column += kPanelCols)
      for (int64_t g = 0; g < groups; ++g)
        tasks.push_back({e, begin + rows * g / groups, rows * (g + 1) / groups - rows * g / groups, column,
                         std::min(kPanelCols, problem.k - column)});
  }
  if (tasks.empty()) return;
  Scratch memory;
  problem.parts = as_parts(grad, problem, offsets, num_experts, memory);
  for_each(
      int64_t(tasks.size()), [&](int64_t i) { run_task<T>(problem, tasks[size_t(i)]); },
      [] { at::native::cpublas::brgemm_release(); });
}

}  // namespace
#endif

extern "C" {

// grad (count, n), bf16 or fp16 -> out (count, k); row ends are held to count, rows of no expert are not written.
// Returns what guarded does, or -1 where there are no
// panels.
int32_t thunder_moe_grouped_mm_dgrad(const void* grad, int64_t count, const uint8_t* qdata, const uint8_t* scale,
                                     const float* global, int32_t per_column, const int32_t* offsets,
                                     int64_t num_experts, int64_t n, int64_t k, int32_t dtype, void* out) {
#if defined(HAS_BRGEMM)
  if (dtype == kFloat32) return -1;
  return guarded([&] {
    const Gradient problem{qdata, scale, global, per_column != 0, nullptr, count, n, n + n % 2, k, out};
    if (dtype == kBFloat16) grouped_mm_dgrad(problem, static_cast<const bf16*>(grad), offsets, num_experts);
    if (dtype == kFloat16) grouped_mm_dgrad(problem, static_cast<const fp16*>(grad), offsets, num_experts);
  });
#else
  (void)grad, (void)count, (void)qdata, (void)scale, (void)global, (void)per_column, (void)offsets, (void)num_experts;
  (void)n, (void)k, (void)dtype, (void)out;
  return -1;
#endif
}

}  // extern "C"
