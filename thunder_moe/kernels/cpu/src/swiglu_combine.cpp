// SwiGLU behind the first expert GEMM and the weighted combine behind the second, on a CPU, each in one pass.
// Called through ctypes by kernels/cpu/backend.py, which compiles it together with grouped_mm.cpp; calls numbers.h and exp.h.
// All arithmetic is fp32; a sum over a token's slots runs in their order, so results do not depend on the threads.
#include "exp.h"
#include "numbers.h"

namespace {

constexpr int64_t kBlock = 1024;  // numbers of a row at a time: a few KiB of fp32 stay in L1

struct Bias {
  const void* data;  // (E, N) or null
  int32_t dtype;
  const int32_t* offsets;  // (E,) row ends
  int64_t num_experts, n;

  // Adds columns [column, column + count) of the row's expert.
  void add(int64_t row, int64_t column, int64_t count, float* to) const {
    if (data == nullptr) return;
    const int64_t e =
        std::min<int64_t>(std::upper_bound(offsets, offsets + num_experts, row) - offsets, num_experts - 1);
    const int64_t at = e * n + column;
    if (dtype == kFloat32) plus(static_cast<const float*>(data) + at, count, to);
    if (dtype == kBFloat16) plus(static_cast<const bf16*>(data) + at, count, to);
    if (dtype == kFloat16) plus(static_cast<const fp16*>(data) + at, count, to);
  }

 private:
  template <class T>
  static void plus(const T* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] += to_float(from[i]);
  }
};

template <class T>
void swiglu(const T* gate_up, int64_t rows, int64_t inner, const float* row_scale, const Bias& bias, float alpha,
            float limit, float up_shift, T* out) {
  const int64_t blocks = (inner + kBlock - 1) / kBlock;
  for_each(rows * blocks, [&](int64_t i) {
    const int64_t row = i / blocks, column = i % blocks * kBlock, count = std::min(kBlock, inner - column);
    const float scale = row_scale == nullptr ? 1.0f : row_scale[row];
    const T* from = gate_up + row * 2 * inner + column;
    float gate[kBlock], up[kBlock];
    for (int64_t j = 0; j < count; ++j) gate[j] = to_float(from[j]) * scale, up[j] = to_float(from[inner + j]) * scale;
    bias.add(row, column, count, gate);
    bias.add(row, inner + column, count, up);
    T* to = out + row * inner + column;
    for (int64_t j = 0; j < count; ++j) {
      const float g = least(gate[j], limit), u = least(most(up[j], -limit), limit);
      gate[j] = g / (1 + exp_of(-alpha * g)) * (u + up_shift);
    }
    for (int64_t j = 0; j < count; ++j) to[j] = from_float<T>(gate[j]);
  });
}

template <class T>
void combine(const T* rows, int64_t end, const int32_t* slot_row, const float* weight, int64_t tokens, int64_t top_k,
             int64_t n, const Bias& bias, T* out) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  for_each(tokens * blocks, [&](int64_t i) {
    const int64_t token = i / blocks, column = i % blocks * kBlock, count = std::min(kBlock, n - column);
    float sum[kBlock] = {}, part[kBlock];
    for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
      const int64_t row = slot_row[slot];
      if (row < 0 || row >= end) continue;
      const T* from = rows + row * n + column;
      for (int64_t j = 0; j < count; ++j) part[j] = to_float(from[j]);
      bias.add(row, column, count, part);
      const float factor = weight == nullptr ? 1.0f : weight[slot];
      for (int64_t j = 0; j < count; ++j) sum[j] += factor * part[j];
    }
    T* to = out + token * n + column;
    for (int64_t j = 0; j < count; ++j) to[j] = from_float<T>(sum[j]);
  });
}

// Calls run with a typed null pointer of the dtype.
template <class F>
void with_dtype(int32_t dtype, const F& run) {
  if (dtype == kFloat32) run(static_cast<float*>(nullptr));
  if (dtype == kBFloat16) run(static_cast<bf16*>(nullptr));
  if (dtype == kFloat16) run(static_cast<fp16*>(nullptr));
}

}  // namespace

extern "C" {

// gate_up (rows, 2 * inner) -> out (rows, inner); row_scale (rows,) and bias (num_experts, 2 * inner) may be null.
void thunder_moe_swiglu(const void* gate_up, int32_t dtype, int64_t rows, int64_t inner, const float* row_scale,
                        const void* bias, int32_t bias_dtype, const int32_t* offsets, int64_t num_experts, float alpha,
                        float limit, float up_shift, void* out) {
  with_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    swiglu(static_cast<const T*>(gate_up), rows, inner, row_scale, {bias, bias_dtype, offsets, num_experts, 2 * inner},
           alpha, limit, up_shift, static_cast<T*>(out));
  });
}

// rows (count, n) -> out (tokens, n); entries of slot_row (tokens, top_k) that are not a row of an expert are skipped;
// weight (tokens, top_k) and bias may be null.
void thunder_moe_combine(const void* rows, int32_t dtype, int64_t count, const int32_t* slot_row, const float* weight,
                         int64_t tokens, int64_t top_k, int64_t n, const void* bias, int32_t bias_dtype,
                         const int32_t* offsets, int64_t num_experts, void* out) {
  const int64_t end = std::min<int64_t>(offsets[num_experts - 1], count);
  with_dtype(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    combine(static_cast<const T*>(rows), end, slot_row, weight, tokens, top_k, n,
            {bias, bias_dtype, offsets, num_experts, n}, static_cast<T*>(out));
  });
}

}  // extern "C"
