// The shared-memory pipeline of the kernels of weights in layout "tiled_64x64": a producer warp, consumer warps, mbarriers.
// Compiled behind grouped_mm.cuh and in front of tiled_mma.cu, tiled_wgmma.cu or tiled_cluster.cu (kernels/cuda/configs.py); calls ptx.cuh.
//
// One warp of a block (the producer) has the copy engine fill a ring of stages, far ahead of the other warps (the
// consumers), also across tiles. Each stage has two mbarriers: `full` completes when the stage's bytes have arrived, `empty`
// when all consumers have read them.
//
// While the tensor cores multiply, any other instruction takes about two cycles (measured; probably because of the register
// bandwidth). So what a consumer does beside decoding counts: stages are long, and few addresses are computed.

constexpr int kBlock = 64;  // rows, and k, of a block of weights

// For the kernels with wgmma.
struct TmaGemmArguments {
  TensorMap x;         // of gemm.x, in boxes of a tile's tokens
  GemmArguments gemm;  // x is gathered already; row_slot serves slot_scale alone
};

// The position in a ring of STAGES stages of BYTES each: the offset of the current stage, and the parity of the number of
// rounds. All addresses follow from the offset, none from the index of the stage.
template <int STAGES, int BYTES>
struct PipelineState {
  int begin = 0, parity = 0;
  METHOD void advance() {
    begin += BYTES;
    if (begin == STAGES * BYTES) begin = 0, parity ^= 1;
  }
};

// The work item of a stage; a negative expert ends the stream. For tiled_mma.cu also the number of blocks of 64 k that this
// thread block computes of the tile, and how many other thread blocks contribute partial sums to it; -1: another one collects them.
struct alignas(16) WorkItem {
  Tile tile;
  int k_blocks, contributors;
};
constexpr WorkItem kEndOfWork = {{-1, 0, 0, 0}, 0, 0};

// The last bytes of a stage.
struct alignas(16) StageFooter {
  WorkItem work;
  Mbarrier full, empty;
};

// `footer`: of the first stage.
template <int STAGES, int BYTES>
DEVICE void init_pipeline(uint8_t* footer, int consumers) {
  for (int i = 0; i < STAGES; ++i) {
    StageFooter* const stage = reinterpret_cast<StageFooter*>(footer + i * BYTES);
    mbarrier_init(mbarrier_address(&stage->full), 1);
    mbarrier_init(mbarrier_address(&stage->empty), consumers);
  }
}

// The producer waits until a stage is empty, then writes its work item and the number of bytes that will arrive.
DEVICE void acquire_stage(StageFooter* stage, int parity, const WorkItem& work, int bytes) {
  mbarrier_wait(mbarrier_address(&stage->empty), parity ^ 1);
  stage->work = work;
  mbarrier_arrive_expect_tx(mbarrier_address(&stage->full), bytes);
}

// Read as a whole and through a const pointer: otherwise ptxas does not find that all threads of a warp are at the same stage,
// and computes its address for each of them (20 instructions more for 64 k of a warpgroup by wgmma).
DEVICE WorkItem read_work_item(const StageFooter* stage) { return stage->work; }

// The index within its expert of one of the 64-row blocks of a tile; with SwiGLU gate and up alternate. Blocks beyond the last
// are read from the last, and not stored.
template <bool SWIGLU>
DEVICE int block_of_expert(const GemmArguments& args, int first_feature, int block) {
  const int blocks = args.n / kBlock;
  if constexpr (SWIGLU) return min(first_feature / kBlock + block / 2, blocks / 2 - 1) + (block % 2 ? blocks / 2 : 0);
  else return min(first_feature / kBlock + block, blocks - 1);
}

// Bulk copies of a tile's weights: BLOCKS blocks of rows, up to K_BLOCKS blocks of 64 k at a time, from `k_block` on.
template <bool SWIGLU, int BLOCKS, int K_BLOCKS>
struct WeightCopies {
  const uint8_t *codes[BLOCKS], *scales[BLOCKS];
  CachePolicy policy;

  METHOD WeightCopies(const GemmArguments& args, int expert, int first_feature, int k_block) : policy(cache_policy(args.read_once)) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const int row_block = block_of_expert<SWIGLU>(args, first_feature, block);
      const int64_t from = (static_cast<int64_t>(expert) * (args.n / kBlock) + row_block) * (args.k / kBlock) + k_block;
      codes[block] = args.qdata + from * kBlockCodes;
      scales[block] = args.scale + from * kBlockScales;
    }
  }

  // The next `count` blocks of 64 k, to [BLOCKS][K_BLOCKS] of each.
  METHOD void operator()(uint4* to_codes, uint4* to_scales, int count, MbarrierAddress barrier) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      copy_bulk(to_codes + block * K_BLOCKS * (kBlockCodes / 16), codes[block], count * kBlockCodes, barrier, policy);
      copy_bulk(to_scales + block * K_BLOCKS * (kBlockScales / 16), scales[block], count * kBlockScales, barrier, policy);
      codes[block] += K_BLOCKS * kBlockCodes, scales[block] += K_BLOCKS * kBlockScales;
    }
  }
};
