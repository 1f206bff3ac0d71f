// NVFP4 and MXFP8 weights -> 16-bit weights, for the gradient of the activation.
// Compiled at run time for kernels/cuda/prepared.py and backend.py behind common.cuh; tests/emulator/cuda_emulator.h runs it on a CPU.
// One thread decodes 16 weights: (e2m1 * (scale * global)) in float32, rounded once, as formats/nvfp4.py's dequantize.

struct DequantizeArguments {
  const uint8_t* qdata;       // (E, N, K / 2), of MXFP8 (E, N, K)
  const uint8_t* scale;       // (E, N, K / 16), of MXFP8 (E, N, K / 32)
  const float* global_scale;  // (E,) or (E, N); null for MXFP8
  uint16_t* out;              // (E, N, K)
  const int* offsets;         // (E,) row ends: experts without rows are left out; null for none
  int64_t rows;               // E * N, below 2**31
  int rows_per_global, k, n;  // rows that share a global scale
};

// True if a row of all weights belongs to an expert that is left out. (Decreasing offsets count like in `row_starts` and `count_tiles`.)
DEVICE bool is_left_out(const DequantizeArguments& args, uint32_t row) {
  if (args.offsets == nullptr) return false;
  const int expert = static_cast<int>(row / static_cast<uint32_t>(args.n));
  return args.offsets[expert] <= (expert > 0 ? args.offsets[expert - 1] : 0);
}

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
    if (is_left_out(args, item / blocks_k)) continue;
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

// Transposes 4 x 4 words of four threads, 2 lanes apart: word i of thread t becomes word t of thread i.
DEVICE void transpose4x4(uint32_t (&words)[4], int t) {
  const auto exchange = [](uint32_t& a, uint32_t& b, bool upper, int mask) {  // b of the lower thread with a of the upper one
    const uint32_t got = float_to_bits(shuffle_xor(bits_to_float(upper ? a : b), mask));
    if (upper) a = got;
    else b = got;
  };
#pragma unroll
  for (int i = 0; i < 4; i += 2) exchange(words[i], words[i + 1], t % 2, 2);
#pragma unroll
  for (int i = 0; i < 2; ++i) exchange(words[i], words[i + 2], t / 2, 4);
}

// The same for weights in layout "tiled_64x64" (`to_tiled` in formats/tiled_64x64.py): one thread decodes two words of codes, rows g
// and g + 8 of a warp's 16 and 4 of each of two steps of 16 k. Four threads exchange theirs, so that each stores 8 k in a row.
template <bool BF16>
__global__ void __launch_bounds__(256) dequantize_tiled(const DequantizeArguments args) {
  await_previous_kernel();
  const uint32_t blocks_k = args.k / 64, blocks = static_cast<uint32_t>(args.rows / 64) * blocks_k;
  const int warp = threadIdx.x / 64, lane = threadIdx.x / 2 % 32, pair = threadIdx.x % 2;
  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const uint32_t row_block = block / blocks_k, first_row = row_block * 64 + 16 * warp + lane / 4;
    const uint32_t k0 = (block - row_block * blocks_k) * 64 + 32 * pair;
    if (is_left_out(args, row_block * 64)) continue;
    const uint2 words = reinterpret_cast<const uint2*>(args.qdata)[static_cast<int64_t>(block) * 256 + threadIdx.x];
    const uint32_t scales = reinterpret_cast<const uint32_t*>(args.scale)[static_cast<int64_t>(block) * 64 + warp * 16 + lane / 4 * 2 + pair];
    uint32_t pairs[2][4];
    unpack_words(pairs[0], pairs[1], words.x, words.y);
    const uint32_t per_global = args.rows_per_global;
    const float global[2] = {args.global_scale[first_row / per_global], args.global_scale[(first_row + 8) / per_global]};
    uint32_t out[2][4];  // of the two rows, the pair of each 8 k
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t scale = rotate_left(scales, odd ? 28 : 4) >> (16 * (i % 2)) & 0xFF;  // 5 bits of exponent, 3 of mantissa
        const float factor = bits_to_float(scale << 20) * bits_to_float((106 + 127) << 23) * global[i % 2];
        const float low = e2m1((pairs[odd][i] >> 6 & 7) | (pairs[odd][i] >> 12 & 8)) * factor;
        const float high = e2m1((pairs[odd][i] >> 22 & 7) | (pairs[odd][i] >> 28 & 8)) * factor;
        out[i % 2][2 * odd + i / 2] = narrow2<BF16>(low, high);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose4x4(out[half], lane % 4);
      uint16_t* const to = args.out + static_cast<int64_t>(first_row + 8 * half) * args.k + k0 + 8 * (lane % 4);
      store16(to, out[half][0], out[half][1], out[half][2], out[half][3]);
    }
  }
}

// ---- MXFP8 (formats/mxfp8.py): global_scale is not read ----

// A float of an E4M3 code, NaN included.
DEVICE float e4m3_signed(uint32_t code) {
  const float magnitude = (code & 0x7F) == 0x7F ? bits_to_float(0x7FC00000) : e4m3(code);
  return code & 0x80 ? -magnitude : magnitude;
}
DEVICE float e8m0(uint32_t bits) { return bits_to_float(bits == 0 ? 1u << 22 : bits == 255 ? 0x7FC00000u : bits << 23); }

// One thread decodes 16 weights, as e4m3 * e8m0 in float32, rounded once.
template <bool BF16>
__global__ void __launch_bounds__(256) dequantize_mxfp8(const DequantizeArguments args) {
  await_previous_kernel();
  const int pieces_k = args.k / 16;
  const int64_t items = args.rows * pieces_k, step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; item < items; item += step) {
    if (is_left_out(args, item / pieces_k)) continue;
    const float factor = e8m0(args.scale[item / 2]);
    const uint4 codes = reinterpret_cast<const uint4*>(args.qdata)[item];
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    alignas(16) uint16_t values[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = narrow<BF16>(e4m3_signed(words[i / 4] >> (8 * (i % 4)) & 0xFF) * factor);
    uint4* out = reinterpret_cast<uint4*>(args.out + item * 16);
    out[0] = reinterpret_cast<const uint4*>(values)[0];
    out[1] = reinterpret_cast<const uint4*>(values)[1];
  }
}

// The same for weights in layout "tiled_64x64" (`to_tiled` in formats/mxfp8_tiled_64x64.py): one thread decodes four words of
// codes, rows g and g + 8 of a warp's 16 and 4 of each of two steps of 16 k.
template <bool BF16>
__global__ void __launch_bounds__(256) dequantize_mxfp8_tiled(const DequantizeArguments args) {
  await_previous_kernel();
  constexpr uint32_t kTaken = 0x87F087F0;
  const int blocks_k = args.k / 64;
  const int64_t items = args.rows / 64 * blocks_k * 256, step = static_cast<int64_t>(gridDim.x) * 256;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; item < items; item += step) {
    const int64_t block = item / 256;
    const int within = static_cast<int>(item % 256), warp = within / 64, half = within / 32 % 2, lane = within % 32;
    const int64_t first_row = block / blocks_k * 64 + 16 * warp + lane / 4;
    const int64_t k0 = block % blocks_k * 64 + 32 * half + 2 * (lane % 4);
    if (is_left_out(args, block / blocks_k * 64)) continue;
    const uint4 codes = reinterpret_cast<const uint4*>(args.qdata)[item];
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    const uint32_t scales = rotate_left(reinterpret_cast<const uint32_t*>(args.scale)[block * 32 + warp * 8 + lane / 4], 25);
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const uint32_t exponent = scales >> (16 * below + 8 * half) & 0xFF;
      const float factor = e8m0(exponent == 255 ? 255 : exponent - 88);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = (below ? words[i] << 4 ^ words[i] >> 4 : words[i]) & kTaken;
        const float low = e4m3_signed((pair >> 4 & 0x7F) | (pair >> 8 & 0x80)) * factor;
        const float high = e4m3_signed((pair >> 20 & 0x7F) | (pair >> 24 & 0x80)) * factor;
        uint16_t* out = args.out + (first_row + 8 * below) * args.k + k0 + 8 * i;
        *reinterpret_cast<uint32_t*>(out) = narrow2<BF16>(low, high);
      }
    }
  }
}
