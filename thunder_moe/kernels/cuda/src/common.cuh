// Types, 16-bit floats, a prefix sum over a thread block, and the SwiGLU activation, for all CUDA kernels.
// Compiled in front of every kernel, as kernels/cuda/nvrtc.py compiles files in the order that it is given; calls nothing.
// tests/emulator/cuda_emulator.h has CPU versions of the functions that are inline PTX here.

#ifdef CUDA_EMULATOR
#define DEVICE static inline
#define METHOD inline
#define OFFSET_OF(type, field) __builtin_offsetof(type, field)
#else
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define DEVICE __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field)  // NVRTC 13.0 has no __builtin_offsetof
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#define CLUSTER_SHARED(type, name, blocks) DYNAMIC_SHARED(type, name)  // of a kernel whose blocks form clusters

// On SM90 and newer a kernel's blocks start while the kernel before still runs (programmatic dependent launch, requested by
// kernels/cuda/nvrtc.py): they wait here for its results, and only then allow the next kernel's blocks to start. So behind this
// line all earlier kernels of the stream have completed. It is the first statement of a kernel that touches global memory. The
// exceptions are kernels that are told which operand the kernel before them writes (`x_from_previous_kernel`,
// `rows_from_previous_kernel`): they read the other operands in front of this line. If the kernel before is ours, it allowed them
// to start behind its own wait, so all kernels before it had completed and their results were visible. Hence every block of every
// kernel waits, also one that finds no work: otherwise a kernel could complete before the kernel that it follows.
//
// Between our kernels there may be inductor's, which start early, too (`triton.enable_pdl`). They wait before they allow the next
// kernel to start. They wait first if the kernel in front of them is not inductor's; otherwise they may load operands before they
// wait, but only operands that this kernel does not write. So by induction the same holds for mixed chains: once a kernel has
// waited, all earlier ones have completed, also those that read the memory which it is about to write (a buffer that inductor
// or the caching allocator uses again). Weights are never read in front of the wait, since the kernel in front may write them;
// only inside a chain of ours they are. A kernel of inductor that loads nothing (a fill) is the exception: it may not wait at all,
// so that the kernel behind it may find an earlier one unfinished. Inductor writes such a kernel if an operator is given a
// constant tensor that is made in the graph; no operator of ours needs one.
DEVICE void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads and stores of single words in global memory that blocks exchange, without an order with other accesses.
DEVICE void store_word(uint32_t* p, uint32_t word) { asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(word) : "memory"); }
DEVICE uint32_t load_word(const uint32_t* p) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
  return word;
}

// Stores 16 aligned bytes by one instruction; the compiler sometimes makes four of `*p = make_uint4(...)`.
DEVICE void store16(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE uint32_t rotate_left(uint32_t value, int by) { return __funnelshift_l(value, value, by); }
DEVICE uint32_t select_bits(uint32_t mask, uint32_t ones, uint32_t zeros) {  // bits of `ones` where the mask is set
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(out) : "r"(mask), "r"(ones), "r"(zeros));
  return out;
}

DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE float broadcast(float value, int from) { return __shfl_sync(0xFFFFFFFF, value, from); }
DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xFFFFFFFF, value, mask); }
DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }

DEVICE float half_to_float(uint16_t bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

template <bool BF16>
DEVICE float widen(uint16_t bits) {
  return BF16 ? bits_to_float(static_cast<uint32_t>(bits) << 16) : half_to_float(bits);
}

template <bool BF16>
DEVICE uint16_t narrow(float value) {
  uint16_t out;
  if constexpr (BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}
#endif

// Two 16-bit floats, the first in the low half.
template <bool BF16>
DEVICE uint32_t narrow2(float low, float high) {
#ifdef CUDA_EMULATOR
  return narrow<BF16>(low) | static_cast<uint32_t>(narrow<BF16>(high)) << 16;
#else
  uint32_t out;
  if constexpr (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
#endif
}

// Two words of codes in layout "tiled_64x64" (`to_tiled` in formats/tiled_64x64.py) -> four pairs of codes of each, the even k in
// the low half. A code's sign becomes the sign of a bf16; its other bits become the lowest bits of the exponent and the highest
// bits of the mantissa; all other bits are zero.
DEVICE void unpack_words(uint32_t (&first)[4], uint32_t (&second)[4], uint32_t even, uint32_t odd) {
  constexpr uint32_t kPair = 0x81C081C0;
  const uint32_t fourths = select_bits(0x06030603, even, odd << 2);  // both words hold half of both fourth pairs
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint32_t(&pairs)[4] = step ? second : first;
    const uint32_t word = step ? odd : even;
    pairs[0] = word & kPair;
    pairs[1] = (word << 4) & kPair;
    pairs[2] = rotate_left(word, 10) & kPair;
    pairs[3] = (step ? rotate_left(fourths, 12) : fourths << 6) & kPair;
  }
}

// Element i of an array of a dtype: 0 float32, 1 bfloat16, 2 float16.
DEVICE float load_float(const void* p, int64_t i, int dtype) {
  if (dtype == 0) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == 1 ? widen<true>(bits) : widen<false>(bits);
}

// The slot of a row, clamped to existing slots: row_slot is not trusted.
DEVICE int slot_of_row(const int* row_slot, int row, int rows) {
  return static_cast<int>(min(static_cast<uint32_t>(row_slot[row]), static_cast<uint32_t>(rows - 1)));
}

// An inclusive prefix sum: carry plus the sum of `value` over the threads up to this one; carry becomes the total. All threads
// call it.
template <int THREADS>
DEVICE int scan_block(int value, int* warp_total, int& carry) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_total[warp] = sum;
  __syncthreads();
  sum += carry;
  for (int i = 0; i < THREADS / 32; ++i) {
    if (i < warp) sum += warp_total[i];
    carry += warp_total[i];
  }
  __syncthreads();  // the next call may write warp_total
  return sum;
}

// `SwiGLU` of the Python package; args has alpha, up_shift and limit (<= 0: none).
template <class Args>
DEVICE float activate(const Args& args, float gate, float up) {
  if (args.limit > 0.0f) {
    gate = fminf(gate, args.limit);
    up = fminf(fmaxf(up, -args.limit), args.limit);
  }
  return __fdividef(gate, 1.0f + __expf(-args.alpha * gate)) * (up + args.up_shift);
}

struct TilePlace {
  int row, column;
};

// The place of one of rows * columns tiles. Within `group` rows, which stay in the L2 cache, rows vary fastest, so that tiles of one
// column follow each other.
DEVICE TilePlace place_of_tile(int index, int rows, int columns, int group) {
  int first = 0;
  if (rows > group) {
    first = index / (group * columns) * group;
    index -= first * columns;
    rows = min(rows - first, group);
  }
  return {first + index % rows, index / rows};
}
