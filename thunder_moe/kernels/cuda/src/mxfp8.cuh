// Decoding of MXFP8 weights into the left operands of the tensor cores, in both layouts: E4M3 codes, a power of two per 32 k.
// Compiled behind common.cuh and ptx.cuh and in front of grouped_mm.cuh (kernels/cuda/configs.py, direct.py); calls both. nvfp4.cuh
// declares the same names for its format.
//
// A code moved under a 16-bit float's exponent and mantissa is its value times 2**-120 (bf16) or 2**-8 (fp16), subnormals too;
// the scale, a float, is multiplied. Products are exact (4 significant bits), but for fp16 that are subnormal. A scale that
// leaves the range (2**40 in bf16, 2**9 in fp16) becomes Inf, so what it scales is Inf or NaN.

constexpr int kCodesPerByte = 1, kScaleK = 32;  // kScaleK: k that share a scale
constexpr bool kGlobalScales = false;
template <bool BF16>
constexpr float kUnscale = BF16 ? 4294967296.0f : 2.0f;  // decoded weights are 2**-32 (bf16) or 2**-1 (fp16) of their value

// ---- layout "linear" ----

// An E8M0 exponent -> the 16-bit float that a row's codes are multiplied by, twice.
template <bool BF16>
DEVICE uint32_t decode_scale(uint32_t exponent) {
  if constexpr (BF16) return min(exponent + 88, 255u) * 0x00800080u;  // 2**(120 - 32) times the scale
  const float scale = bits_to_float(exponent << 23) * 128.0f;       // 2**(8 - 1) times
  return narrow2<false>(scale, scale);
}

// Four codes of consecutive k -> two registers. In each half first the code below its sign bit eight times; shifted left, it is
// in place with the sign on top.
template <bool BF16>
DEVICE void decode_word(uint32_t (&out)[2], uint32_t codes, uint32_t scale) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bytes = permute_bytes(codes, 0u, i ? 0xB3A2u : 0x9180u);
    out[i] = multiply2<BF16>(BF16 ? (bytes << 4) & 0x87F087F0u : (bytes << 7) & 0xBF80BF80u, scale);
  }
}

// A thread's part of a chunk of 128 k of its rows g and g + 8: 32 codes and a scale of each.
constexpr int kThreadScales = 32 / kScaleK, kCodePieces = 2;  // of a row; of 16 bytes
struct Weights {
  uint4 codes[2][kCodePieces];
  uint32_t scales[2];
};

// Loads one of the two rows. FULL: K is a multiple of the chunk. Otherwise k_left says how many k there are from the thread's 32 on:
// all 32 or none.
template <bool FULL, bool SCALES>
DEVICE void load_row(Weights& w, int half, const uint8_t* codes, const uint8_t* scales, int k_left) {
  const bool exists = FULL || k_left > 0;
#pragma unroll
  for (int piece = 0; piece < kCodePieces; ++piece) w.codes[half][piece] = exists ? load_weights16(codes + 16 * piece) : make_uint4(0, 0, 0, 0);
  if constexpr (SCALES) w.scales[half] = exists ? scales[0] : 0;
}

// All scales of a row in a chunk, and a thread's own in four chunks.
typedef uint32_t ChunkScales;
DEVICE ChunkScales load_chunk_scales(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
DEVICE ChunkScales no_scales() { return 0; }

// Thread s of the four that share a row has the scales of chunk s, one of each thread's k; afterwards thread t has its own of all
// four chunks.
DEVICE ChunkScales exchange_scales(ChunkScales chunk, int t) {
  // Transposes the matrix [chunk][thread]: the 2 x 2 blocks off the diagonal change places, then the elements within each block.
  const uint32_t across = __shfl_xor_sync(0xffffffffu, chunk, 2);
  const uint32_t halves = t & 2 ? permute_bytes(across, chunk, 0x7632u) : permute_bytes(chunk, across, 0x5410u);
  const uint32_t beside = __shfl_xor_sync(0xffffffffu, halves, 1);
  return t & 1 ? permute_bytes(beside, halves, 0x7351u) : permute_bytes(halves, beside, 0x6240u);
}
DEVICE uint32_t scales_of_chunk(const ChunkScales& own, int chunk) { return own >> (8 * chunk) & 0xFF; }

// The left operands of 4 of a chunk's 8 steps of 16 k: step 2 * i + j takes words 4 * i + 2 * j and the next of each row; the first
// half has the first 16 bytes.
template <bool BF16>
DEVICE void decode_half_chunk(uint32_t (&a)[4][4], const Weights& w, int part) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t scale = decode_scale<BF16>(w.scales[half] & 0xFF);
    const uint4& codes = w.codes[half][part];
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t values[2];
      decode_word<BF16>(values, words[step], scale);
      a[step][half] = values[0], a[step][2 + half] = values[1];
    }
  }
}

// ---- layout "tiled_64x64" (`to_tiled` in formats/mxfp8_tiled_64x64.py) ----

constexpr int kBlockCodes = 4096, kBlockScales = 128;  // bytes of a block of 64 rows by 64 k

// (a ^ b) & mask
DEVICE uint32_t xor_and(uint32_t a, uint32_t b, uint32_t mask) { return (a ^ b) & mask; }

// A word of codes -> registers of rows g and g + 8, times the low and the high half of a pair of scales.
template <bool BF16>
DEVICE void decode_tiled_word(uint32_t& first, uint32_t& second, uint32_t word, uint32_t scales) {
  constexpr uint32_t kTaken = 0x87F087F0, kMagnitude = 0x07F007F0;
  uint32_t upper = word & kTaken, lower = xor_and(word << 4, word >> 4, kTaken);
  if constexpr (!BF16) upper += 7 * (upper & kMagnitude), lower += 7 * (lower & kMagnitude);  // up by three bits
  first = multiply_by_half<BF16, false>(upper, scales);
  second = multiply_by_half<BF16, true>(lower, scales);
}

// The pair of scales of the first or second 32 k of a word: rows g and g + 8. A byte is the exponent of a bf16.
template <bool BF16>
DEVICE uint32_t decode_tiled_scales(uint32_t word, int half) {
  const uint32_t pair = (half ? rotate_left(word, 24) : word) & 0x7F807F80;
  if constexpr (BF16) return pair;
  const float shift = bits_to_float((127 - 81) << 23);  // 2**(7 - 88)
  return narrow2<false>(bits_to_float(pair << 16) * shift, bits_to_float(pair & 0xFFFF0000) * shift);
}

// A thread's part of a block: the codes and scales of 64 k of its rows g and g + 8. The codes of a warp's lanes lie one behind the
// other, 16 bytes each, first of 32 k, then of the other 32; so do the scales of the rows g.
struct TiledCodes {
  uint4 half[2];
};
typedef uint32_t TiledScales;
DEVICE TiledCodes load_codes(const uint4* from) { return {from[0], from[32]}; }

// The left operands of two steps of 16 k, of the first or second 32 k.
template <bool BF16>
DEVICE void decode_part(uint32_t (&first)[4], uint32_t (&second)[4], const TiledCodes& codes, const TiledScales& scales, int half, uint32_t) {
  const uint32_t pair = decode_tiled_scales<BF16>(scales, half);
  const uint4& words = codes.half[half];
  decode_tiled_word<BF16>(first[0], first[1], words.x, pair);
  decode_tiled_word<BF16>(first[2], first[3], words.y, pair);
  decode_tiled_word<BF16>(second[0], second[1], words.z, pair);
  decode_tiled_word<BF16>(second[2], second[3], words.w, pair);
}
