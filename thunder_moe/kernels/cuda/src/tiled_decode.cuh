// Decoding of weights in layout "tiled_64x64" (`to_tiled` in formats/tiled_64x64.py) into the left operands of the tensor cores.
// Compiled behind grouped_mm.cuh and in front of tiled_mma.cu or tiled_wgmma.cu (kernels/cuda/configs.py); calls ptx.cuh, and
// unpack_words of common.cuh.

constexpr int kBlock = 64;  // rows, and k, of a block of weights
constexpr int kBlockCodes = 2048 / 16, kBlockScales = 256 / 16;  // of a block, in units of 16 bytes

// A pair of codes where a bf16 has its sign and exponent, all other bits zero, times the low or high half of a pair of
// scales -> two 16-bit floats, 2**-8 of the values. For fp16 the exponent moves up by three bits.
template <bool BF16, bool HIGH>
DEVICE uint32_t scale_pair(uint32_t pair, uint32_t scales) {
  if constexpr (!BF16) pair += 7 * (pair & 0x01C001C0);
  return multiply_by_half<BF16, HIGH>(pair, scales);
}

// The pair of scales of the even (odd) step of a word, 8 bits at bit 4 of each half once the word is rotated left by 8 (by 0)
// -> two 16-bit floats, times 2**118 (bf16) or 2**6 (fp16). The scale's 5 bits of exponent and 3 of mantissa become the lowest
// bits of the exponent and the highest of the mantissa of a 16-bit float; `top`: 0x70007000.
template <bool BF16>
DEVICE uint32_t decode_scales_of_step(uint32_t word, bool odd, uint32_t top) {
  if constexpr (BF16) return ((odd ? word : rotate_left(word, 8)) & 0x0FF00FF0) | top;
  else return (odd ? word << 3 : rotate_left(word, 11)) & 0x7F807F80;
}

// Two words of codes and their word of scales -> the left operands of two steps of 16 k.
template <bool BF16>
DEVICE void decode_steps(uint32_t (&first)[4], uint32_t (&second)[4], uint32_t even, uint32_t odd, uint32_t scales, uint32_t top) {
  unpack_words(first, second, even, odd);
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t(&a)[4] = step ? second : first;
    const uint32_t scale = decode_scales_of_step<BF16>(scales, step, top);  // of rows g and g + 8
    a[0] = scale_pair<BF16, false>(a[0], scale);
    a[1] = scale_pair<BF16, true>(a[1], scale);
    a[2] = scale_pair<BF16, false>(a[2], scale);
    a[3] = scale_pair<BF16, true>(a[3], scale);
  }
}
