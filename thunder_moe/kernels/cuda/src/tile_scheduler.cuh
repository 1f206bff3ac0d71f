// The tile scheduler of the kernels of weights in layout "tiled_64x64", and stream-K: tiles whose K several blocks share.
// Compiled behind pipeline.cuh and in front of tiled_mma.cu or tiled_wgmma.cu (kernels/cuda/configs.py); calls ptx.cuh and
// the tiles of grouped_mm.cuh.

// count_tiles of grouped_mm.cuh by one warp, without a barrier: each lane counts for neighbouring experts.
DEVICE void count_tiles_by_warp(const GemmArguments& args, int height, int* tile_start, int* row_start) {
  const int lane = threadIdx.x % 32, each = (args.num_experts + 31) / 32;
  const int first = min(lane * each, args.num_experts), last = min(first + each, args.num_experts);
  int sum = 0, start = first > 0 && first < last ? row_end(args, first - 1) : 0;
  for (int base = first; base < last; base += 4) {  // independent loads
    int ends[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ends[i] = row_end(args, min(base + i, last - 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (base + i >= last) break;
      sum += tiles_between(start, ends[i], height);
      row_start[base + i + 1] = start = ends[i];
      tile_start[base + i + 1] = sum;
    }
  }
  int before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  before -= sum;
  for (int e = first; e < last; ++e) tile_start[e + 1] += before;
  if (lane == 0) tile_start[0] = row_start[0] = 0;
}

// The tiles of a persistent block, one after the other. Most are assigned statically, tile i to block i % blocks. The last
// DYNAMIC_TILES per block go to whichever block asks first (an atomic counter), so that faster blocks take more and all end
// at about the same time. DYNAMIC_TILES is small because the atomic takes long, and because blocks in step find in the L2 cache
// what others have read. A block asks one tile ahead. All lanes of the producer call it.
//
// STREAM_K: where blocks would idle for the time of kMinSavedStages stages or more, all get the same amount of work instead.
// The tiles that do not fill a last round, and as many more as there are blocks, come first: all their K, laid end to end, is cut
// into one segment per block. With fewer tiles than blocks, each tile is cut into as many segments as each can have. A block
// starts with the end of its segment, whose partial sums the block with the end of that tile needs: that one hardly ever waits.
template <bool STREAM_K, int DYNAMIC_TILES>
struct TileScheduler {
  int tile_m, tile_n;  // of the tile tile_m * tiles_n + tile_n
  int first, last;     // stages of its K, from `first` to last - 1
  int before;          // blocks that compute the stages in front of `first`

  // Divisions take long: those for the first tile are done while offsets are loaded.
  METHOD TileScheduler(int tiles_n, int stages) : tiles_n(tiles_n), stages(stages) { set(blockIdx.x, 0, stages); }

  // `tile_counter` counts requests; zero before and after.
  METHOD void begin(int* tile_counter, int tiles_m) {
    const int blocks = gridDim.x, block = blockIdx.x;
    counter = tile_counter, tiles = tiles_m * tiles_n, tile = block, static_tiles = max(tiles / blocks - DYNAMIC_TILES, 1) * blocks;
    request();
    if constexpr (STREAM_K) {
      const int count = stream_k_tiles();
      stream_k_stages = count * stages, from = segment_begin(block), to = segment_begin(block + 1);
      if (count > 0) {
        tile = count + block - blocks, static_tiles = tiles;
        return advance();
      }
    }
    if (!valid()) advance();
  }
  METHOD bool valid() const { return tile < tiles; }
  METHOD int contributors() const { return last < stages ? -1 : before; }  // see WorkItem
  METHOD Tile find(const GemmArguments& args, const int* tile_start, const int* row_start, int height) const {
    return tile_at(args, tile_start, row_start, tile_m, tile_n, tiles_n, height);
  }
  METHOD void advance() {
    const int blocks = gridDim.x, block = blockIdx.x;
    if constexpr (STREAM_K)
      if (from < to) {
        const int split_tile = (to - 1) / stages, begin = split_tile * stages;
        set(split_tile, max(from - begin, 0), to - begin);
        if (first > 0 && last == stages) before = block - begin * segments / stream_k_stages;
        to = begin;
        return;
      }
    tile += blocks;
    if (tile >= static_tiles) {
      ticket = __shfl_sync(0xffffffffu, ticket, 0);
      tile = static_tiles + ticket;
      if (valid()) request();
      // Every block requests until it gets none; this one is the last to, and resets the counter.
      else if (ticket + 1 == max(tiles - static_tiles, 0) + blocks && threadIdx.x % 32 == 0) *counter = 0;
    }
    set(tile, 0, stages);
  }

 private:
  static constexpr int kMinSavedStages = 2;  // measured: the cost of exchanging partial sums
  const int tiles_n, stages;
  int *counter, tiles, tile, static_tiles, ticket;
  int segments, stream_k_stages, from, to;  // the last three in stages of all tiles that are cut

  METHOD void set(int number, int from_stage, int to_stage) {
    tile_m = number / tiles_n, tile_n = number % tiles_n;
    first = from_stage, last = to_stage, before = 0;
  }
  METHOD int stream_k_tiles() {
    const int blocks = gridDim.x, rest = tiles % blocks;
    segments = blocks;
    if (tiles > 0 && tiles < blocks) segments = min(blocks / tiles, stages) * tiles;
    const int saved = tiles < blocks ? stages - stages * tiles / segments : (blocks - rest) * stages / blocks;
    return rest == 0 || saved < kMinSavedStages ? 0 : min(tiles, rest + blocks);
  }
  METHOD int segment_begin(int block) const { return min(block, segments) * stream_k_stages / segments; }
  METHOD void request() {
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(counter, 1);
  }
};

// If a tile is cut, each block but the last stores its partial sums in the workspace and releases a semaphore per warp
// (zero before and after). Blocks start in the order of their indices, so a block that is waited for is running.
// A tile's last rows may take fewer blocks of tokens, C, than a block has room for, ROOM.
//   partial_sums [blocks][groups][R * ROOM * 4][128]; semaphores [blocks][groups][4]
template <int R, int C, int ROOM = C>
DEVICE void store_partial_sums(const GemmArguments& args, float (&acc)[R][C][4], int group, int groups) {
  const int slot = blockIdx.x * groups + group;
  float* const to = args.partial_sums + slot * (R * ROOM * 512) + threadIdx.x % 128;
  for_each_sum(acc, [&](float& sum, int i) { to[i * 128] = sum; });
  __syncwarp();
  if (threadIdx.x % 32 == 0) semaphore_release(args.semaphores + 4 * slot + threadIdx.x / 32 % 4);
}

// Adds the partial sums of the `contributors` blocks in front of this one, in their order.
template <int R, int C, int ROOM = C>
DEVICE void reduce_partial_sums(const GemmArguments& args, float (&acc)[R][C][4], int group, int groups, int contributors) {
  const int slot = (blockIdx.x - contributors) * groups + group, warp = threadIdx.x / 32 % 4;
  for (int i = threadIdx.x % 32; i < contributors; i += 32) semaphore_acquire(args.semaphores + 4 * (slot + i * groups) + warp);
  __syncwarp();
  const float* const from = args.partial_sums + slot * (R * ROOM * 512) + threadIdx.x % 128;
#pragma unroll 4  // independent loads
  for (int i = 0; i < contributors; ++i)
    for_each_sum(acc, [&](float& sum, int at) { sum += load_l2(from + (i * groups * R * ROOM * 4 + at) * 128); });
}

// The same for tiles of one row, by tiled_mma.cu: a sum is its own semaphore, so one latency of the L2 cache takes the place of
// three. Zero stands for "not there yet", so the sender makes a sum of 0 a -0, and the receiver leaves zeros behind.
//   row_sums [blocks][groups][R][4 warps][2 halves][8 g]
template <int R, int C>
DEVICE void send_row(const GemmArguments& args, const float (&acc)[R][C][4], int group, int groups) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  uint32_t* const to = args.row_sums + (static_cast<int>(blockIdx.x) * groups + group) * (64 * R) + 16 * warp + lane / 4;
  if (lane % 4 != 0) return;  // these lanes have column 0
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = acc[r][0][2 * half];
      store_word(to + 64 * r + 8 * half, float_to_bits(sum == 0.0f ? -0.0f : sum));
    }
}

// Adds the sums of the `contributors` blocks in front of this one, in their order, to column 0. The four lanes of a row
// wait for one block each.
template <int R, int C>
DEVICE void receive_row(const GemmArguments& args, float (&acc)[R][C][4], int group, int groups, int contributors) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
  uint32_t* const from = args.row_sums + ((static_cast<int>(blockIdx.x) - contributors) * groups + group) * (64 * R) + 16 * warp + lane / 4;
  for (int first = 0; first < contributors; first += 4) {
    uint32_t bits[R][2] = {};
    uint32_t* const own = from + (first + t) * groups * (64 * R);
    if (first + t < contributors) {
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            bits[r][half] = load_word(own + 64 * r + 8 * half);
            missing |= bits[r][half] == 0;
          }
      } while (missing);
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) own[64 * r + 8 * half] = 0;
    }
    __syncwarp();
#pragma unroll
    for (int other = 0; other < 4; ++other)
      if (first + other < contributors)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            acc[r][0][2 * half] += bits_to_float(static_cast<uint32_t>(__shfl_sync(0xffffffffu, static_cast<int>(bits[r][half]), lane / 4 * 4 + other)));
  }
}
