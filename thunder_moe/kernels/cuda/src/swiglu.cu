// SwiGLU behind a grouped GEMM without a fused one: layout "tiled_64x64" with an I that is not a multiple of 64.
// Compiled at run time for kernels/cuda/backend.py behind common.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
// A thread computes 8 columns of a row.

struct SwigluArguments {
  const uint16_t* gate_up;    // (M, 2 I)
  const int* offsets;         // (E,) row ends
  const int* row_slot;        // (M,) or null
  const void* slot_scale;     // (M,), or (T * A,) with row_slot, or null
  const void* bias;           // (E, 2 I) or null
  uint16_t* out;              // (M, I)
  int rows, num_experts, features;
  int slot_scale_dtype, bias_dtype;  // 0 float32, 1 bfloat16, 2 float16
  float alpha, limit, up_shift;      // limit <= 0: none
};

// The first expert whose rows end behind `row`.
DEVICE int expert_of_row(const int* offsets, int num_experts, int row) {
  int low = 0, high = num_experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (offsets[middle] > row) high = middle;
    else low = middle + 1;
  }
  return low;
}

template <bool BF16>
DEVICE float pre_activation(const SwigluArguments& args, uint16_t value, int64_t expert, int of, float row_scale) {
  float y = widen<BF16>(value) * row_scale;
  if (args.bias != nullptr) y += load_float(args.bias, expert * 2 * args.features + of, args.bias_dtype);
  return y;
}

template <bool BF16>
__global__ void __launch_bounds__(256) swiglu(const SwigluArguments args) {
  await_previous_kernel();
  constexpr int kColumns = 8;
  const int features = args.features, end = args.offsets[args.num_experts - 1];
  const int blocks_n = (features + kColumns - 1) / kColumns;
  const bool vectors = features % kColumns == 0;
  const int64_t items = static_cast<int64_t>(min(args.rows, end)) * blocks_n;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; item < items;
       item += static_cast<int64_t>(gridDim.x) * 256) {
    const int row = static_cast<int>(item / blocks_n), column = static_cast<int>(item % blocks_n) * kColumns;
    const int expert = args.bias != nullptr ? expert_of_row(args.offsets, args.num_experts, row) : 0;
    const float row_scale = args.slot_scale == nullptr ? 1.0f
        : load_float(args.slot_scale, args.row_slot != nullptr ? slot_of_row(args.row_slot, row, args.rows) : row, args.slot_scale_dtype);
    const uint16_t* gate_from = args.gate_up + static_cast<int64_t>(row) * 2 * features + column;
    const uint16_t* up_from = gate_from + features;
    alignas(16) uint16_t gate[kColumns], up[kColumns];
    if (vectors) {
      *reinterpret_cast<uint4*>(gate) = *reinterpret_cast<const uint4*>(gate_from);
      *reinterpret_cast<uint4*>(up) = *reinterpret_cast<const uint4*>(up_from);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        gate[i] = column + i < features ? gate_from[i] : 0;
        up[i] = column + i < features ? up_from[i] : 0;
      }
    }
    uint16_t* out = args.out + static_cast<int64_t>(row) * features + column;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (column + i >= features) break;
      const float g = pre_activation<BF16>(args, gate[i], expert, column + i, row_scale);
      const float u = pre_activation<BF16>(args, up[i], expert, features + column + i, row_scale);
      out[i] = narrow<BF16>(activate(args, g, u));
    }
  }
}
