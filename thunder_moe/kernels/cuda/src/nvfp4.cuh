// Decoding of NVFP4 weights into the left operands of the tensor cores, in both layouts: E2M1 codes, an E4M3 scale per 16 k.
// Compiled behind common.cuh and ptx.cuh and in front of grouped_mm.cuh (kernels/cuda/configs.py, direct.py) or packed_wgmma.cu
// (linear.py); calls both. mxfp8.cuh declares the same names for its format.

constexpr int kCodesPerByte = 2, kScaleK = 16;  // kScaleK: k that share a scale
constexpr bool kGlobalScales = true;            // there is one per expert or row
template <bool BF16>
constexpr float kUnscale = 256.0f;  // decoded weights are 2**-8 of their value, see decode

DEVICE uint2 load8(const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); }

// ---- layout "linear" ----

// Two E4M3 scales (bytes 0 and 1 of `pair`) -> two 16-bit floats, times 2**118 (bf16) or 2**6 (fp16).
// E4M3's exponent and mantissa, moved under a 16-bit float's, give the value times 2**-120 (bf16) or 2**-8 (fp16),
// subnormals too; the rest is multiplied, in two steps for bf16, because a float cannot hold 2**238. Scales are not negative.
template <bool BF16>
DEVICE uint32_t decode_scales(uint32_t pair) {
  const uint32_t bits = permute_bytes(pair, 0u, 0x4140u);
  if constexpr (BF16) return multiply2<true>(multiply2<true>(bits << 4, 0x7B007B00u), 0x7B007B00u);  // 2**119 twice
  else return multiply2<false>(bits << 7, 0x74007400u);  // 2**14
}

// Each of two scales twice, for the two values of a register.
DEVICE void spread_scales(uint32_t (&scale)[2], uint32_t both) {
  scale[0] = permute_bytes(both, 0u, 0x1010u);
  scale[1] = permute_bytes(both, 0u, 0x3232u);
}

// The two E2M1 codes of byte i of `codes` (low nibble: low half) times their scale -> two 16-bit floats, 2**-8 of the value;
// `shifted` is codes << 4. A code's exponent and mantissa, moved under a 16-bit float's, give its value times 2**-126 (bf16) or
// 2**-14 (fp16), subnormals too. The products are exact: 2 significant bits times 4.
template <bool BF16>
DEVICE uint32_t decode_byte(uint32_t codes, uint32_t shifted, int i, uint32_t scale) {
  // In each half: the byte whose upper nibble is the code, below its sign bit eight times. Shifted left, the code's bits are in
  // place with the sign on top. The shift can be a multiplication, which relieves the pipeline of the logical operations.
  const uint32_t bytes = permute_bytes(shifted, codes, 0xC480u + i * 0x1111u);
  return multiply2<BF16>(BF16 ? (bytes << 2) & 0x81C081C0u : (bytes << 5) & 0x8E008E00u, scale);
}

// Eight codes (low nibble first) of one scale -> four registers.
template <bool BF16>
DEVICE void decode(uint32_t codes, uint32_t scale, uint32_t (&out)[4]) {
  const uint32_t shifted = codes << 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = decode_byte<BF16>(codes, shifted, i, scale);
}

// A thread's part of a chunk of 128 k of its rows g and g + 8: 32 codes and 2 scales of each.
constexpr int kThreadScales = 32 / kScaleK, kCodePieces = 1;  // of a row; of 16 bytes
struct Weights {
  uint4 codes[2][kCodePieces];
  uint32_t scales[2];
};

// Loads one of the two rows. FULL: K is a multiple of the chunk. Otherwise k_left says how many k there are from the thread's 32 on.
template <bool FULL, bool SCALES>
DEVICE void load_row(Weights& w, int half, const uint8_t* codes, const uint8_t* scales, int k_left) {
  if constexpr (FULL) {
    w.codes[half][0] = load_weights16(codes);
    if constexpr (SCALES) w.scales[half] = *reinterpret_cast<const uint16_t*>(scales);
  } else {
    w.codes[half][0] = make_uint4(0, 0, 0, 0);
    w.scales[half] = 0;
    if (k_left > 0) {
      const uint2 low = load8(codes);
      w.codes[half][0].x = low.x, w.codes[half][0].y = low.y;
      w.scales[half] = scales[0];
    }
    if (k_left > 16) {
      const uint2 high = load8(codes + 8);
      w.codes[half][0].z = high.x, w.codes[half][0].w = high.y;
      w.scales[half] |= static_cast<uint32_t>(scales[1]) << 8;
    }
  }
}

// All scales of a row in a chunk, and a thread's own in four chunks.
typedef uint2 ChunkScales;
DEVICE ChunkScales load_chunk_scales(const uint8_t* p) { return load8(p); }
DEVICE ChunkScales no_scales() { return make_uint2(0, 0); }

// Thread s of the four that share a row has the scales of chunk s, two of each thread's k. Afterwards thread t has its own two
// scales of all four chunks: of chunks 0 and 1 in x, of chunks 2 and 3 in y.
DEVICE uint2 exchange_scales(uint2 chunk, int t) {
  const bool odd = t % 2, high = t / 2;
  const uint32_t mine = high ? chunk.y : chunk.x;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? chunk.x : chunk.y, 2);
  const uint32_t low = high ? other : mine, up = high ? mine : other;  // of chunks t % 2 and t % 2 + 2
  const uint32_t own = permute_bytes(low, up, odd ? 0x7632u : 0x5410u);
  const uint32_t next = __shfl_xor_sync(0xffffffffu, permute_bytes(low, up, odd ? 0x5410u : 0x7632u), 1);
  const uint32_t even = odd ? next : own, uneven = odd ? own : next;
  return make_uint2(permute_bytes(even, uneven, 0x5410u), permute_bytes(even, uneven, 0x7632u));
}
DEVICE uint32_t scales_of_chunk(const ChunkScales& own, int chunk) {
  const uint32_t two_chunks = chunk < 2 ? own.x : own.y;
  return chunk % 2 ? two_chunks >> 16 : two_chunks;
}

// The left operands of 4 of a chunk's 8 steps of 16 k: step 2 * i + j takes bytes 2 * j and 2 * j + 1 of word i of each
// row; the first half has words 0 and 1.
template <bool BF16>
DEVICE void decode_half_chunk(uint32_t (&a)[4][4], const Weights& w, int part) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t scale[2];
    spread_scales(scale, decode_scales<BF16>(w.scales[half]));
    const uint32_t words[4] = {w.codes[half][0].x, w.codes[half][0].y, w.codes[half][0].z, w.codes[half][0].w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t values[4];
      decode<BF16>(words[2 * part + i], scale[part], values);
      a[2 * i][half] = values[0], a[2 * i][2 + half] = values[1];
      a[2 * i + 1][half] = values[2], a[2 * i + 1][2 + half] = values[3];
    }
  }
}

// ---- layout "tiled_64x64" (`to_tiled` in formats/tiled_64x64.py) ----

constexpr int kBlockCodes = 2048, kBlockScales = 256;  // bytes of a block of 64 rows by 64 k

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

// A thread's part of a block: the codes and scales of 64 k of its rows g and g + 8. The codes of a warp's lanes lie one behind the
// other, 16 bytes each; so do the scales of the rows g.
typedef uint4 TiledCodes;
typedef uint2 TiledScales;
DEVICE TiledCodes load_codes(const uint4* from) { return *from; }

// The left operands of two steps of 16 k, of the first or second 32 k. `top`: see decode_scales_of_step.
template <bool BF16>
DEVICE void decode_part(uint32_t (&first)[4], uint32_t (&second)[4], const TiledCodes& codes, const TiledScales& scales, int half, uint32_t top) {
  decode_steps<BF16>(first, second, half ? codes.z : codes.x, half ? codes.w : codes.y, half ? scales.y : scales.x, top);
}
