// 16-bit or float32 weights -> NVFP4 or MXFP8 codes and scales in layout "linear"; layout "linear" -> "tiled_64x64", and back.
// Compiled at run time for kernels/cuda/backend.py behind dequantize.cu; tests/emulator/cuda_emulator.h runs it on a CPU.
// A thread rounds a block of 16 weights (MXFP8: 32). Byte for byte formats/nvfp4.py: the same float32 operations in the same order,
// divisions rounded to nearest, nothing contracted to a fused multiply-add.

struct QuantizeArguments {
  const void* weight;        // (E, N, K), contiguous; null where `codes` are laid out anew
  const uint8_t* codes;      // (E, N, K / 2), to lay out anew; of MXFP8 (E, N, K)
  const uint8_t* scales;     // (E, N, K / 16), E4M3 where linear; of MXFP8 (E, N, K / 32), E8M0
  const uint8_t* scale_map;  // (256,): the byte of "tiled_64x64" for each E4M3 byte, or the inverse; null for MXFP8
  uint32_t* amax;            // (E,): bits of the largest magnitude, 0 to begin with
  uint8_t* qdata;            // result
  uint8_t* scale;            // result
  float* global_scale;       // (E,), result; null for MXFP8
  unsigned long long* sums;  // (E, 2), of `unbiased_scale` in formats/nvfp4.py, 0 to begin with; null without a search
  int n, k;
  int blocks_per_expert;  // thread blocks that share an expert
};

#ifdef CUDA_EMULATOR
DEVICE float divide(float a, float b) { return a / b; }
DEVICE float multiply(float a, float b) { return a * b; }
DEVICE float add(float a, float b) { return a + b; }
DEVICE float fused(float a, float b, float c) { return std::fma(a, b, c); }
#else
DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#endif

// 16 weights as float32. DTYPE: 0 float32, 1 bfloat16, 2 float16.
template <int DTYPE>
DEVICE void load_block(float (&out)[16], const void* weight, int64_t block) {
  constexpr int kPieces = DTYPE == 0 ? 4 : 2;
  uint4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) pieces[i] = static_cast<const uint4*>(weight)[block * kPieces + i];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const uint32_t words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (DTYPE == 0) {
        out[4 * i + j] = bits_to_float(words[j]);
      } else {
        out[8 * i + 2 * j] = widen<DTYPE == 1>(static_cast<uint16_t>(words[j]));
        out[8 * i + 2 * j + 1] = widen<DTYPE == 1>(static_cast<uint16_t>(words[j] >> 16));
      }
    }
  }
}

DEVICE uint32_t magnitude_bits(float value) { return float_to_bits(value) & 0x7FFFFFFF; }  // NaN is above Inf

// The largest magnitude of each expert, as bits.
template <int DTYPE>
__global__ void __launch_bounds__(256) largest_magnitude(const QuantizeArguments args) {
  await_previous_kernel();
  __shared__ uint32_t of_warp[8];
  const int64_t expert = blockIdx.x / args.blocks_per_expert, items = static_cast<int64_t>(args.n) * (args.k / 16);
  const int64_t step = static_cast<int64_t>(args.blocks_per_expert) * 256;
  uint32_t largest = 0;
  for (int64_t item = static_cast<int64_t>(blockIdx.x % args.blocks_per_expert) * 256 + threadIdx.x; item < items; item += step) {
    float values[16];
    load_block<DTYPE>(values, args.weight, expert * items + item);
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max(largest, magnitude_bits(values[i]));
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < 8; ++warp) largest = max(largest, of_warp[warp]);
    atomicMax(args.amax + expert, largest);
  }
}

// amax / 2688, not below the smallest normal float; 1 where all weights are 0.
DEVICE float global_scale_of(uint32_t amax) {
  return amax == 0 ? 1.0f : fmaxf(divide(bits_to_float(amax), 2688.0f), bits_to_float(1 << 23));
}

// E4M3 of a value from 0 to 448, to nearest even.
DEVICE uint32_t to_e4m3(float value) {
  if (value < bits_to_float(121 << 23)) {  // 2^-6: below, steps of 2^-9, the last place of 2^14
    return float_to_bits(add(value, 16384.0f)) - float_to_bits(16384.0f);
  }
  const uint32_t bits = float_to_bits(value);
  return ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
}

// Divides by the same number many times, each quotient rounded to nearest as `divide` does: with the correctly rounded
// reciprocal, one step of correction is exact (Markstein, IBM J. Res. Dev. 34-1, 1990) where nothing is subnormal.
struct Divisor {
  float value, inverse;
  bool exact;  // the remainders of quotients that matter, 2^-3 and more, are normal floats

  METHOD explicit Divisor(float by)
      : value(by), inverse(divide(1.0f, by)), exact(by > bits_to_float((127 - 60) << 23) && by < bits_to_float((127 + 60) << 23)) {}

  METHOD float into(float dividend) const {
    if (!exact) return divide(dividend, value);
    const float quotient = multiply(dividend, inverse);
    return fused(fused(-quotient, value, dividend), inverse, quotient);
  }
};

// 2^22 times the power of two of a magnitude up to 6 (1 for magnitudes below 1), as bits: added to it, the sum ends in the place of
// E2M1's last bit, in steps of 1/2, 1 or 2.
DEVICE uint32_t rounding_bits(float scaled) { return max(float_to_bits(scaled) & 0x7F800000, 0x3F800000u) + (22 << 23); }

// The code, 0 to 7, of a magnitude over its scales: to nearest even, not above 6.
DEVICE uint32_t magnitude_code(float scaled) {
  scaled = fminf(scaled, 6.0f);
  const uint32_t shift = rounding_bits(scaled);
  return (float_to_bits(add(scaled, bits_to_float(shift))) & 7) + ((shift - ((127 + 22) << 23)) >> 22);
}

// The value of that code.
DEVICE float magnitude_value(float scaled) {
  scaled = fminf(scaled, 6.0f);
  const float shift = bits_to_float(rounding_bits(scaled));
  return add(add(scaled, shift), -shift);
}

// The order of the sum is formats/nvfp4.py's.
DEVICE float sum_of_16(float (&numbers)[16]) {
#pragma unroll
  for (int half = 8; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) numbers[i] = add(numbers[i], numbers[i + half]);
  return numbers[0];
}

// The magnitudes of a block that is rounded with a scale, relative to the global scale.
DEVICE void rounded_magnitudes(float (&rounded)[16], const float (&values)[16], float scale, float global_scale) {
  const Divisor divisor(multiply(scale, global_scale));
#pragma unroll
  for (int i = 0; i < 16; ++i)
    rounded[i] = multiply(divisor.value > 0.0f ? magnitude_value(divisor.into(fabsf(values[i]))) : 0.0f, scale);
}

DEVICE float squared_error(const float (&values)[16], const float (&relative)[16], float scale, float global_scale) {
  float error[16];
  rounded_magnitudes(error, values, scale, global_scale);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float difference = add(error[i], -relative[i]);
    error[i] = multiply(difference, difference);
  }
  return sum_of_16(error);
}

// Sums over blocks of what `unbiased_scale` in formats/nvfp4.py takes.
struct BiasSums {
  unsigned long long squares = 0, products = 0;

  METHOD void add_block(const float (&values)[16], const float (&relative)[16], float scale, float global_scale) {
    float square[16], product[16];
    rounded_magnitudes(product, values, scale, global_scale);
#pragma unroll
    for (int i = 0; i < 16; ++i) square[i] = multiply(relative[i], relative[i]), product[i] = multiply(relative[i], product[i]);
    squares += static_cast<unsigned long long>(rintf(sum_of_16(square)));
    products += static_cast<unsigned long long>(rintf(sum_of_16(product)));
  }
};

// A block of 16 weights -> its E4M3 scale, and codes in two words, the first weight in the lowest bits. A search adds to the sums.
template <bool SEARCH>
DEVICE uint32_t quantize_block(uint2& codes, BiasSums& sums, const float (&values)[16], float global_scale) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(values[i]));
  uint32_t scale = to_e4m3(fminf(divide(largest, multiply(6.0f, global_scale)), 448.0f));
  if constexpr (SEARCH) {
    constexpr int kSteps[5] = {0, -1, 1, 4, 5};
    float relative[16], least = bits_to_float(0x7F800000);
#pragma unroll
    for (int i = 0; i < 16; ++i) relative[i] = divide(fabsf(values[i]), global_scale);
    const int usual = static_cast<int>(scale);
    for (int s = 0; s < 5; ++s) {
      const uint32_t tried = static_cast<uint32_t>(min(max(usual + kSteps[s], 0), 126));
      const float error = squared_error(values, relative, e4m3(tried), global_scale);
      if (error < least) least = error, scale = tried;
    }
    sums.add_block(values, relative, e4m3(scale), global_scale);
  }
  const Divisor divisor(multiply(e4m3(scale), global_scale));
  uint32_t words[2] = {0, 0};
  if (divisor.value > 0.0f) {  // a block whose scale is 0 is all zeros, without signs
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t sign = float_to_bits(values[i]) >> 31 << 3;
      words[i / 8] |= (magnitude_code(divisor.into(fabsf(values[i]))) | sign) << (4 * (i % 8));
    }
  }
  codes = make_uint2(words[0], words[1]);
  return scale;
}

template <int DTYPE, bool SEARCH>
__global__ void __launch_bounds__(256) quantize(const QuantizeArguments args) {
  await_previous_kernel();
  const int64_t expert = blockIdx.x / args.blocks_per_expert, items = static_cast<int64_t>(args.n) * (args.k / 16);
  const int64_t step = static_cast<int64_t>(args.blocks_per_expert) * 256;
  const float global_scale = global_scale_of(args.amax[expert]);
  const int64_t first = static_cast<int64_t>(blockIdx.x % args.blocks_per_expert) * 256 + threadIdx.x;
  if (first == 0) args.global_scale[expert] = global_scale;
  BiasSums sums;
  for (int64_t item = first; item < items; item += step) {
    const int64_t at = expert * items + item;
    float values[16];
    load_block<DTYPE>(values, args.weight, at);
    uint2 codes;
    args.scale[at] = static_cast<uint8_t>(quantize_block<SEARCH>(codes, sums, values, global_scale));
    reinterpret_cast<uint2*>(args.qdata)[at] = codes;
  }
  if constexpr (SEARCH) {
    atomicAdd(args.sums + 2 * expert, sums.squares);
    atomicAdd(args.sums + 2 * expert + 1, sums.products);
  }
}

// A byte of two codes, the even k in the low nibble -> a register of "tiled_64x64" (`to_tiled` in formats/tiled_64x64.py).
DEVICE uint32_t code_register(uint32_t byte) {
  return (byte & 7) << 6 | (byte & 8) << 12 | (byte & 0x70) << 18 | (byte & 0x80) << 24;
}
DEVICE uint32_t codes_of(uint32_t code_register) {
  return (code_register >> 6 & 7) | (code_register >> 12 & 8) | (code_register >> 18 & 0x70) | (code_register >> 24 & 0x80);
}

// The byte of "tiled_64x64" that stands for an E4M3 byte. Bytes of 128 and more are not block scales; a table has them.
DEVICE uint32_t scale_byte(const QuantizeArguments& args, uint32_t scale) {
  if (scale >= 128) return args.scale_map[scale];
  // The upper bits of a small integer as float32 are its exponent and 3 bits of mantissa.
  return scale >= 8 ? scale + 112 : scale > 0 ? (float_to_bits(static_cast<float>(scale)) >> 20) - 920 : 0;
}

// The upper one of the two rows of a block's word of scales.
DEVICE int upper_row_of_scales(int word) { return word / 16 * 16 + word / 2 % 8; }

// Codes and scales in layout "linear" -> "tiled_64x64", or back, a block of 64 x 64 weights at a time. Shared memory has the block
// in the order of "linear".
template <bool TO_TILED>
__global__ void __launch_bounds__(256) convert_layout(const QuantizeArguments args) {
  await_previous_kernel();
  __shared__ uint4 codes[64][3];  // 32 bytes of a row, and 16 unused: rows begin in different banks
  __shared__ uint8_t scales[64][4];
  constexpr uint32_t kInFirst = 0x06030603;
  const int blocks_k = args.k / 64, blocks = args.n / 64 * blocks_k, thread = threadIdx.x;
  const int64_t expert = blockIdx.x / args.blocks_per_expert;
  const int row = thread / 4, column = thread % 4;
  const int warp = thread / 64, lane = thread / 2 % 32, pair = thread % 2;
  for (int block = blockIdx.x % args.blocks_per_expert; block < blocks; block += args.blocks_per_expert) {
    const int64_t item = (expert * args.n + block / blocks_k * 64 + row) * (args.k / 16) + block % blocks_k * 4 + column;
    if constexpr (TO_TILED) {
      const uint32_t scale = args.scales[item];
      uint2 words = reinterpret_cast<const uint2*>(args.codes)[item];
      if (scale == 0) words = make_uint2(0, 0);
      reinterpret_cast<uint2*>(codes[row])[column] = words;
      scales[row][column] = static_cast<uint8_t>(scale_byte(args, scale));
    } else {
      const uint2 words = reinterpret_cast<const uint2*>(args.codes)[(expert * blocks + block) * 256 + thread];
      uint32_t registers[2][4];
      unpack_words(registers[0], registers[1], words.x, words.y);
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        uint8_t* const bytes = reinterpret_cast<uint8_t*>(&codes[16 * warp + lane / 4 + 8 * below][pair]) + lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes[4 * i] = static_cast<uint8_t>(codes_of(registers[i / 2][i % 2 * 2 + below]));
      }
      if (thread < 64) {
        const int upper = upper_row_of_scales(thread), step = 2 * pair;
        const uint32_t bytes = rotate_left(reinterpret_cast<const uint32_t*>(args.scales)[(expert * blocks + block) * 64 + thread], 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) scales[upper + i / 2 * 8][step + i % 2] = args.scale_map[bytes >> (8 * i) & 0xFF];
      }
    }
    __syncthreads();
    if constexpr (TO_TILED) {
      uint32_t registers[8];  // of an even step of 16 k, and of the odd one behind it
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const uint4 bytes = codes[16 * warp + lane / 4 + 8 * below][pair];
        const uint32_t steps[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) registers[2 * i + below] = code_register(steps[i] >> (8 * (lane % 4)) & 0xFF);
      }
      const uint32_t shared = registers[3] >> 6 | rotate_left(registers[7], 20);
      uint2 out;
      out.x = registers[0] | registers[1] >> 4 | rotate_left(registers[2], 22) | (shared & kInFirst);
      out.y = registers[4] | registers[5] >> 4 | rotate_left(registers[6], 22) | rotate_left(shared & ~kInFirst, 30);
      reinterpret_cast<uint2*>(args.qdata)[(expert * blocks + block) * 256 + thread] = out;
      if (thread < 64) {
        const int upper = upper_row_of_scales(thread), step = 2 * pair;
        const uint32_t bytes = scales[upper][step] | scales[upper][step + 1] << 8 | scales[upper + 8][step] << 16 |
                               static_cast<uint32_t>(scales[upper + 8][step + 1]) << 24;
        reinterpret_cast<uint32_t*>(args.scale)[(expert * blocks + block) * 64 + thread] = rotate_left(bytes, 28);
      }
    } else {
      reinterpret_cast<uint2*>(args.qdata)[item] = reinterpret_cast<const uint2*>(codes[row])[column];
      args.scale[item] = scales[row][column];
    }
    __syncthreads();
  }
}

// ---- MXFP8 (formats/mxfp8.py) ----

// A thread rounds a block of 32 weights: the scale is the smallest power of two with which the largest is at most 448. It also
// finds the largest magnitude of each expert, which tells whether all weights are finite.
template <int DTYPE>
__global__ void __launch_bounds__(256) quantize_mxfp8(const QuantizeArguments args) {
  await_previous_kernel();
  const int64_t expert = blockIdx.x / args.blocks_per_expert, items = static_cast<int64_t>(args.n) * (args.k / 32);
  const int64_t step = static_cast<int64_t>(args.blocks_per_expert) * 256;
  uint32_t largest = 0;
  for (int64_t item = static_cast<int64_t>(blockIdx.x % args.blocks_per_expert) * 256 + threadIdx.x; item < items; item += step) {
    const int64_t at = expert * items + item;
    float values[2][16];
    uint32_t bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_block<DTYPE>(values[half], args.weight, 2 * at + half);
#pragma unroll
      for (int i = 0; i < 16; ++i) bits = max(bits, magnitude_bits(values[half][i]));
    }
    largest = max(largest, bits);
    const int scale = max(static_cast<int>(bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000), 0);
    const float inverse = bits_to_float(static_cast<uint32_t>(scale == 0 ? 127 : 254 - scale) << 23);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t sign = float_to_bits(values[half][i]) >> 31 << 7;
        words[i / 4] |= (to_e4m3(multiply(fabsf(values[half][i]), inverse)) & 0x7F | sign) << (8 * (i % 4));
      }
      reinterpret_cast<uint4*>(args.qdata)[2 * at + half] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    args.scale[at] = static_cast<uint8_t>(scale);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
  if (threadIdx.x % 32 == 0) atomicMax(args.amax + expert, largest);
}

// Two codes of consecutive k -> a register of "tiled_64x64" (`to_tiled` in formats/mxfp8_tiled_64x64.py).
DEVICE uint32_t mxfp8_register(uint32_t codes) {
  return (codes & 0x7F) << 4 | (codes & 0x80) << 8 | (codes & 0x7F00) << 12 | (codes & 0x8000) << 16;
}
// The inverse; bits of the other register of a word are ignored.
DEVICE uint16_t mxfp8_codes_of(uint32_t word) {
  return static_cast<uint16_t>((word >> 4 & 0x7F) | (word >> 8 & 0x80) | (word >> 12 & 0x7F00) | (word >> 16 & 0x8000));
}

// The word of the registers of two rows: `_pack` of formats/mxfp8_tiled_64x64.py.
DEVICE uint32_t mxfp8_word(uint32_t first, uint32_t second) {
  const uint32_t left = second ^ ((first << 4 ^ first >> 4) & 0x87F087F0);
  uint32_t word = first | (left & 0x07000700) << 4 | (left & 0x00700070) >> 4, bit = 0;
#pragma unroll
  for (int place = 31; place > 0; place -= 8) {
    bit ^= left >> place & 1;
    word |= bit << (place - 4);
  }
  return word;
}

// As `convert_layout`.
template <bool TO_TILED>
__global__ void __launch_bounds__(256) convert_layout_mxfp8(const QuantizeArguments args) {
  await_previous_kernel();
  __shared__ uint4 codes[64][5];  // 64 bytes of a row, and 16 unused: rows begin in different banks
  __shared__ uint16_t scales[64];
  const int blocks_k = args.k / 64, blocks = args.n / 64 * blocks_k, thread = threadIdx.x;
  const int64_t expert = blockIdx.x / args.blocks_per_expert;
  const int warp = thread / 64, half = thread / 32 % 2, g = thread / 4 % 8, t = thread % 4;
  for (int block = blockIdx.x % args.blocks_per_expert; block < blocks; block += args.blocks_per_expert) {
    const int64_t row = expert * args.n + block / blocks_k * 64, column = block % blocks_k;
    uint16_t* const upper = reinterpret_cast<uint16_t*>(codes[16 * warp + g]) + 16 * half + t;
    uint16_t* const lower = reinterpret_cast<uint16_t*>(codes[16 * warp + g + 8]) + 16 * half + t;
    if constexpr (TO_TILED) {
      codes[thread / 4][thread % 4] = reinterpret_cast<const uint4*>(args.codes)[(row + thread / 4) * (args.k / 16) + 4 * column + thread % 4];
      if (thread < 64) scales[thread] = reinterpret_cast<const uint16_t*>(args.scales)[(row + thread) * (args.k / 64) + column];
    } else {
      const uint4 tiled = reinterpret_cast<const uint4*>(args.codes)[(expert * blocks + block) * 256 + thread];
      const uint32_t words[4] = {tiled.x, tiled.y, tiled.z, tiled.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        upper[4 * i] = mxfp8_codes_of(words[i]);
        lower[4 * i] = mxfp8_codes_of(words[i] << 4 ^ words[i] >> 4);
      }
      if (thread < 32) {
        const int above = thread / 8 * 16 + thread % 8;
        const uint32_t bytes = rotate_left(reinterpret_cast<const uint32_t*>(args.scales)[(expert * blocks + block) * 32 + thread], 25);
        uint32_t pairs[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t exponent = bytes >> (8 * i) & 0xFF;
          pairs[i / 2] |= (exponent == 255 ? 255 : exponent - 88 & 0xFF) << (8 * (i % 2));
        }
        scales[above] = static_cast<uint16_t>(pairs[0]), scales[above + 8] = static_cast<uint16_t>(pairs[1]);
      }
    }
    __syncthreads();
    if constexpr (TO_TILED) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = mxfp8_word(mxfp8_register(upper[4 * i]), mxfp8_register(lower[4 * i]));
      reinterpret_cast<uint4*>(args.qdata)[(expert * blocks + block) * 256 + thread] = make_uint4(words[0], words[1], words[2], words[3]);
      if (thread < 32) {
        const int above = thread / 8 * 16 + thread % 8;
        const uint32_t pairs[2] = {scales[above], scales[above + 8]};
        uint32_t bytes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) bytes |= min((pairs[i / 2] >> (8 * (i % 2)) & 0xFF) + 88, 255u) << (8 * i);
        reinterpret_cast<uint32_t*>(args.scale)[(expert * blocks + block) * 32 + thread] = rotate_left(bytes, 7);
      }
    } else {
      reinterpret_cast<uint4*>(args.qdata)[(row + thread / 4) * (args.k / 16) + 4 * column + thread % 4] = codes[thread / 4][thread % 4];
      if (thread < 64) reinterpret_cast<uint16_t*>(args.scale)[(row + thread) * (args.k / 64) + column] = scales[thread];
    }
    __syncthreads();
  }
}
