// Runs a CUDA kernel's own source on a CPU: one block at a time, each thread a fiber, warp and block instructions as
// meeting points. Included before the kernel by the program that test_cuda.py compiles; calls ucontext alone.
// It checks what a kernel computes and that its barriers match, not how fast it is nor how memory is ordered.
#pragma once
#define CUDA_EMULATOR
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(type, name) alignas(16) static type name[(227 << 10) / sizeof(type)]
using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct dim { int x, y, z; };
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

static dim threadIdx, blockIdx, gridDim, blockDim;

// ---- fibers ----

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::function<void()> kernel_body;

static void yield() {
  const int self = threadIdx.x;
  swapcontext(&fibers[self].context, &scheduler);
  threadIdx.x = self;
}

static void fiber_main() {
  kernel_body();
  fibers[threadIdx.x].done = true;
  const int self = threadIdx.x;
  swapcontext(&fibers[self].context, &scheduler);
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

static Meeting block_meeting;
static Meeting warp_meetings[32];

// A row of blocks: those of number y and z along the other dimensions of the grid.
template <class Body>
static void launch(int grid, int threads, Body body, int y = 0, int z = 0) {
  kernel_body = body;
  gridDim = {grid, y + 1, z + 1};
  blockDim = {threads, 1, 1};
  for (int block = 0; block < grid; ++block) {
    blockIdx = {block, y, z};
    fibers = std::vector<Fiber>(threads);
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[i];
      constexpr size_t kStack = 1 << 16;
      fiber.stack = std::make_unique<char[]>(kStack);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, fiber_main, 0);
    }
    for (int live = threads, turns = 0; live > 0; ++turns) {
      live = 0;
      for (int i = 0; i < threads; ++i) {
        if (fibers[i].done) continue;
        threadIdx.x = i;
        swapcontext(&scheduler, &fibers[i].context);
        live += !fibers[i].done;
      }
      if (turns > 100000000 / threads) {
        std::fprintf(stderr, "cuda_emulator: threads wait at different barriers\n");
        std::abort();
      }
    }
    if (block_meeting.arrived != 0) {
      std::fprintf(stderr, "cuda_emulator: a thread left the kernel while others wait at a barrier\n");
      std::abort();
    }
  }
}

static void __syncthreads() { block_meeting.wait(blockDim.x); }
static void __syncwarp() { warp_meetings[threadIdx.x / 32].wait(32); }

// ---- collectives of a warp: each lane leaves its value, all meet, each takes what it wants ----

template <class T>
static const T* exchange(const T& mine) {
  static T slots[2][32][32];
  static long turn[32][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

static int __shfl_sync(uint32_t, int value, int from) { return exchange(value)[from % 32]; }

static uint32_t __match_any_sync(uint32_t, int value) {
  const int* all = exchange(value);
  uint32_t mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<uint32_t>(all[lane] == value) << lane;
  return mask;
}

static int __popc(uint32_t bits) { return __builtin_popcount(bits); }
static int atomicAdd(int* to, int value) {
  const int old = *to;
  *to += value;
  return old;
}
#define __expf(x) std::exp(x)

// ---- numbers ----

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
  for (int i = 0; i < 4; ++i) out |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
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

static uint4 load_weights16(const uint8_t* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) {
    std::fprintf(stderr, "cuda_emulator: a 16-byte load from a misaligned address\n");
    std::abort();
  }
  return *reinterpret_cast<const uint4*>(p);
}

static void copy16(uint4* to_shared, const uint16_t* from, bool valid) {
  if (reinterpret_cast<uintptr_t>(from) % 16) {
    std::fprintf(stderr, "cuda_emulator: a 16-byte copy from a misaligned address\n");
    std::abort();
  }
  *to_shared = valid ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}
static void commit_copies() {}
template <int PENDING>
static void wait_for_copies() {}

static uint4* align_shared(uint4* memory, uint32_t to) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  return memory + ((to - address % to) % to) / sizeof(uint4);
}

// wgmma, as if it were done at once: a warp's 16 of 64 rows times the tokens of a swizzled tile in shared memory.
static void fence_registers() {}
static void commit_products() {}
template <int PENDING>
static void wait_for_products() {}
static void fence_shared() {}

template <bool BF16, int C>
static void wgmma(float (&acc)[C][4], const uint32_t (&a)[4], const uint4* tile, int step) {
  struct Operand { uint32_t a[4]; };
  const Operand* lanes = exchange(Operand{{a[0], a[1], a[2], a[3]}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int c = 0; c < C; ++c)
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
