// The gradient of a grouped GEMM's rows from NVFP4 weights in layout "tiled_64x64", by wgmma (SM90).
// Compiled at run time for kernels/cuda/prepared.py behind nvfp4.cuh and tiled_wgmma.cu; tests/emulator/cuda_emulator.h runs it on a CPU.
//
// The GEMM of tiled_wgmma.cu with weights (E, K, N) in place of (E, N, K): a warp decodes 16 columns of a block and transposes them in
// registers. (packed_wgmma.cu writes and reads more shared memory, and takes 1619 us instead of 1380: Qwen3-30B-A3B's gate and up, 16384
// tokens, H200.)

#if defined(CUDA_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Bulk copies of a tile's weights, to the same places as in `WeightCopies`; K of the GEMM is N of the weight.
template <int BLOCKS, int K_BLOCKS>
struct ColumnCopies {
  const uint8_t *codes[BLOCKS], *scales[BLOCKS];
  CachePolicy policy;
  int columns;  // blocks beside each other

  METHOD ColumnCopies(const GemmArguments& args, int expert, int first_feature, int k_block) : policy(cache_policy(args.read_once)), columns(args.n / kBlock) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const int64_t from = (static_cast<int64_t>(expert) * (args.k / kBlock) + k_block) * columns + block_of_expert<false>(args, first_feature, block);
      codes[block] = args.qdata + from * kBlockCodes;
      scales[block] = args.scale + from * kBlockScales;
    }
  }

  METHOD void operator()(uint4* to_codes, uint4* to_scales, int count, MbarrierAddress barrier) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
      for (int i = 0; i < count; ++i) {
        copy_bulk(to_codes + (block * K_BLOCKS + i) * (kBlockCodes / 16), codes[block], kBlockCodes, barrier, policy);
        copy_bulk(to_scales + (block * K_BLOCKS + i) * (kBlockScales / 16), scales[block], kBlockScales, barrier, policy);
        codes[block] += static_cast<int64_t>(columns) * kBlockCodes, scales[block] += static_cast<int64_t>(columns) * kBlockScales;
      }
  }
};

// A warp's 16 columns of a block of 64 rows by 64 columns: for each 16 rows a word of eight codes, and the word beside it, which has a
// part of its fourth pair (`to_tiled` in formats/tiled_64x64.py).
struct ColumnsOfBlock {
  template <bool SWIGLU, int BLOCKS, int K_BLOCKS>
  using Copies = ColumnCopies<BLOCKS, K_BLOCKS>;
  uint2 words[4];
  uint32_t scales[4];

  static METHOD int codes_at(int warp, int lane) { return lane * 16 + warp / 2 * 8; }
  static METHOD int scales_at(int warp, int g) { return g * (kBlockScales / 32) + warp / 2 * 4; }
  METHOD void load(const uint8_t* codes, const uint8_t* of_scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = *reinterpret_cast<const uint2*>(codes + i * (kBlockCodes / 4));
      scales[i] = *reinterpret_cast<const uint32_t*>(of_scales + i * (kBlockScales / 4));
    }
  }
  template <bool BF16>
  METHOD void decode(uint32_t (&first)[4], uint32_t (&second)[4], int half, int warp, uint32_t top) {
    constexpr uint32_t kPair = 0x81C081C0;
    const bool odd = warp % 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t(&a)[4] = i ? second : first;
      const uint2 both = words[2 * half + i];
      const uint32_t word = odd ? both.y : both.x, fourths = select_bits(0x06030603, both.x, both.y << 2);
      const uint32_t scale = decode_scales_of_step<BF16>(scales[2 * half + i], odd, top);  // of rows g and g + 8
      a[0] = transpose8x8(scale_pair<BF16, false>(word & kPair, scale));
      a[1] = transpose8x8(scale_pair<BF16, false>(rotate_left(word, 10) & kPair, scale));
      a[2] = transpose8x8(scale_pair<BF16, true>((word << 4) & kPair, scale));
      a[3] = transpose8x8(scale_pair<BF16, true>(rotate_left(fourths, odd ? 12 : 6) & kPair, scale));
    }
  }
};

template <bool BF16, int C, int R, int WG, int K_BLOCKS, int STAGES, int RANK>
__global__ void __launch_bounds__(128 * (WG + 1), 1) low_rank_tiled_dgrad(const __grid_constant__ LowRankGemmArguments all) {
  await_previous_kernel();
  multiply_tiled<BF16, false, false, C, R, WG, K_BLOCKS, false, STAGES, RANK, ColumnsOfBlock>(all);
}
#endif
