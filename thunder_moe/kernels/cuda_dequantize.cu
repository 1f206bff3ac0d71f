// NVFP4 weights -> 16-bit weights, for the gradient of the activation.
// Compiled at run time by kernels/cuda.py; run on a CPU by tests/kernels/cuda_emulator.h.
// One thread decodes a block of 16 weights: (e2m1 * (scale * global)) in float32, rounded once, as nvfp4.dequantize.

struct DequantizeArguments {
  const uint8_t* qdata;       // (E, N, K / 2)
  const uint8_t* scale;       // (E, N, K / 16)
  const float* global_scale;  // (E,) or (E, N)
  uint16_t* out;              // (E, N, K)
  int64_t rows;               // E * N
  int rows_per_global, k;     // rows that share a global scale
};

// The bits moved under a float's exponent and mantissa, times the power of two that corrects the bias.
DEVICE float e2m1(uint32_t code) {
  const float magnitude = bits_to_float((code & 7) << 22) * bits_to_float((126 + 127) << 23);
  return code & 8 ? -magnitude : magnitude;
}
DEVICE float e4m3(uint32_t bits) {
  return bits_to_float((bits & 0x7F) << 20) * bits_to_float((120 + 127) << 23);
}

template <bool BF16>
__global__ void __launch_bounds__(256) dequantize(const DequantizeArguments args) {
  await_previous_kernel();
  const int blocks_k = args.k / 16;
  const int64_t items = args.rows * blocks_k, step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; item < items; item += step) {
    const float factor = e4m3(args.scale[item]) * args.global_scale[item / blocks_k / args.rows_per_global];
    const uint2 codes = *reinterpret_cast<const uint2*>(args.qdata + item * 8);
    alignas(16) uint16_t values[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = narrow<BF16>(e2m1((i < 8 ? codes.x : codes.y) >> (4 * (i % 8))) * factor);
    uint4* out = reinterpret_cast<uint4*>(args.out + item * 16);
    out[0] = reinterpret_cast<const uint4*>(values)[0];
    out[1] = reinterpret_cast<const uint4*>(values)[1];
  }
}
