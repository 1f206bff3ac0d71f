// The scheduler of cuda_emulator.h, and the instructions that need no compilation with each kernel.
// Compiled once by emulator/build.py, which links it into each library, so that each has a state of its own; calls ucontext alone.
#include "cuda_emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <vector>

const char* dynamic_shared = nullptr;
dim threadIdx, blockIdx, gridDim, blockDim;
static Adversary adversary;

void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::fputs("cuda_emulator: ", stderr);
  std::vfprintf(stderr, format, values);
  std::fputs("\n", stderr);
  std::abort();
}

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

// ---- bulk copies ----

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
  Pending<Product> products;
};

static std::vector<Fiber> fibers;
static int current;  // the fiber that runs: thread current % blockDim.x of block current / blockDim.x of the cluster
static jmp_buf scheduler;
constexpr int kMaxCluster = 16;
static int cluster_blocks;  // that run
static size_t shared_bytes;  // of a block of a cluster
static bool block_has_begun[kMaxCluster];
static int block_of_cluster() { return current / blockDim.x; }
bool first_of_block() {
  bool& has_begun = block_has_begun[block_of_cluster()];
  const bool first = !has_begun;
  has_begun = true;
  return first;
}
int rank_in_cluster(int blocks, size_t bytes) {
  cluster_blocks = blocks, shared_bytes = bytes;
  return block_of_cluster();
}
static void (*kernel_body)(const void*);
static const void* kernel_argument;

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

void await_previous_kernel() {
  if (adversary.late_bytes > 0 && result_is_hidden) {
    yield();  // those that do not wait come first
    std::memcpy(adversary.late_result, result_of_previous_kernel.data(), adversary.late_bytes);
  }
  block_has_waited[block_of_cluster()] = true, result_is_hidden = false;
}

static void fiber_main() {
  kernel_body(kernel_argument);
  Fiber& fiber = fibers[current];
  if (!fiber.products.groups.empty() || !fiber.products.open.empty())
    fail("a thread left the kernel before its products were done");
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

void launch(int grid, int threads, void (*kernel)(const void*), const void* argument, const Adversary& worst) {
  kernel_body = kernel, kernel_argument = argument, adversary = worst;
  gridDim = {grid, 1, 1};
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
        // 29 does not divide any number of threads, so every thread has its turn.
        const int any = static_cast<int>((turn * 29LL + turns * 31LL) % count);
        const int fiber = adversary.order == 1 ? count - 1 - turn : adversary.order == 2 ? any : turn;
        if (fibers[fiber].done) continue;
        threadIdx.x = fiber % threads;
        blockIdx = {block + fiber / threads, 0, 0};
        resume(fiber);
        live += !fibers[fiber].done;
      }
      if (static_cast<int>(fibers.size()) < cluster_blocks * threads) {  // the blocks of a cluster begin one after the other
        ++live;
        // Of more blocks than five, the last begins as late as the fifth would: those that began wait in turns.
        const int apart = std::min(500, 2500 / cluster_blocks);
        if (turns % apart == apart - 1) start_block(threads);
      }
      if (turns > 100000000 / threads) fail("threads wait at different barriers");
    }
    if (grid % cluster_blocks != 0) fail("a grid of %d blocks in clusters of %d", grid, cluster_blocks);
    if (std::count(block_has_waited, block_has_waited + cluster_blocks, true) != cluster_blocks)
      fail("a block has ended without waiting for the kernel before it");
    if (!bulk_copies.empty()) fail("a block has ended before its bulk copies were done");
    for (const Meeting& meeting : block_meetings)
      if (meeting.arrived != 0) fail("a thread left the kernel while others wait at a barrier");
  }
}

void __syncthreads() { block_meetings[block_of_cluster()].wait(blockDim.x); }
void __syncwarp() { warp_meetings[current / 32].wait(32); }

// All threads of a cluster, and those that have exited.
static Meeting cluster_meeting;
void cluster_arrive() {
  fibers[current].cluster_meeting = cluster_meeting.generation;
  if (++cluster_meeting.arrived < cluster_blocks * blockDim.x) return;
  cluster_meeting.arrived = 0;
  ++cluster_meeting.generation;
}
void cluster_wait() {
  while (cluster_meeting.generation == fibers[current].cluster_meeting) yield();
}

static Meeting named_meetings[kMaxCluster][16];
void named_barrier_sync(int id, int threads) {
  named_meetings[block_of_cluster()][id].wait(threads);
  const int group = threadIdx.x / 128, groups = blockDim.x / 128;
  if (adversary.order == 3 && fibers[current].meetings++ % groups == group)
    for (int i = 0; i < 600; ++i) yield();
}

uint32_t load_word(const uint32_t* p) {
  if (*p == 0) yield();  // who waits for another word lets others run
  return *p;
}
void semaphore_acquire(int* flag) {
  while (*flag == 0) yield();
  *flag = 0;
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

int __shfl_up_sync(uint32_t, int value, int delta) {
  const int lane = threadIdx.x % 32;
  return exchange(value)[lane >= delta ? lane - delta : lane];
}

uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) { return exchange(value)[threadIdx.x % 32 ^ mask]; }

float shuffle_xor(float value, int mask) { return exchange(value)[threadIdx.x % 32 ^ mask]; }

float broadcast(float value, int from) { return exchange(value)[from % 32]; }

int __shfl_sync(uint32_t, int value, int from) { return exchange(value)[from % 32]; }

uint32_t __match_any_sync(uint32_t, int value) {
  const int* all = exchange(value);
  uint32_t mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<uint32_t>(all[lane] == value) << lane;
  return mask;
}

uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const uint32_t* all = exchange(value);
  return *std::max_element(all, all + 32);
}

uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const uint32_t* all = exchange(value);
  return *std::min_element(all, all + 32);
}

uint32_t __ballot_sync(uint32_t, bool value) {
  const bool* all = exchange(value);
  uint32_t mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<uint32_t>(all[lane]) << lane;
  return mask;
}

uint32_t transpose8x8(uint32_t pair) {
  const uint32_t* all = exchange(pair);
  const int i = threadIdx.x % 32 / 4, j = threadIdx.x % 4;
  const auto element = [&](int row, int column) { return all[4 * row + column / 2] >> (16 * (column % 2)) & 0xFFFF; };
  return element(2 * j, i) | element(2 * j + 1, i) << 16;
}

void ldmatrix_x4(uint32_t (&out)[4], const uint4* row) {
  const uint4* const* rows = exchange(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int j = 0; j < 4; ++j) out[j] = reinterpret_cast<const uint32_t*>(rows[8 * j + g])[t];
  __syncwarp();  // nobody goes on to overwrite what another lane still reads
}

void ldmatrix_x4_transposed(uint32_t (&out)[4], const uint4* row) {
  const uint4* const* rows = exchange(row);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto element = [&](int line, int column) { return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(rows[line])[column]); };
  for (int j = 0; j < 4; ++j) out[j] = element(8 * j + 2 * t, g) | element(8 * j + 2 * t + 1, g) << 16;
  __syncwarp();
}

// ---- asynchronous copies ----

static void copy_bytes(void* to_shared, const void* from, size_t bytes, bool valid) {
  if (reinterpret_cast<uintptr_t>(from) % bytes || reinterpret_cast<uintptr_t>(to_shared) % bytes)
    fail("a %zu-byte copy between misaligned addresses", bytes);
  Copy copy{to_shared, make_uint4(0, 0, 0, 0), bytes};
  if (valid) std::memcpy(&copy.value, from, bytes);
  if (adversary.late_copies) fibers[current].copies.open.push_back(copy);
  else copy();
}
void cp_async16(uint4* to_shared, const void* from, bool valid) { copy_bytes(to_shared, from, 16, valid); }
void cp_async4(uint32_t* to_shared, const void* from) { copy_bytes(to_shared, from, 4, true); }
void cp_async_commit() { fibers[current].copies.commit(); }
void wait_for_copies(int pending) {
  fibers[current].copies.wait(pending, [](const Copy& copy) { copy(); });
}

static void settle(Mbarrier* barrier) {
  if (barrier->left > 0 || barrier->bytes != 0) return;
  barrier->left = barrier->arrivals;
  ++barrier->phase;
}

static void perform(const BulkCopy& copy) {
  std::memcpy(copy.to, copy.from != nullptr ? copy.from : &copy.value, copy.bytes);
  copy.barrier->bytes -= copy.bytes;
  settle(copy.barrier);
}

static void copy_now_or_late(const BulkCopy& copy) {
  if (!adversary.late_copies) return perform(copy);
  std::memset(copy.to, 0xFF, copy.bytes);
  bulk_copies.push_back(copy);
}

static void check(const Mbarrier* barrier) {
  if (barrier->arrivals == 0xFF) fail("a barrier that has not been initialized");  // as all of shared memory at first
}
void mbarrier_init(Mbarrier* barrier, int arrivals) {
  *barrier = {static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals), 0, 0};
}
void mbarrier_arrive(Mbarrier* barrier) {
  check(barrier);
  if (barrier->left == 0) fail("more arrivals at a barrier than it was made for");
  --barrier->left;
  settle(barrier);
}
void mbarrier_arrive_expect_tx(Mbarrier* barrier, int bytes) {
  barrier->bytes += bytes;
  mbarrier_arrive(barrier);
}

// Late copies come one at a time, when somebody waits for them; until then their place holds NaNs.
void mbarrier_wait(Mbarrier* barrier, int parity) {
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

RemotePlace remote_place(float* place, Mbarrier* barrier, int rank) {
  const int64_t distance = (rank - block_of_cluster()) * static_cast<int64_t>(shared_bytes);
  return {reinterpret_cast<char*>(place) + distance, reinterpret_cast<Mbarrier*>(reinterpret_cast<char*>(barrier) + distance), rank};
}
void send_floats(const RemotePlace& to, int offset, const float (&values)[4]) {
  if (!block_has_begun[to.rank]) fail("a block sends to one that may not have begun");
  check(to.barrier);
  BulkCopy copy = {to.address + offset, nullptr, 16, to.barrier, {}};
  std::memcpy(&copy.value, values, 16);
  copy_now_or_late(copy);
}

void copy_bulk(void* to_shared, const void* from, int bytes, Mbarrier* barrier, CachePolicy) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || reinterpret_cast<uintptr_t>(to_shared) % 16 || bytes % 16 || bytes <= 0)
    fail("a bulk copy of %d bytes, or between misaligned addresses", bytes);
  copy_now_or_late({to_shared, from, bytes, barrier, {}});
}

void tma_load_box(void* to_shared, const TensorMap* map, int k, int row, Mbarrier* barrier) {
  if (reinterpret_cast<uintptr_t>(map->matrix) % 16 || reinterpret_cast<uintptr_t>(to_shared) % 1024 || map->k % 8)
    fail("a box of a misaligned matrix, or to a misaligned address");
  for (int r = 0; r < map->box_rows; ++r)
    for (int unit = 0; unit < 8; ++unit) {  // zeros beyond the matrix
      const bool exists = row + r < map->rows && k + 8 * unit < map->k;
      const void* from = exists ? map->matrix + (row + r) * map->k + k + 8 * unit : nullptr;
      copy_now_or_late({static_cast<uint4*>(to_shared) + 8 * r + (unit ^ r % 8), from, 16, barrier, {}});
    }
}

// ---- products ----

template <bool BF16>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
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
template void mma<false>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);
template void mma<true>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);

void issue(const Product& product) {
  if (adversary.late_products) fibers[current].products.open.push_back(product);
  else product.multiply(product);
}
void wgmma_commit() { fibers[current].products.commit(); }
void wait_for_products(int pending) {
  fibers[current].products.wait(pending, [](const Product& product) { product.multiply(product); });
}

template <bool BF16>
void multiply_tile(const Product& product) {
  struct Operand { uint32_t a[4]; };
  const uint32_t* const a = product.registers;
  const Operand* lanes = exchange(Operand{{a[0], a[1], a[2], a[3]}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int c = 0; c < product.columns; ++c)
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i / 2), token = 8 * c + 2 * t + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k) {
        const uint32_t weight = lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + 2 * (k / 8)] >> (16 * (k % 2));
        const uint4& unit = product.b[token * 8 + ((2 * product.step + k / 8) ^ token % 8)];
        sum += widen<BF16>(weight & 0xFFFF) * widen<BF16>(reinterpret_cast<const uint16_t*>(&unit)[k % 8]);
      }
      product.acc[c][i] += sum;
    }
}
template void multiply_tile<false>(const Product&);
template void multiply_tile<true>(const Product&);

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

typedef float Element(const uint4* operand, int row, int k);
template <int K, Element* LEFT, Element* RIGHT>
static void multiply_elements(const Product& product) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32 % 4;
  for (int c = 0; c < product.columns; ++c)
    for (int i = 0; i < 4; ++i) {
      float sum = 0;
      for (int k = 0; k < K; ++k) sum += LEFT(product.a, 16 * warp + g + 8 * (i / 2), k) * RIGHT(product.b, 8 * c + 2 * t + i % 2, k);
      product.acc[c][i] = product.add ? product.acc[c][i] + sum : sum;
    }
}
void multiply_e4m3_shared(const Product& product) { multiply_elements<32, e4m3_element, e4m3_element>(product); }

template <bool BF16, bool TRANSPOSED_A, bool TRANSPOSED_B>
void multiply_shared(const Product& product) {
  multiply_elements<16, shared_element<BF16, TRANSPOSED_A>, shared_element<BF16, TRANSPOSED_B>>(product);
}
template void multiply_shared<false, false, false>(const Product&);
template void multiply_shared<false, false, true>(const Product&);
template void multiply_shared<false, true, false>(const Product&);
template void multiply_shared<false, true, true>(const Product&);
template void multiply_shared<true, false, false>(const Product&);
template void multiply_shared<true, false, true>(const Product&);
template void multiply_shared<true, true, false>(const Product&);
template void multiply_shared<true, true, true>(const Product&);
