// The activations of training, forward and backward: SwiGLU or squared ReLU of (M, 2 I) or (M, I) rows, times a scale per row.
// Compiled at run time for kernels/cuda/training.py behind common.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
// kThreadsPerRow threads compute a row, each 8 features at a time, in float32, rounded once. Bound by memory.

struct ActivationArguments {
  const void* y;        // (M, 2 I) with SwiGLU, (M, I) with squared ReLU
  const void* scales;   // (M,) or null
  const void* offsets;  // (E,) row ends, or null: all rows are some expert's
  const void* grad;     // (M, I), of the output; backward only
  void* out;            // forward (M, I); backward the gradient of y, or null; zeros in rows past the end
  void* grad_scales;    // (M,) in the dtype of the scales, or null; backward only
  void* value;          // (M, I), or null: what the forward gives, once more; backward only
  int64_t rows;
  int features;  // I
  int num_experts, wide_offsets, scales_dtype;  // offsets are int64; 0 float32, 1 bfloat16, 2 float16
  int interleave;                               // s: s features of gate, s of up, and so on; I for halves
  float alpha, limit, up_shift;                 // limit <= 0: none
};

constexpr int kRowThreads = 256;  // of a block

// Eight numbers of a dtype from element `at` on, 16 bytes aligned.
template <int DTYPE>
struct Eight {
  static constexpr int kPieces = DTYPE == 0 ? 2 : 1;
  uint4 pieces[kPieces];
  METHOD void load(const void* from, int64_t at) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = reinterpret_cast<const uint4*>(static_cast<const char*>(from) + at * (DTYPE == 0 ? 4 : 2))[i];
  }
};

template <int DTYPE>
DEVICE void widen8(float (&out)[8], const Eight<DTYPE>& eight) {
#pragma unroll
  for (int i = 0; i < Eight<DTYPE>::kPieces; ++i) {
    const uint32_t words[4] = {eight.pieces[i].x, eight.pieces[i].y, eight.pieces[i].z, eight.pieces[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (DTYPE == 0) {
        out[4 * i + j] = bits_to_float(words[j]);
      } else {
        out[2 * j] = widen<DTYPE == 1>(static_cast<uint16_t>(words[j]));
        out[2 * j + 1] = widen<DTYPE == 1>(static_cast<uint16_t>(words[j] >> 16));
      }
    }
  }
}

template <int DTYPE>
DEVICE void store8(void* to, int64_t at, const float (&values)[8]) {
  if constexpr (DTYPE == 0) {
    float* const p = static_cast<float*>(to) + at;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      alignas(16) const float four[4] = {values[4 * half], values[4 * half + 1], values[4 * half + 2], values[4 * half + 3]};
      reinterpret_cast<uint4*>(p)[half] = *reinterpret_cast<const uint4*>(four);
    }
  } else {
    constexpr bool kBf16 = DTYPE == 1;
    store16(static_cast<uint16_t*>(to) + at, narrow2<kBf16>(values[0], values[1]), narrow2<kBf16>(values[2], values[3]),
            narrow2<kBf16>(values[4], values[5]), narrow2<kBf16>(values[6], values[7]));
  }
}

template <int DTYPE>
DEVICE void load8(float (&out)[8], const void* from, int64_t at) {
  Eight<DTYPE> eight;
  eight.load(from, at);
  widen8<DTYPE>(out, eight);
}

// Four numbers, likewise; 16-bit ones are aligned to 8 bytes.
template <int DTYPE>
DEVICE void load4(float (&out)[8], const void* from, int64_t at) {
  if constexpr (DTYPE == 0) {
    const uint4 piece = *reinterpret_cast<const uint4*>(static_cast<const float*>(from) + at);
    out[0] = bits_to_float(piece.x), out[1] = bits_to_float(piece.y), out[2] = bits_to_float(piece.z), out[3] = bits_to_float(piece.w);
  } else {
    const uint2 piece = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at);
    out[0] = widen<DTYPE == 1>(static_cast<uint16_t>(piece.x)), out[1] = widen<DTYPE == 1>(static_cast<uint16_t>(piece.x >> 16));
    out[2] = widen<DTYPE == 1>(static_cast<uint16_t>(piece.y)), out[3] = widen<DTYPE == 1>(static_cast<uint16_t>(piece.y >> 16));
  }
}

template <int DTYPE>
DEVICE void store4(void* to, int64_t at, const float (&values)[8]) {
  if constexpr (DTYPE == 0) {
    alignas(16) const float four[4] = {values[0], values[1], values[2], values[3]};
    *reinterpret_cast<uint4*>(static_cast<float*>(to) + at) = *reinterpret_cast<const uint4*>(four);
  } else {
    constexpr bool kBf16 = DTYPE == 1;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + at) = make_uint2(narrow2<kBf16>(values[0], values[1]), narrow2<kBf16>(values[2], values[3]));
  }
}

template <int DTYPE>
DEVICE void store1(void* to, int64_t at, float value) {
  if constexpr (DTYPE == 0) static_cast<float*>(to)[at] = value;
  else static_cast<uint16_t*>(to)[at] = narrow<DTYPE == 1>(value);
}

DEVICE void store_float(void* to, int64_t at, float value, int dtype) {
  if (dtype == 0) store1<0>(to, at, value);
  else if (dtype == 1) store1<1>(to, at, value);
  else store1<2>(to, at, value);
}

DEVICE int64_t offset_at(const void* offsets, int64_t i, int wide) {
  return wide ? static_cast<const int64_t*>(offsets)[i] : static_cast<const int*>(offsets)[i];
}

// 1 / (1 + exp(-x)). The fast functions are off by a few units of the last place of float32, which 16 bits do not see.
template <int DTYPE>
DEVICE float sigmoid(float x) {
  if constexpr (DTYPE == 0) return 1.0f / (1.0f + expf(-x));
  else return __fdividef(1.0f, 1.0f + __expf(-x));
}

// Gate and up within the limit. NaN stays NaN.
DEVICE void clamp(const ActivationArguments& args, float& gate, float& up) {
  if (args.limit > 0.0f) {
    gate = gate > args.limit ? args.limit : gate;
    up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
  }
}

template <int DTYPE>
DEVICE float swiglu(const ActivationArguments& args, float gate, float up) {
  clamp(args, gate, up);
  return gate * sigmoid<DTYPE>(args.alpha * gate) * (up + args.up_shift);
}

// Gate and up are replaced by their gradients; `value` is the output without a scale.
template <int DTYPE>
DEVICE void swiglu_backward(const ActivationArguments& args, float& gate, float& up, float scaled_grad, float& value) {
  const float raw_gate = gate, raw_up = up;
  clamp(args, gate, up);
  const float of_gate = sigmoid<DTYPE>(args.alpha * gate), shifted = up + args.up_shift;
  value = gate * of_gate * shifted;
  float grad_gate = scaled_grad * shifted * of_gate * (1.0f + args.alpha * gate * (1.0f - of_gate));
  float grad_up = scaled_grad * gate * of_gate;
  if (args.limit > 0.0f) {  // a gradient passes at equality
    if (!(raw_gate <= args.limit)) grad_gate = 0.0f;
    if (!(fabsf(raw_up) <= args.limit)) grad_up = 0.0f;
  }
  gate = grad_gate, up = grad_up;
}

// The features that a thread computes at a time, by PACK. 0: eight, with gate and up in runs of at least 8 each. 1, 2 or 4 (the
// interleave): four, whose gate and up are 8 numbers in a row. -1: one, anywhere.
template <int PACK>
constexpr int kFeatures = PACK == 0 ? 8 : PACK > 0 ? 4 : 1;

DEVICE int64_t gate_at(int interleave, int feature) {
  const int block = feature / interleave;
  return static_cast<int64_t>(block) * 2 * interleave + (feature - block * interleave);
}

template <int DTYPE, int PACK>
DEVICE void load_gate_up(float (&gate)[8], float (&up)[8], const ActivationArguments& args, int64_t row_at, int feature) {
  if constexpr (PACK == 0) {
    const int64_t at = row_at + gate_at(args.interleave, feature);
    load8<DTYPE>(gate, args.y, at);
    load8<DTYPE>(up, args.y, at + args.interleave);
  } else if constexpr (PACK > 0) {
    float both[8];
    load8<DTYPE>(both, args.y, row_at + 2 * feature);
#pragma unroll
    for (int i = 0; i < 4; ++i) gate[i] = both[i / PACK * 2 * PACK + i % PACK], up[i] = both[i / PACK * 2 * PACK + i % PACK + PACK];
  } else {
    const int64_t at = row_at + gate_at(args.interleave, feature);
    gate[0] = load_float(args.y, at, DTYPE), up[0] = load_float(args.y, at + args.interleave, DTYPE);
  }
}

template <int DTYPE, int PACK>
DEVICE void store_gate_up(const ActivationArguments& args, int64_t row_at, int feature, const float (&gate)[8], const float (&up)[8]) {
  if constexpr (PACK == 0) {
    const int64_t at = row_at + gate_at(args.interleave, feature);
    store8<DTYPE>(args.out, at, gate);
    store8<DTYPE>(args.out, at + args.interleave, up);
  } else if constexpr (PACK > 0) {
    float both[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) both[i / PACK * 2 * PACK + i % PACK] = gate[i], both[i / PACK * 2 * PACK + i % PACK + PACK] = up[i];
    store8<DTYPE>(args.out, row_at + 2 * feature, both);
  } else {
    const int64_t at = row_at + gate_at(args.interleave, feature);
    store1<DTYPE>(args.out, at, gate[0]);
    store1<DTYPE>(args.out, at + args.interleave, up[0]);
  }
}

template <int DTYPE, int PACK>
DEVICE void load_features(float (&values)[8], const void* from, int64_t at) {
  if constexpr (PACK == 0) load8<DTYPE>(values, from, at);
  else if constexpr (PACK > 0) load4<DTYPE>(values, from, at);
  else values[0] = load_float(from, at, DTYPE);
}

template <int DTYPE, int PACK>
DEVICE void store_features(void* to, int64_t at, const float (&values)[8]) {
  if constexpr (PACK == 0) store8<DTYPE>(to, at, values);
  else if constexpr (PACK > 0) store4<DTYPE>(to, at, values);
  else store1<DTYPE>(to, at, values[0]);
}

// The number of rows that belong to experts.
DEVICE int64_t live_rows(const ActivationArguments& args) {
  if (args.offsets == nullptr) return args.rows;
  return min(args.rows, offset_at(args.offsets, args.num_experts - 1, args.wide_offsets));
}

// SWIGLU: SwiGLU, otherwise squared ReLU. PER_ROW: the threads of a row, 32 or all threads of the block.
template <int DTYPE, bool SWIGLU, int PACK, int PER_ROW>
__global__ void __launch_bounds__(kRowThreads) activation_forward(const ActivationArguments args) {
  await_previous_kernel();
  constexpr int kStep = kFeatures<PACK>, kRows = kRowThreads / PER_ROW;
  const int64_t live = live_rows(args), width = static_cast<int64_t>(args.features) * (SWIGLU ? 2 : 1);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / PER_ROW; row < args.rows; row += static_cast<int64_t>(gridDim.x) * kRows) {
    const bool dead = row >= live;
    const float scale = dead || args.scales == nullptr ? 1.0f : load_float(args.scales, row, args.scales_dtype);
#pragma unroll 2
    for (int feature = threadIdx.x % PER_ROW * kStep; feature < args.features; feature += PER_ROW * kStep) {
      float out[8] = {};
      if (!dead) {
        float gate[8];
        if constexpr (SWIGLU) {
          float up[8];
          load_gate_up<DTYPE, PACK>(gate, up, args, row * width, feature);
#pragma unroll
          for (int i = 0; i < kStep; ++i) out[i] = swiglu<DTYPE>(args, gate[i], up[i]) * scale;
        } else {
          load_features<DTYPE, PACK>(gate, args.y, row * width + feature);
#pragma unroll
          for (int i = 0; i < kStep; ++i) {
            const float positive = gate[i] < 0.0f ? 0.0f : gate[i];  // NaN stays NaN
            out[i] = positive * positive * scale;
          }
        }
      }
      store_features<DTYPE, PACK>(args.out, row * args.features + feature, out);
    }
  }
}

// The sum over a warp, the same in all lanes and in a fixed order.
DEVICE float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

template <int DTYPE, bool SWIGLU, int PACK, int PER_ROW>
__global__ void __launch_bounds__(kRowThreads) activation_backward(const ActivationArguments args) {
  await_previous_kernel();
  __shared__ float of_warp[2][kRowThreads / 32];
  constexpr int kStep = kFeatures<PACK>, kRows = kRowThreads / PER_ROW;
  const int64_t live = live_rows(args), width = static_cast<int64_t>(args.features) * (SWIGLU ? 2 : 1);
  int turn = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / PER_ROW; row < args.rows; row += static_cast<int64_t>(gridDim.x) * kRows) {
    const bool dead = row >= live;
    const float scale = dead || args.scales == nullptr ? 1.0f : load_float(args.scales, row, args.scales_dtype);
    float sum = 0.0f;
    for (int feature = threadIdx.x % PER_ROW * kStep; feature < args.features; feature += PER_ROW * kStep) {
      float gate[8] = {}, up[8] = {}, again[8] = {};
      if (!dead) {
        float grad[8];
        load_features<DTYPE, PACK>(grad, args.grad, row * args.features + feature);
        if constexpr (SWIGLU) {
          load_gate_up<DTYPE, PACK>(gate, up, args, row * width, feature);
#pragma unroll
          for (int i = 0; i < kStep; ++i) {
            float value;
            swiglu_backward<DTYPE>(args, gate[i], up[i], grad[i] * scale, value);
            sum += grad[i] * value;
            again[i] = value * scale;
          }
        } else {
          load_features<DTYPE, PACK>(gate, args.y, row * width + feature);
#pragma unroll
          for (int i = 0; i < kStep; ++i) {
            const float positive = gate[i] < 0.0f ? 0.0f : gate[i];
            sum += grad[i] * positive * positive;
            again[i] = positive * positive * scale;
            gate[i] = 2.0f * positive * grad[i] * scale;
          }
        }
      }
      if (args.value != nullptr) store_features<DTYPE, PACK>(args.value, row * args.features + feature, again);
      if (args.out == nullptr) continue;
      if constexpr (SWIGLU) store_gate_up<DTYPE, PACK>(args, row * width, feature, gate, up);
      else store_features<DTYPE, PACK>(args.out, row * width + feature, gate);
    }
    if (args.grad_scales == nullptr) continue;
    sum = warp_sum(sum);
    if constexpr (PER_ROW > 32) {
      if (threadIdx.x % 32 == 0) of_warp[turn][threadIdx.x / 32] = sum;
      __syncthreads();  // two sets in turn: one barrier for each row
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kRowThreads / 32; ++i) sum += of_warp[turn][i];
      turn ^= 1;
    }
    if (threadIdx.x % PER_ROW == 0) store_float(args.grad_scales, row, sum, args.scales_dtype);
  }
}
