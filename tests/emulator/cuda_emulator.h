// Runs the source of a CUDA kernel on a CPU: one block or cluster of blocks at a time, each thread a fiber, warp and block
// instructions as meeting points. Included before the kernel by the programs of emulator/build.py; calls ucontext alone.
// Where hardware may act early or late, it acts at the worst time that an `Adversary` allows, so that a missing barrier or
// wait gives a wrong result. It checks what a kernel computes and that its barriers match, not how fast it is.
#pragma once
#define CUDA_EMULATOR
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __trap() std::abort()
static const char* dynamic_shared = nullptr;
#define DYNAMIC_SHARED(type, name)                                 \
  alignas(16) static type name[(227 << 10) / sizeof(type)];        \
  dynamic_shared = reinterpret_cast<const char*>(name);            \
  if (first_of_block()) std::memset(name, 0xFF, sizeof(name)) /* NaNs */
// That of each block of a cluster; the kernel's first statement, which starts the other blocks.
#define CLUSTER_SHARED(type, name, blocks)                                             \
  alignas(16) static type shared_of_blocks[blocks][(227 << 10) / sizeof(type)];        \
  type* const name = shared_of_blocks[rank_in_cluster(blocks, sizeof(*shared_of_blocks))]; \
  if (first_of_block()) std::memset(name, 0xFF, sizeof(*shared_of_blocks))
using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct dim { int x, y, z; };
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

static dim threadIdx, blockIdx, gridDim, blockDim;

// ---- what hardware is free to choose ----

struct Adversary {
  void* late_result;  // of the kernel before, or null: NaNs until a thread of the block waits for that kernel
  int64_t late_bytes;
  int late_copies;    // asynchronous copies are done when they are waited for, not when they are issued
  int late_products;  // likewise wgmma, which then reads its registers and shared memory
  int order;          // of threads between meeting points: 0 ascending, 1 descending, 2 another one each time, 3 ascending, and
                      // one warpgroup after the other tarries where some warpgroups meet
};
static Adversary adversary;

struct Copy {
  void* to;
  uint4 value;
  size_t bytes;
  void operator()() const { std::memcpy(to, &value, bytes); }
};

// What a thread has issued and not waited for: groups of work, the newest still open.
template <class Work>
struct Pending {
  std::vector<Work> open;
  std::deque<std::vector<Work>> groups;
  void commit() {
    groups.push_back(std::move(open));
    open.clear();
  }
  template <class Do>
  void wait(size_t left, Do perform) {
    for (; groups.size() > left; groups.pop_front())
      for (const Work& work : groups.front()) perform(work);
  }
};

// ---- bulk copies and their barriers ----

// An mbarrier: a phase is over when all have arrived and all bytes that were announced have come.
struct Mbarrier {  // as large as an mbarrier
  uint8_t arrivals, left;
  uint16_t phase;
  int bytes;
  void settle() {
    if (left > 0 || bytes != 0) return;
    left = arrivals;
    ++phase;
  }
};

struct BulkCopy {
  void* to;
  const void* from;
  int bytes;
  Mbarrier* barrier;
  uint4 value;  // where `from` is null
};
static std::deque<BulkCopy> bulk_copies;  // issued and not done

// ---- fibers ----

struct Fiber {
  jmp_buf context;
  bool has_begun = false, done = false;
  int meetings = 0;
  long cluster_meeting = 0;  // that it has arrived at
  Pending<Copy> copies;
  Pending<std::function<void()>> products;
};

static std::vector<Fiber> fibers;
static int current;  // the fiber that runs: thread current % blockDim.x of block current / blockDim.x of the cluster
static jmp_buf scheduler;
constexpr int kMaxCluster = 16;
static int cluster_blocks;  // that run
static size_t shared_bytes;  // of a block of a cluster
static bool block_has_begun[kMaxCluster];
static int block_of_cluster() { return current / blockDim.x; }
static bool first_of_block() {
  bool& has_begun = block_has_begun[block_of_cluster()];
  const bool first = !has_begun;
  has_begun = true;
  return first;
}
static int rank_in_cluster(int blocks, size_t bytes) {
  cluster_blocks = blocks, shared_bytes = bytes;
  return block_of_cluster();
}
static std::function<void()> kernel_body;

// ---- the kernel before: its result is hidden until a thread of the block, or cluster, waits for it ----

static std::vector<char> result_of_previous_kernel;
static bool block_has_waited[kMaxCluster], result_is_hidden;
static void hide_result() {
  std::fill_n(block_has_waited, kMaxCluster, false);
  result_is_hidden = true;
  if (adversary.late_bytes > 0) std::memset(adversary.late_result, 0xFF, adversary.late_bytes);
}

static void yield() {
  if (_setjmp(fibers[current].context) == 0) _longjmp(scheduler, 1);
}

static void await_previous_kernel() {
  if (adversary.late_bytes > 0 && result_is_hidden) {
    yield();  // those that do not wait come first
    std::memcpy(adversary.late_result, result_of_previous_kernel.data(), adversary.late_bytes);
  }
  block_has_waited[block_of_cluster()] = true, result_is_hidden = false;
}

static void fiber_main() {
  kernel_body();
  Fiber& fiber = fibers[current];
  if (!fiber.products.groups.empty() || !fiber.products.open.empty()) {
    std::fprintf(stderr, "cuda_emulator: a thread left the kernel before its products were done\n");
    std::abort();
  }
  fiber.done = true;
  _longjmp(scheduler, 1);
}

constexpr size_t kStack = 1 << 16;
static std::vector<std::unique_ptr<char[]>> stacks;  // of the fibers; each block has those of the block before it

// The fibers of one more block.
static void start_block(int threads) {
  fibers.resize(fibers.size() + threads);
  while (stacks.size() < fibers.size()) stacks.emplace_back(new char[kStack]);
}

// Runs a fiber until it yields. Between fibers it jumps, since swapcontext makes a system call each time.
static void resume(int fiber) {
  current = fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fibers[fiber].has_begun) _longjmp(fibers[fiber].context, 1);
  fibers[fiber].has_begun = true;
  ucontext_t begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = stacks[fiber].get();
  begin.uc_stack.ss_size = kStack;
  begin.uc_link = nullptr;
  makecontext(&begin, fiber_main, 0);
  setcontext(&begin);
}

// A meeting point of `size` fibers; the last to come opens it for all.
struct Meeting {
  int arrived = 0;
  long generation = 0;
  void wait(int size) {
    const long mine = generation;
    if (++arrived == size) {
      arrived = 0;
      ++generation;
      return;
    }
    while (generation == mine) yield();
  }
};

static Meeting block_meetings[kMaxCluster];
static Meeting warp_meetings[32 * kMaxCluster];

// A row of blocks: those of number y and z along the other dimensions of the grid.
template <class Body>
static void launch(int grid, int threads, Body body, int y = 0, int z = 0) {
  kernel_body = body;
  gridDim = {grid, y + 1, z + 1};
  blockDim = {threads, 1, 1};
  const char* const result = static_cast<const char*>(adversary.late_result);
  result_of_previous_kernel.assign(result, result + adversary.late_bytes);
  for (int block = 0; block < grid; block += cluster_blocks) {
    std::fill_n(block_has_begun, kMaxCluster, false);
    hide_result();
    cluster_blocks = 1;
    fibers.clear();
    fibers.reserve(kMaxCluster * threads);  // a context must not move
    start_block(threads);
    for (int live = threads, turns = 0; live > 0; ++turns) {
      live = 0;
      const int count = static_cast<int>(fibers.size());
      for (int turn = 0; turn < count; ++turn) {
        // 29 is no divisor of a number of threads, so that every thread has its turn.
        const int any = static_cast<int>((turn * 29LL + turns * 31LL) % count);
        const int fiber = adversary.order == 1 ? count - 1 - turn : adversary.order == 2 ? any : turn;
        if (fibers[fiber].done) continue;
        threadIdx.x = fiber % threads;
        blockIdx = {block + fiber / threads, y, z};
        resume(fiber);
        live += !fibers[fiber].done;
      }
      if (static_cast<int>(fibers.size()) < cluster_blocks * threads) {  // the blocks of a cluster begin one after the other
        ++live;
        // Of more blocks than five, the last begins as late as the fifth would: those that began wait in turns.
        const int apart = std::min(500, 2500 / cluster_blocks);
        if (turns % apart == apart - 1) start_block(threads);
      }
      if (turns > 100000000 / threads) {
        std::fprintf(stderr, "cuda_emulator: threads wait at different barriers\n");
        std::abort();
      }
    }
    if (grid % cluster_blocks != 0) {
      std::fprintf(stderr, "cuda_emulator: a grid of %d blocks in clusters of %d\n", grid, cluster_blocks);
      std::abort();
    }
    if (std::count(block_has_waited, block_has_waited + cluster_blocks, true) != cluster_blocks) {
      std::fprintf(stderr, "cuda_emulator: a block has ended without waiting for the kernel before it\n");
      std::abort();
    }
    if (!bulk_copies.empty()) {
      std::fprintf(stderr, "cuda_emulator: a block has ended before its bulk copies were done\n");
      std::abort();
    }
    for (const Meeting& meeting : block_meetings)
      if (meeting.arrived != 0) {
        std::fprintf(stderr, "cuda_emulator: a thread left the kernel while others wait at a barrier\n");
        std::abort();
      }
  }
}

static void __syncthreads() { block_meetings[block_of_cluster()].wait(blockDim.x); }
static void __syncwarp() { warp_meetings[current / 32].wait(32); }

// All threads of a cluster, and those that have exited.
static Meeting cluster_meeting;
static void cluster_arrive() {
  fibers[current].cluster_meeting = cluster_meeting.generation;
  if (++cluster_meeting.arrived < cluster_blocks * blockDim.x) return;
  cluster_meeting.arrived = 0;
  ++cluster_meeting.generation;
}
static void cluster_wait() {
  while (cluster_meeting.generation == fibers[current].cluster_meeting) yield();
}

// ---- collectives of a warp: each lane leaves its value, all meet, each takes what it wants ----

template <class T>
static const T* exchange(const T& mine) {
  static T slots[2][32 * kMaxCluster][32];
  static long turn[32 * kMaxCluster][32];
  const int warp = current / 32, lane = threadIdx.x % 32;
  T(&buffer)[32] = slots[turn[warp][lane]++ % 2][warp];  // two in turn: nobody overwrites what a slow lane still reads
  buffer[lane] = mine;
  warp_meetings[warp].wait(32);
  return buffer;
}

static int __shfl_up_sync(uint32_t, int value, int delta) {
  const int lane = threadIdx.x % 32;
  return exchange(value)[lane >= delta ? lane - delta : lane];
}

static uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) {
  return exchange(value)[threadIdx.x % 32 ^ mask];
}

static float shuffle_xor(float value, int mask) { return exchange(value)[threadIdx.x % 32 ^ mask]; }

static float broadcast(float value, int from) { return exchange(value)[from % 32]; }

static int __shfl_sync(uint32_t, int value, int from) { return exchange(value)[from % 32]; }

static uint32_t __match_any_sync(uint32_t, int value) {
  const int* all = exchange(value);
  uint32_t mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<uint32_t>(all[lane] == value) << lane;
  return mask;
}

static uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const uint32_t* all = exchange(value);
  return *std::max_element(all, all + 32);
}

static uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const uint32_t* all = exchange(value);
  return *std::min_element(all, all + 32);
}

static uint32_t __ballot_sync(uint32_t, bool value) {
  const bool* all = exchange(value);
  uint32_t mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<uint32_t>(all[lane]) << lane;
  return mask;
}

static int __ffs(int bits) { return __builtin_ffs(bits); }
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }
static uint32_t atomicMax(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to = max(before, value);
  return before;
}
static void __threadfence() {}
template <class Number>
static Number atomicAdd(Number* to, Number value) {
  const Number old = *to;
  *to += value;
  return old;
}
#define __expf(x) std::exp(x)
#define __fdividef(x, y) ((x) / (y))

// ---- numbers ----

static uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
static float bits_to_float(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

static float half_to_float(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return half;
}

template <bool BF16>
static float widen(uint16_t bits) {
  return BF16 ? bits_to_float(static_cast<uint32_t>(bits) << 16) : half_to_float(bits);
}

template <bool BF16>
static uint16_t narrow(float value) {
  uint16_t out;
  if (BF16) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7FFF;
    out = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  } else {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(&out, &half, 2);
  }
  return out;
}

// ---- instructions of the kernels ----

static uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7)) & 0xFF);
    if (nibble & 8) byte = byte & 0x80 ? 0xFF : 0;
    out |= byte << (8 * i);
  }
  return out;
}

template <bool BF16>
static uint32_t multiply2(uint32_t a, uint32_t b) {
  const uint32_t low = narrow<BF16>(widen<BF16>(a & 0xFFFF) * widen<BF16>(b & 0xFFFF));
  const uint32_t high = narrow<BF16>(widen<BF16>(a >> 16) * widen<BF16>(b >> 16));
  return low | high << 16;
}

template <bool BF16>
static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operands { uint32_t a[4], b[2]; };
  const Operands* lanes = exchange(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const Operands& left = lanes[row % 8 * 4 + k % 8 / 2];
      const Operands& right = lanes[column * 4 + k % 8 / 2];
      const uint32_t weight = left.a[row / 8 + 2 * (k / 8)] >> (16 * (k % 2));
      const uint32_t token = right.b[k / 8] >> (16 * (k % 2));
      sum += widen<BF16>(weight & 0xFFFF) * widen<BF16>(token & 0xFFFF);
    }
    c[i] += sum;
  }
}

static uint32_t transpose8x8(uint32_t pair) {
  const uint32_t* all = exchange(pair);
  const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const auto element = [&](int row, int column) { return all[4 * row + column / 2] >> (16 * (column % 2)) & 0xFFFF; };
  return element(2 * j, i) | element(2 * j + 1, i) << 16;
}

static void prefetch(const void*) {}
static uint4 load_weights16(const uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) {
    std::fprintf(stderr, "cuda_emulator: a 16-byte load from a misaligned address\n");
    std::abort();
  }
  return *reinterpret_cast<const uint4*>(p);
}

static void copy_bytes(void* to_shared, const void* from, size_t bytes, bool valid) {
  if (reinterpret_cast<uintptr_t>(from) % bytes || reinterpret_cast<uintptr_t>(to_shared) % bytes) {
    std::fprintf(stderr, "cuda_emulator: a %zu-byte copy between misaligned addresses\n", bytes);
    std::abort();
  }
  Copy copy{to_shared, make_uint4(0, 0, 0, 0), bytes};
  if (valid) std::memcpy(&copy.value, from, bytes);
  if (adversary.late_copies) fibers[current].copies.open.push_back(copy);
  else copy();
}
static void cp_async16(uint4* to_shared, const void* from, bool valid) { copy_bytes(to_shared, from, 16, valid); }
static void cp_async4(uint32_t* to_shared, const void* from) { copy_bytes(to_shared, from, 4, true); }
static void cp_async_commit() { fibers[current].copies.commit(); }
template <int PENDING>
static void cp_async_wait() {
  fibers[current].copies.wait(PENDING, [](const Copy& copy) { copy(); });
}

static uint4* align_shared(uint4* memory, uint32_t to) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  return memory + ((to - address % to) % to) / sizeof(uint4);
}

static void perform(const BulkCopy& copy) {
  std::memcpy(copy.to, copy.from != nullptr ? copy.from : &copy.value, copy.bytes);
  copy.barrier->bytes -= copy.bytes;
  copy.barrier->settle();
}

typedef Mbarrier* MbarrierAddress;
static Mbarrier* mbarrier_address(void* barrier) { return static_cast<Mbarrier*>(barrier); }

static void mbarrier_init(Mbarrier* barrier, int arrivals) {
  *barrier = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
static void fence_mbarrier_init() {}
static void check(const Mbarrier* barrier) {
  if (barrier->arrivals == 0xFF) {  // as all of shared memory at first
    std::fprintf(stderr, "cuda_emulator: a barrier that has not been initialized\n");
    std::abort();
  }
}
static void mbarrier_arrive(Mbarrier* barrier) {
  check(barrier);
  if (barrier->left == 0) {
    std::fprintf(stderr, "cuda_emulator: more arrivals at a barrier than it was made for\n");
    std::abort();
  }
  --barrier->left;
  barrier->settle();
}
static void mbarrier_arrive_expect_tx(Mbarrier* barrier, int bytes) {
  barrier->bytes += bytes;
  mbarrier_arrive(barrier);
}

// Late copies come one at a time, when somebody waits for them; until then their place holds NaNs.
static void mbarrier_wait(Mbarrier* barrier, int parity) {
  check(barrier);
  while (barrier->phase % 2 == parity) {
    const auto mine = [&](const BulkCopy& copy) { return copy.barrier == barrier; };
    const auto next = std::find_if(bulk_copies.begin(), bulk_copies.end(), mine);
    if (next != bulk_copies.end()) {
      perform(*next);
      bulk_copies.erase(next);
    }
    yield();
  }
}

static void mbarrier_wait_cluster(Mbarrier* barrier, int parity) { mbarrier_wait(barrier, parity); }

struct RemotePlace {
  char* address;
  Mbarrier* barrier;
  int rank;
};
static RemotePlace remote_place(float* place, Mbarrier* barrier, int rank) {
  const int64_t distance = (rank - block_of_cluster()) * static_cast<int64_t>(shared_bytes);
  return {reinterpret_cast<char*>(place) + distance, reinterpret_cast<Mbarrier*>(reinterpret_cast<char*>(barrier) + distance), rank};
}
static void send_floats(const RemotePlace& to, int offset, const float (&values)[4]) {
  if (!block_has_begun[to.rank]) {
    std::fprintf(stderr, "cuda_emulator: a block sends to one that may not have begun\n");
    std::abort();
  }
  check(to.barrier);
  BulkCopy copy = {to.address + offset, nullptr, 16, to.barrier, {}};
  std::memcpy(&copy.value, values, 16);
  if (adversary.late_copies) std::memset(copy.to, 0xFF, 16), bulk_copies.push_back(copy);
  else perform(copy);
}

static void copy_piece(uint4* to, const void* from, Mbarrier* barrier) {  // 16 bytes; zeros where `from` is null
  if (adversary.late_copies) {
    std::memset(to, 0xFF, 16);
    bulk_copies.push_back({to, from, 16, barrier, {}});
  } else {
    perform({to, from, 16, barrier, {}});
  }
}

typedef bool CachePolicy;
static CachePolicy cache_policy(bool read_once) { return read_once; }
static bool elect_one() { return threadIdx.x % 32 == 31; }  // not the one that a kernel may have in mind

static void copy_bulk(void* to_shared, const void* from, int bytes, Mbarrier* barrier, CachePolicy) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || reinterpret_cast<uintptr_t>(to_shared) % 16 || bytes % 16 || bytes <= 0) {
    std::fprintf(stderr, "cuda_emulator: a bulk copy of %d bytes, or between misaligned addresses\n", bytes);
    std::abort();
  }
  if (adversary.late_copies) {
    std::memset(to_shared, 0xFF, bytes);
    bulk_copies.push_back({to_shared, from, bytes, barrier, {}});
  } else {
    perform({to_shared, from, bytes, barrier, {}});
  }
}

// A matrix of 16-bit numbers (rows, k), read in boxes of 64 k by box_rows.
struct alignas(64) TensorMap {
  const uint16_t* matrix;
  int64_t rows, k, box_rows;
  int64_t unused[12];
};
static void prefetch_tensor_map(const TensorMap*) {}
static void tma_load_box(void* to_shared, const TensorMap* map, int k, int row, Mbarrier* barrier) {
  if (reinterpret_cast<uintptr_t>(map->matrix) % 16 || reinterpret_cast<uintptr_t>(to_shared) % 1024 || map->k % 8) {
    std::fprintf(stderr, "cuda_emulator: a box of a misaligned matrix, or to a misaligned address\n");
    std::abort();
  }
  for (int r = 0; r < map->box_rows; ++r)
    for (int unit = 0; unit < 8; ++unit) {
      const bool exists = row + r < map->rows && k + 8 * unit < map->k;
      const void* from = exists ? map->matrix + (row + r) * map->k + k + 8 * unit : nullptr;
      copy_piece(static_cast<uint4*>(to_shared) + 8 * r + (unit ^ r % 8), from, barrier);
    }
}

template <int REGISTERS>
static void shrink_registers() {}
template <int REGISTERS>
static void grow_registers() {}

static Meeting named_meetings[kMaxCluster][16];
static void named_barrier_sync(int id, int threads) {
  named_meetings[block_of_cluster()][id].wait(threads);
  const int group = threadIdx.x / 128, groups = blockDim.x / 128;
  if (adversary.order == 3 && fibers[current].meetings++ % groups == group)
    for (int i = 0; i < 600; ++i) yield();
}

static float load_l2(const float* p) { return *p; }
static void store_word(uint32_t* p, uint32_t word) { *p = word; }
static void store16(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const char* const to = static_cast<const char*>(p);
  if (dynamic_shared != nullptr && to >= dynamic_shared && to < dynamic_shared + (227 << 10)) {
    std::fprintf(stderr, "cuda_emulator: st.global to shared memory\n");
    std::abort();
  }
  *static_cast<uint4*>(p) = make_uint4(a, b, c, d);
}
static uint32_t load_word(const uint32_t* p) {
  if (*p == 0) yield();  // who waits for another word lets others run
  return *p;
}
static void semaphore_release(int* flag) { *flag = 1; }
static void semaphore_acquire(int* flag) {
  while (*flag == 0) yield();
  *flag = 0;
}

static uint32_t rotate_left(uint32_t value, int by) { return value << by | value >> (32 - by); }

static uint32_t select_bits(uint32_t mask, uint32_t ones, uint32_t zeros) { return (mask & ones) | (~mask & zeros); }

template <bool BF16, bool HIGH>
static uint32_t multiply_by_half(uint32_t pair, uint32_t scale) {
  return multiply2<BF16>(pair, permute_bytes(scale, 0, HIGH ? 0x3232 : 0x1010));
}

static void ldmatrix_x4(uint32_t (&out)[4], const uint4* row) {
  const uint4* const* rows = exchange(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int j = 0; j < 4; ++j) out[j] = reinterpret_cast<const uint32_t*>(rows[8 * j + g])[t];
  __syncwarp();  // nobody goes on to overwrite what another lane still reads
}

static void ldmatrix_x4_transposed(uint32_t (&out)[4], const uint4* row) {
  const uint4* const* rows = exchange(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto element = [&](int line, int column) { return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(rows[line])[column]); };
  for (int j = 0; j < 4; ++j) out[j] = element(8 * j + 2 * t, g) | element(8 * j + 2 * t + 1, g) << 16;
  __syncwarp();
}

static void wgmma_fence() {}
static void wgmma_commit() { fibers[current].products.commit(); }
template <int PENDING>
static void wgmma_wait() {
  fibers[current].products.wait(PENDING, [](const std::function<void()>& product) { product(); });
}
static void fence_proxy_async() {}

template <int NUMBER>
static void keep_apart() {}
template <int R, int C>
static void keep_behind(float (&)[R][C][4]) {}
typedef const uint4* MatrixDescriptor;
static MatrixDescriptor matrix_descriptor(const uint4* tile) { return tile; }

// A warp's 16 of 64 rows times the first 8 * N tokens of a swizzled tile in shared memory.
template <bool BF16, int N, int C>
static void multiply_tile(float (&acc)[C][4], const uint32_t (&a)[4], const uint4* tile, int step) {
  struct Operand { uint32_t a[4]; };
  const Operand* lanes = exchange(Operand{{a[0], a[1], a[2], a[3]}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int c = 0; c < N; ++c)
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i / 2), token = 8 * c + 2 * t + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k) {
        const uint32_t weight = lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)] >> (16 * (k % 2));
        const uint4& unit = tile[token * 8 + ((2 * step + k / 8) ^ token % 8)];
        sum += widen<BF16>(weight & 0xFFFF) * widen<BF16>(reinterpret_cast<const uint16_t*>(&unit)[k % 8]);
      }
      acc[c][i] += sum;
    }
}

// Boxes [64 rows][64 columns] with 128-byte swizzle that are read transposed; adding 128 moves by 16 rows.
static MatrixDescriptor row_descriptor(const uint8_t* box) { return reinterpret_cast<const uint4*>(box); }

// Element (row, k) of 16 k of an operand in shared memory, of boxes with 128-byte swizzle: k along rows, or TRANSPOSED below each other.
template <bool BF16, bool TRANSPOSED>
static float shared_element(const uint4* operand, int row, int k) {
  const uint4* unit;
  if constexpr (TRANSPOSED) {
    unit = operand + row / 64 * 512 + k * 8 + (row % 64 / 8 ^ k % 8);
    return widen<BF16>(reinterpret_cast<const uint16_t*>(unit)[row % 8]);
  } else {
    const size_t within = reinterpret_cast<uintptr_t>(operand) % 1024 / 16;  // the swizzle is of addresses
    unit = operand - within + row * 8 + ((within + k / 8) ^ row % 8);
    return widen<BF16>(reinterpret_cast<const uint16_t*>(unit)[k % 8]);
  }
}

template <bool BF16, bool TRANSPOSED_A, bool TRANSPOSED_B, int C>
static void multiply_shared(float (&acc)[C][4], const uint4* a, const uint4* b, bool add) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32 % 4;
  for (int c = 0; c < C; ++c)
    for (int i = 0; i < 4; ++i) {
      float sum = 0;
      for (int k = 0; k < 16; ++k)
        sum += shared_element<BF16, TRANSPOSED_A>(a, 16 * warp + g + 8 * (i / 2), k) * shared_element<BF16, TRANSPOSED_B>(b, 8 * c + 2 * t + i % 2, k);
      acc[c][i] = add ? acc[c][i] + sum : sum;
    }
}

template <bool BF16, bool TRANSPOSED_A, bool TRANSPOSED_B, int C>
static void wgmma_shared(float (&acc)[C][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  const auto product = [&acc, a, b, add] { multiply_shared<BF16, TRANSPOSED_A, TRANSPOSED_B>(acc, a, b, add); };
  if (adversary.late_products) fibers[threadIdx.x].products.open.push_back(product);
  else product();
}

static float e4m3_to_float(uint8_t code) {
  static float values[256];
  if (values[1] == 0)
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const float magnitude = exponent == 0 ? std::ldexp(mantissa / 8.0f, -6) : std::ldexp(1 + mantissa / 8.0f, exponent - 7);
      values[i] = (i & 0x7F) == 0x7F ? NAN : i & 0x80 ? -magnitude : magnitude;
    }
  return values[code];
}

// Element (row, k) of 32 k of an operand of E4M3 numbers in shared memory, in boxes with 128-byte swizzle.
static float e4m3_element(const uint4* operand, int row, int k) {
  const size_t within = reinterpret_cast<uintptr_t>(operand) % 1024 / 16;  // the swizzle is of addresses
  const uint4* const unit = operand - within + row * 8 + ((within + k / 16) ^ row % 8);
  return e4m3_to_float(reinterpret_cast<const uint8_t*>(unit)[k % 16]);
}

template <int C>
static void multiply_e4m3_shared(float (&acc)[C][4], const uint4* a, const uint4* b, bool add) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32 % 4;
  for (int c = 0; c < C; ++c)
    for (int i = 0; i < 4; ++i) {
      float sum = 0;
      for (int k = 0; k < 32; ++k) sum += e4m3_element(a, 16 * warp + g + 8 * (i / 2), k) * e4m3_element(b, 8 * c + 2 * t + i % 2, k);
      acc[c][i] = add ? acc[c][i] + sum : sum;
    }
}

template <int C>
static void wgmma_e4m3(float (&acc)[C][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  const auto product = [&acc, a, b, add] { multiply_e4m3_shared(acc, a, b, add); };
  if (adversary.late_products) fibers[current].products.open.push_back(product);
  else product();
}

template <bool BF16, int N, int C>
static void wgmma(float (&acc)[C][4], const uint32_t (&a)[4], MatrixDescriptor tile, int step) {
  if (adversary.late_products)
    fibers[current].products.open.push_back([&acc, &a, tile, step] { multiply_tile<BF16, N>(acc, a, tile, step); });
  else
    multiply_tile<BF16, N>(acc, a, tile, step);
}
