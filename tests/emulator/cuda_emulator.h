// Runs the source of a CUDA kernel on a CPU: one block or cluster of blocks at a time, each thread a fiber, warp and block
// instructions as meeting points. Included before the kernel by the programs of emulator/build.py, and by cuda_emulator.cpp,
// which has all that need not be compiled with each kernel.
// Where hardware may act early or late, it acts at the worst time that an `Adversary` allows, so that a missing barrier or
// wait gives a wrong result. It checks what a kernel computes and that its barriers match, not how fast it is.
#pragma once
#define CUDA_EMULATOR
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __trap() std::abort()
#define DYNAMIC_SHARED(type, name)                                 \
  alignas(16) static type name[(227 << 10) / sizeof(type)];        \
  dynamic_shared = reinterpret_cast<const char*>(name);            \
  if (first_of_block()) std::memset(name, 0xFF, sizeof(name)) /* NaNs */
// That of each block of a cluster; the kernel's first statement, which starts the other blocks.
#define CLUSTER_SHARED(type, name, blocks)                                             \
  alignas(16) static type shared_of_blocks[blocks][(227 << 10) / sizeof(type)];        \
  type* const name = shared_of_blocks[rank_in_cluster(blocks, sizeof(*shared_of_blocks))]; \
  if (first_of_block()) std::memset(name, 0xFF, sizeof(*shared_of_blocks))

template <class T>
static T max(T a, T b) { return a < b ? b : a; }
template <class T>
static T min(T a, T b) { return b < a ? b : a; }

struct uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct dim { int x, y, z; };
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// As large as an mbarrier: a phase is over when all have arrived and all bytes that were announced have come.
struct Mbarrier {
  uint8_t arrivals, left;
  uint16_t phase;
  int bytes;
};
// A matrix of 16-bit numbers (rows, k), read in boxes of 64 k by box_rows.
struct alignas(64) TensorMap {
  const uint16_t* matrix;
  int64_t rows, k, box_rows;
  int64_t unused[12];
};

// What hardware is free to choose.
struct Adversary {
  void* late_result;  // of the kernel before, or null: NaNs until a thread of the block waits for that kernel
  int64_t late_bytes;
  int late_copies;    // asynchronous copies are done when they are waited for, not when they are issued
  int late_products;  // likewise wgmma, which then reads its registers and shared memory
  int order;          // of threads between meeting points: 0 ascending, 1 descending, 2 another one each time, 3 ascending, and
                      // one warpgroup after the other tarries where some warpgroups meet
};

// Each library has its own. The types above stay visible: kernels' structs and `run` have them.
#pragma GCC visibility push(hidden)

extern dim threadIdx, blockIdx, gridDim, blockDim;
extern const char* dynamic_shared;
bool first_of_block();
int rank_in_cluster(int blocks, size_t bytes);
[[noreturn]] void fail(const char* format, ...);
void launch(int grid, int threads, void (*kernel)(const void*), const void* argument, const Adversary& worst);

void await_previous_kernel();
void __syncthreads();
void __syncwarp();
void cluster_arrive();
void cluster_wait();
void named_barrier_sync(int id, int threads);
static void __threadfence() {}

// ---- collectives of a warp ----

int __shfl_up_sync(uint32_t, int value, int delta);
uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask);
float shuffle_xor(float value, int mask);
float broadcast(float value, int from);
int __shfl_sync(uint32_t, int value, int from);
uint32_t __match_any_sync(uint32_t, int value);
uint32_t __reduce_max_sync(uint32_t, uint32_t value);
uint32_t __reduce_min_sync(uint32_t, uint32_t value);
uint32_t __ballot_sync(uint32_t, bool value);
uint32_t transpose8x8(uint32_t pair);
void ldmatrix_x4(uint32_t (&out)[4], const uint4* row);
void ldmatrix_x4_transposed(uint32_t (&out)[4], const uint4* row);
static bool elect_one() { return threadIdx.x % 32 == 31; }  // not the one that a kernel may have in mind

// ---- numbers ----

static int __ffs(int bits) { return __builtin_ffs(bits); }
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }
#define __expf(x) std::exp(x)
#define __fdividef(x, y) ((x) / (y))

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
static uint32_t rotate_left(uint32_t value, int by) { return value << by | value >> (32 - by); }
static uint32_t select_bits(uint32_t mask, uint32_t ones, uint32_t zeros) { return (mask & ones) | (~mask & zeros); }

template <bool BF16>
static uint32_t multiply2(uint32_t a, uint32_t b) {
  const uint32_t low = narrow<BF16>(widen<BF16>(a & 0xFFFF) * widen<BF16>(b & 0xFFFF));
  const uint32_t high = narrow<BF16>(widen<BF16>(a >> 16) * widen<BF16>(b >> 16));
  return low | high << 16;
}
template <bool BF16, bool HIGH>
static uint32_t multiply_by_half(uint32_t pair, uint32_t scale) {
  return multiply2<BF16>(pair, permute_bytes(scale, 0, HIGH ? 0x3232 : 0x1010));
}

// ---- memory ----

static uint32_t atomicMax(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to = max(before, value);
  return before;
}
template <class Number>
static Number atomicAdd(Number* to, Number value) {
  const Number old = *to;
  *to += value;
  return old;
}
static void prefetch(const void*) {}
static uint4 load_weights16(const uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) fail("a 16-byte load from a misaligned address");
  return *reinterpret_cast<const uint4*>(p);
}
static float load_l2(const float* p) { return *p; }
static void store_word(uint32_t* p, uint32_t word) { *p = word; }
static void store16(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const char* const to = static_cast<const char*>(p);
  if (dynamic_shared != nullptr && to >= dynamic_shared && to < dynamic_shared + (227 << 10)) fail("st.global to shared memory");
  *static_cast<uint4*>(p) = make_uint4(a, b, c, d);
}
uint32_t load_word(const uint32_t* p);
static void semaphore_release(int* flag) { *flag = 1; }
void semaphore_acquire(int* flag);
static uint4* align_shared(uint4* memory, uint32_t to) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  return memory + ((to - address % to) % to) / sizeof(uint4);
}

// ---- asynchronous copies ----

void cp_async16(uint4* to_shared, const void* from, bool valid);
void cp_async4(uint32_t* to_shared, const void* from);
void cp_async_commit();
void wait_for_copies(int pending);
template <int PENDING>
static void cp_async_wait() { wait_for_copies(PENDING); }

typedef Mbarrier* MbarrierAddress;
static Mbarrier* mbarrier_address(void* barrier) { return static_cast<Mbarrier*>(barrier); }
void mbarrier_init(Mbarrier* barrier, int arrivals);
static void fence_mbarrier_init() {}
void mbarrier_arrive(Mbarrier* barrier);
void mbarrier_arrive_expect_tx(Mbarrier* barrier, int bytes);
void mbarrier_wait(Mbarrier* barrier, int parity);
static void mbarrier_wait_cluster(Mbarrier* barrier, int parity) { mbarrier_wait(barrier, parity); }

struct RemotePlace {
  char* address;
  Mbarrier* barrier;
  int rank;
};
RemotePlace remote_place(float* place, Mbarrier* barrier, int rank);
void send_floats(const RemotePlace& to, int offset, const float (&values)[4]);

typedef bool CachePolicy;
static CachePolicy cache_policy(bool read_once) { return read_once; }
void copy_bulk(void* to_shared, const void* from, int bytes, Mbarrier* barrier, CachePolicy);

static void prefetch_tensor_map(const TensorMap*) {}
void tma_load_box(void* to_shared, const TensorMap* map, int k, int row, Mbarrier* barrier);

// ---- products ----

template <int REGISTERS>
static void shrink_registers() {}
template <int REGISTERS>
static void grow_registers() {}
template <int NUMBER>
static void keep_apart() {}
template <int R, int C>
static void keep_behind(float (&)[R][C][4]) {}

template <bool BF16>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

typedef const uint4* MatrixDescriptor;
static MatrixDescriptor matrix_descriptor(const uint4* tile) { return tile; }
// Boxes [64 rows][64 columns] with 128-byte swizzle that are read transposed; adding 128 moves by 16 rows.
static MatrixDescriptor row_descriptor(const uint8_t* box) { return reinterpret_cast<const uint4*>(box); }

// A warpgroup's sums of 64 rows and 8 * columns tokens: what a thread has of them, and the operands that are read when it is done.
struct Product {
  void (*multiply)(const Product&);
  float (*acc)[4];
  int columns;
  const uint32_t* registers;  // or `a`
  MatrixDescriptor a, b;
  int step;
  bool add;
};
void issue(const Product& product);
static void wgmma_fence() {}
static void fence_proxy_async() {}
void wgmma_commit();
void wait_for_products(int pending);
template <int PENDING>
static void wgmma_wait() { wait_for_products(PENDING); }

// A warp's 16 of 64 rows times the first 8 * columns tokens of a swizzled tile in shared memory.
template <bool BF16>
void multiply_tile(const Product& product);
template <bool BF16, int N, int C>
static void wgmma(float (&acc)[C][4], const uint32_t (&a)[4], MatrixDescriptor tile, int step) {
  issue({multiply_tile<BF16>, acc, N, a, nullptr, tile, step, true});
}

template <bool BF16, bool TRANSPOSED_A, bool TRANSPOSED_B>
void multiply_shared(const Product& product);
template <bool BF16, bool TRANSPOSED_A, bool TRANSPOSED_B, int C>
static void wgmma_shared(float (&acc)[C][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  issue({multiply_shared<BF16, TRANSPOSED_A, TRANSPOSED_B>, acc, C, nullptr, a, b, 0, add});
}

void multiply_e4m3_shared(const Product& product);
template <int C>
static void wgmma_e4m3(float (&acc)[C][4], MatrixDescriptor a, MatrixDescriptor b, bool add) {
  issue({multiply_e4m3_shared, acc, C, nullptr, a, b, 0, add});
}

#pragma GCC visibility pop
