// The RMS norm of a sum of two rows, as a warp computes it in front of a product: total = x + residual, row = total / rms(total) *
// weight, each step rounded to 16 bits as eager PyTorch rounds it.
// Compiled at run time in front of router.cu and tiled_direct.cu, behind common.cuh; calls nothing else.

struct alignas(16) Eight {
  uint16_t of[8];
};

DEVICE Eight load_eight(const uint16_t* from) {
  Eight out;
  *reinterpret_cast<uint4*>(out.of) = *reinterpret_cast<const uint4*>(from);
  return out;
}

DEVICE void store_eight(uint16_t* to, const Eight& values) { *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values.of); }

DEVICE void set_pair(Eight& values, int i, uint32_t pair) {
  values.of[i] = static_cast<uint16_t>(pair);
  values.of[i + 1] = static_cast<uint16_t>(pair >> 16);
}

DEVICE float sum_of_warp(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

// Eight numbers of the total; adds their squares.
template <bool BF16>
DEVICE Eight add_residual(const uint16_t* x, const uint16_t* residual, float& squares) {
  const Eight a = load_eight(x), b = load_eight(residual);
  Eight out;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const uint32_t pair = narrow2<BF16>(widen<BF16>(a.of[i]) + widen<BF16>(b.of[i]), widen<BF16>(a.of[i + 1]) + widen<BF16>(b.of[i + 1]));
    set_pair(out, i, pair);
    const float first = widen<BF16>(out.of[i]), second = widen<BF16>(out.of[i + 1]);
    squares += first * first + second * second;
  }
  return out;
}

DEVICE float norm_factor(float squares, int width, float epsilon) { return 1.0f / sqrtf(squares / width + epsilon); }

// Eight numbers of the total -> of the row.
template <bool BF16>
DEVICE Eight normalize(const Eight& total, const Eight& weight, float factor) {
  Eight out;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    set_pair(out, i, narrow2<BF16>(widen<BF16>(total.of[i]) * factor, widen<BF16>(total.of[i + 1]) * factor));
    const float first = widen<BF16>(out.of[i]) * widen<BF16>(weight.of[i]);
    set_pair(out, i, narrow2<BF16>(first, widen<BF16>(out.of[i + 1]) * widen<BF16>(weight.of[i + 1])));
  }
  return out;
}
