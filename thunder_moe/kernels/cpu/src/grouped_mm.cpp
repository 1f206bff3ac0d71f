// CPU grouped GEMM with NVFP4 weights: out[m, n] = sum_k x[m, k] e2m1(code[e, n, k]) scale[e, n, k / 16] global[e, n].
// Called through ctypes by kernels/cpu/backend.py, which compiles it with -O3 -march=native: C functions on pointers.
// Calls the headers beside it, and at::parallel_for (torch's own thread pool).
//
// e2m1 * e4m3 has 6 significant bits, so a weight before its global scale is exact in bf16 as well as in fp32; the
// global scale multiplies the fp32 sum. Products are therefore exact: only the accumulation and the last rounding err.
//   gemv   few rows, bf16, AVX512_BF16: codes become bf16 in registers, dot, block scale on the partial sum; a weight
//          is read once and never stored.
//   slice  any rows, dtype and machine: a slice of N is dequantized into L2 and multiplied in register tiles;
//          bf16 dots where the machine has them, else fp32 FMA on GCC/clang vectors (AVX512, AVX2, NEON, ...).
//   exact  outputs that flushed subnormals or an overflow of the sum may have made wrong, again in fp64 (exact.h).
// Every output is the work of one task in a fixed order: results do not depend on the number of threads.
#include "exact.h"
#include "panels.h"
#include "register_tiles.h"

namespace {

// A dequantized slice stays in L2. fp16, 64 rows, (N, K) = (1536, 2048), one thread: 75 ms, with 256 KiB 85 ms.
constexpr int64_t kSliceBytes = 512 << 10;
constexpr int64_t kChunkBytes = 4096;  // of K at a time: 6 activation rows + 4 weight rows of 4 KiB stay in a 48 KiB L1
constexpr int64_t kStridePad = 64;     // bytes between packed rows, so that they are not a power of two apart
constexpr int64_t kTaskRows = 384;     // rows of one task of the slice kernel; more rows dequantize the slice again
constexpr int64_t kGemvCols = 32;      // outputs per task of the gemv kernel
constexpr int64_t kGemvRows = 8;       // rows at a time there: 2 x 8 sums + 2 x 4 weights + 2 dots of 32 registers

thread_local Scratch scratch;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
template <class Element>
int64_t padded_k(int64_t k) {
  return round_up(k, sizeof(Element) == 2 ? 32 : 16);
}
template <class Element>
int64_t slice_columns(int64_t k) {
  const int64_t fit = kSliceBytes / (padded_k<Element>(k) * int64_t(sizeof(Element)));
  return std::max<int64_t>(kTileCols, std::min(kMaxSliceCols, fit / kTileCols * kTileCols));
}

inline const float* as_element(const float* x, float*) { return x; }
inline const bf16* as_element(const bf16* x, bf16*) { return x; }
// All others are converted.
template <class T, class Element>
const Element* as_element(const T*, Element*) {
  return nullptr;
}
inline void convert(bf16 from, bf16* to) { *to = from; }
template <class T>
void convert(T from, float* to) {
  *to = to_float(from);
}

template <class T, class Element>
void slice_task(const Problem& problem, const Task& task) {
  const int64_t k = problem.k, padded = padded_k<Element>(k), columns = round_up(task.columns, kTileCols),
                stride = padded + kStridePad / int64_t(sizeof(Element));
  Element* weight = reinterpret_cast<Element*>(scratch.get((columns * padded + kTileRows * stride) * sizeof(Element)));
  Element* packed = weight + columns * padded;
  constexpr int64_t vector = sizeof(Element) == 2 ? 32 : kLanes;
  if (task.columns < columns)
    std::memset(static_cast<void*>(weight + (columns - kTileCols) * padded), 0, kTileCols * padded * sizeof(Element));
  for (int64_t c = 0; c < task.columns; ++c)
    dequantize_column(problem.codes(task.expert, task.column + c), problem.scales(task.expert, task.column + c), k,
                      padded, weight + c / kTileCols * kTileCols * padded + c % kTileCols * vector);
  float acc[kTileRows * kMaxSliceCols];
  const int64_t tiles = (task.rows + kTileRows - 1) / kTileRows, chunk = kChunkBytes / int64_t(sizeof(Element));
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t first = task.rows * tile / tiles, rows = task.rows * (tile + 1) / tiles - first;
    const T* source = static_cast<const T*>(problem.x) + (task.row + first) * k;
    const Element* x = padded == k ? as_element(source, packed) : nullptr;
    int64_t ldx = k;
    if (x == nullptr) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < k; ++i) convert(source[r * k + i], packed + r * stride + i);
        std::memset(static_cast<void*>(packed + r * stride + k), 0, (padded - k) * sizeof(Element));
      }
      x = packed;
      ldx = stride;
    }
    std::fill(acc, acc + rows * columns, 0.f);
    for (int64_t i = 0; i < padded; i += chunk)
      for (int64_t c = 0; c < columns; c += kTileCols)
        dot_rows(int(rows), x + i, ldx, weight + c * padded + kTileCols * i, std::min(chunk, padded - i), acc + c,
                 columns);
    write_rows<T>(problem, task, first, rows, acc, columns);
  }
}

// ---- few rows, bf16: a fused dequantization and dot ----

#if defined(HAS_AVX512_BF16)
// 64 bytes of codes are 32 words of four codes: word w shifted right by 4 j holds code 4 w + j in its low bits, so
// vpermw with the table repeated (it reads five bits) gives the values of codes j, 4 + j, 8 + j, ... Activations are
// stored in that order: [j, w] = x[4 w + j].
void permute_row(const bf16* x, int64_t k, int64_t rows, bf16* out) {
  for (int64_t base = 0; base < k; base += 128, out += 128 * rows) {
    for (int64_t part = 0; part < 4; ++part) {
      const int64_t left = std::min<int64_t>(32, std::max<int64_t>(0, k - base - 32 * part));
      const __mmask32 mask = left == 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
      const __m512i values = _mm512_maskz_loadu_epi16(mask, x + base + 32 * part);
      for (int j = 0; j < 4; ++j)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 32 * j + 8 * part),
                         _mm512_cvtepi64_epi16(_mm512_srli_epi64(values, 16 * j)));
    }
  }
}

struct GemvTables {
  __m512i values;  // bf16 of e2m1, twice
  GemvTables() {
    alignas(64) uint16_t words[32];
    for (int i = 0; i < 32; ++i) words[i] = uint16_t(bits_of(kE2M1[i & 15]) >> 16);
    values = _mm512_load_si512(words);
  }
};

// The eight block scales of 128 codes over 256, each in two lanes.
inline __m512 block_scales(__m128i scale) {
  return scales_over_256(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(scale, scale)));
}

// R rows of bf16, which are kParts<T> times as many as of T.
template <class T, int R>
void gemv_task(const Problem& problem, const Task& task) {
  const int64_t k = problem.k, padded = round_up(k, 128), whole = k / 128;
  const int64_t left = k - 128 * whole;  // a multiple of 16
  const __mmask64 code_mask = (__mmask64(1) << (left / 2)) - 1;
  const __mmask16 scale_mask = __mmask16((1u << (left / 16)) - 1);
  const bf16* x = problem.permuted + task.permuted * padded;
  const __m512i table = GemvTables().values;
  float sums[R][kGemvCols];
  // Two columns share the loads of x.
  for (int64_t column = task.column; column < task.column + task.columns; column += 2) {
    const int64_t other = std::min(column + 1, task.column + task.columns - 1);
    const uint8_t* codes[2] = {problem.codes(task.expert, column), problem.codes(task.expert, other)};
    const uint8_t* scale[2] = {problem.scales(task.expert, column), problem.scales(task.expert, other)};
    __m512 sum[2][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[0][r] = sum[1][r] = _mm512_setzero_ps();
    const auto step = [&](__m512i packed0, __m512i packed1, __m128i scale0, __m128i scale1,
                          const bf16* from) __attribute__((always_inline)) {
      __m512bh weight[2][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        weight[0][j] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(packed0, 4 * j), table);
        weight[1][j] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(packed1, 4 * j), table);
      }
      const __m512 factor0 = block_scales(scale0), factor1 = block_scales(scale1);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        __m512 dot0 = _mm512_setzero_ps(), dot1 = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const __m512bh row = load(from + 128 * r + 32 * j);
          dot0 = _mm512_dpbf16_ps(dot0, weight[0][j], row);
          dot1 = _mm512_dpbf16_ps(dot1, weight[1][j], row);
        }
        sum[0][r] = _mm512_fmadd_ps(dot0, factor0, sum[0][r]);
        sum[1][r] = _mm512_fmadd_ps(dot1, factor1, sum[1][r]);
      }
    };
    const auto bytes = [](const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); };
    for (int64_t i = 0; i < whole; ++i) {
      prefetch(codes[0] + 64 * i);
      prefetch(codes[1] + 64 * i);
      step(_mm512_loadu_si512(codes[0] + 64 * i), _mm512_loadu_si512(codes[1] + 64 * i), bytes(scale[0] + 8 * i),
           bytes(scale[1] + 8 * i), x + 128 * R * i);
    }
    if (left != 0)
      step(_mm512_maskz_loadu_epi8(code_mask, codes[0] + 64 * whole),
           _mm512_maskz_loadu_epi8(code_mask, codes[1] + 64 * whole),
           _mm_maskz_loadu_epi8(scale_mask, scale[0] + 8 * whole),
           _mm_maskz_loadu_epi8(scale_mask, scale[1] + 8 * whole), x + 128 * R * whole);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sums[r][column - task.column] = _mm512_reduce_add_ps(sum[0][r]) * 256.f;
      sums[r][other - task.column] = _mm512_reduce_add_ps(sum[1][r]) * 256.f;
    }
  }
  constexpr int rows = R / int(kParts<T>);
  for (int r = rows; r < R; ++r)
    for (int64_t c = 0; c < task.columns; ++c) sums[r - rows][c] += sums[r][c];
  write_rows<T>(problem, task, 0, rows, sums[0], kGemvCols);
}

template <class T>
void run_gemv(const Problem& problem, const Task& task) {
  switch (task.rows * kParts<T>) {
    case 1:
      return gemv_task<T, 1>(problem, task);
    case 2:
      return gemv_task<T, 2>(problem, task);
    case 3:
      return gemv_task<T, 3>(problem, task);
    case 4:
      return gemv_task<T, 4>(problem, task);
    case 5:
      return gemv_task<T, 5>(problem, task);
    case 6:
      return gemv_task<T, 6>(problem, task);
    case 7:
      return gemv_task<T, 7>(problem, task);
    case 8:
      return gemv_task<T, 8>(problem, task);
  }
}
#endif

#if defined(HAS_BRGEMM)
template <class T>
void panel_task(const Problem& problem, const Task& task) {
  const int64_t k = problem.k, width = panel_width(task.columns), depth = panel_depth(k);
  const int64_t blocks = (task.rows + kBlockRows - 1) / kBlockRows;
  const int64_t panel_size = depth * width, copy_size = kBlockRows * k;
  char* memory = scratch.get(size_t(panel_size + copy_size) * sizeof(bf16) +
                             size_t(blocks * kBlockRows * width) * sizeof(float));
  float* acc = reinterpret_cast<float*>(memory);
  bf16* panel = reinterpret_cast<bf16*>(acc + blocks * kBlockRows * width);
  for (int64_t first = 0; first < k; first += depth) {
    const int64_t count = std::min(depth, k - first);
    for (int64_t c = 0; c < width; c += 16)
      decode_pairs(problem.codes(task.expert, task.column + c) + first / 2, k / 2,
                   problem.scales(task.expert, task.column + c) + first / 16, k / 16,
                   std::min<int64_t>(16, task.columns - c), count, width, panel + 2 * c);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * kBlockRows, rows = std::min(kBlockRows, task.rows - row), padded = padded_rows(rows);
      float* sums = acc + row * width;
      for (int64_t part = 0; part < kParts<T>; ++part) {
        const bf16* from = problem.parts + (part * problem.count + task.row + row) * k;
        const int64_t left = (kParts<T> - part) * problem.count - task.row - row;
        from = readable_rows(from, rows, padded, left, k, panel + panel_size);
        multiply_panel(padded, width, count, from + first, k, panel, first > 0 || part > 0, sums);
      }
      if (first + count == k) write_rows<T>(problem, task, row, rows, sums, width);
    }
  }
}
#endif

template <class T>
void run_task(const Problem& problem, const Task& task) {
#if defined(HAS_AVX512_BF16)
  if constexpr (sizeof(T) == 2) {
    if (task.kernel == Kernel::gemv) return run_gemv<T>(problem, task);
#if defined(HAS_BRGEMM)
    if (task.kernel == Kernel::panel) return panel_task<T>(problem, task);
#endif
  }
  using Element = std::conditional_t<std::is_same<T, bf16>::value, bf16, float>;
#else
  using Element = float;
#endif
  slice_task<T, Element>(problem, task);
}

// What grouped_mm is told of the kernels: experts with at most `gemv` rows take the gemv kernel, those with at least
// `panel` rows the panel kernel, others slices; those with more than `most` rows are left out.
struct Limits {
  int64_t gemv, panel, most;
};

#if defined(HAS_AVX512_BF16)
template <class T>
const bf16* as_parts(const T* x, int64_t count, int64_t k, Scratch& memory) {
  if constexpr (std::is_same<T, bf16>::value) return x;
  const int64_t size = count * k;
  bf16* parts = reinterpret_cast<bf16*>(memory.get(size_t(kParts<T> * size) * sizeof(bf16)));
  if constexpr (sizeof(T) == 2)
    for_each(count, [&](int64_t row) {
      bf16 *high = parts + row * k, *low = high + size;
      for (int64_t i = 0; i < k; ++i) split(x[row * k + i], high + i, low + i);
    });
  return parts;
}

// Rows of gemv tasks in the order that gemv reads, the parts of a group behind each other.
template <class T>
const bf16* permute_rows(const Problem& problem, const std::vector<Task>& tasks, Scratch& memory) {
  struct Row {
    int64_t row, group, rows;  // the row of x, the first permuted row of its group, the rows of that group
  };
  std::vector<Row> rows;
  for (const Task& task : tasks)
    if (task.kernel == Kernel::gemv && task.column == 0)
      for (int64_t part = 0; part < kParts<T>; ++part)
        for (int64_t r = 0; r < task.rows; ++r)
          rows.push_back({part * problem.count + task.row + r, task.permuted, kParts<T> * task.rows});
  if (rows.empty()) return nullptr;
  const int64_t k = problem.k, padded = round_up(k, 128), count = int64_t(rows.size());
  bf16* to = reinterpret_cast<bf16*>(memory.get(size_t(count * padded) * sizeof(bf16)));
  for_each((count + 15) / 16, [&](int64_t i) {
    for (int64_t j = 16 * i; j < std::min(count, 16 * (i + 1)); ++j) {
      const Row& row = rows[size_t(j)];
      permute_row(problem.parts + row.row * k, k, row.rows, to + row.group * padded + 128 * (j - row.group));
    }
  });
  return to;
}
#endif

template <class T>
void grouped_mm(Problem problem, const int32_t* offsets, int64_t num_experts, const Limits& limits) {
  const int64_t k = problem.k, n = problem.n;
#if defined(HAS_AVX512_BF16)
  constexpr bool native = sizeof(T) == 2;
#else
  constexpr bool native = false;
#endif
#if defined(HAS_BRGEMM)
  constexpr bool panels = native;
#else
  constexpr bool panels = false;
#endif
  const int64_t slice = native && std::is_same<T, bf16>::value ? slice_columns<bf16>(k) : slice_columns<float>(k);
  std::vector<Task> tasks;
  int64_t permuted = 0;
  bool parts = false;
  const auto within = [&](int64_t row) { return std::min(std::max<int64_t>(row, 0), problem.count); };
  // Rows in groups of about the same size, at most `most`, times columns in slices of `wide`.
  const auto add = [&](Kernel kernel, int64_t e, int64_t begin, int64_t rows, int64_t most, int64_t wide) {
    const int64_t groups = (rows + most - 1) / most;
    for (int64_t column = 0; column < n; column += wide)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = rows * g / groups, last = rows * (g + 1) / groups;
        tasks.push_back({kernel, e, begin + first, last - first, column, std::min(wide, n - column),
                         permuted + kParts<T> * first});
      }
  };
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t begin = e == 0 ? 0 : within(offsets[e - 1]), rows = within(offsets[e]) - begin;
    if (rows <= 0 || rows > limits.most) continue;
    if (native && rows <= limits.gemv) {
      add(Kernel::gemv, e, begin, rows, kGemvRows / kParts<T>, kGemvCols);
      permuted += kParts<T> * rows;
      parts = true;
    } else if (panels && rows >= limits.panel) {
      add(Kernel::panel, e, begin, rows, kPanelTaskRows, kPanelCols);
      parts = true;
    } else {
      add(Kernel::slice, e, begin, rows, kTaskRows, slice);
    }
  }
  Scratch split_rows, permuted_rows;
#if defined(HAS_AVX512_BF16)
  if (parts) {
    problem.parts = as_parts<T>(static_cast<const T*>(problem.x), problem.count, k, split_rows);
    problem.permuted = permute_rows<T>(problem, tasks, permuted_rows);
  }
#endif
  for_each(
      int64_t(tasks.size()), [&](int64_t i) { run_task<T>(problem, tasks[size_t(i)]); },
      [&] {
#if defined(HAS_BRGEMM)
        if (panels) at::native::cpublas::brgemm_release();
#endif
      });
}

template <class T>
void store_values(const float* values, T* out) {
  for (int i = 0; i < 16; ++i) out[i] = from_float<T>(values[i]);
}
#if defined(HAS_AVX512)
template <>
void store_values(const float* values, float* out) {
  _mm512_storeu_ps(out, _mm512_loadu_ps(values));
}
template <>
void store_values(const float* values, fp16* out) {
  const __m512 all = _mm512_loadu_ps(values);  // torch's NaN has no sign
  const __mmask16 nan = _mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q);
  const __m256i half = _mm512_cvtps_ph(all, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7E00)));
}
template <>
void store_values(const float* values, bf16* out) {  // subnormals too, which vcvtneps2bf16 would make zeros
  const __m512 all = _mm512_loadu_ps(values);
  const __mmask16 nan = _mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q);
  const __m512i bits = _mm512_castps_si512(all);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
  const __m512i rounded = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7FC00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

template <class T>
void dequantize_rows(const uint8_t* qdata, const uint8_t* scale, const float* global, bool per_row, int64_t rows,
                     int64_t n, int64_t k, T* out) {
  constexpr int64_t kRows = 16;
  for_each((rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t row = kRows * i; row < std::min(rows, kRows * (i + 1)); ++row) {
      const float factor = global[per_row ? row : row / n];
      const uint8_t *codes = qdata + row * (k / 2), *scales = scale + row * (k / 16);
      T* to = out + row * k;
      for (int64_t block = 0; block < k / 16; ++block) {
        if (block % 8 == 0) prefetch(codes + 8 * block);
        alignas(64) float values[16];
        dequantize_block(codes + 8 * block, kTables.e4m3[scales[block]] * factor, values);
        store_values(values, to + 16 * block);
      }
    }
  });
}

}  // namespace

extern "C" {

// What the last call that returned 2 in this thread died of.
const char* thunder_moe_error() { return thunder_moe_last_error.c_str(); }

// Kernels that were built for this CPU: 1 gemv, 2 panels.
int32_t thunder_moe_kernels() {
  int32_t kernels = 0;
#if defined(HAS_AVX512_BF16)
  kernels |= 1;
#endif
#if defined(HAS_BRGEMM)
  kernels |= 2;
#endif
  return kernels;
}

// out[row, k] for rows of [E, N]; per_row: global is [E * N] rather than [E]. Returns what guarded does.
int32_t thunder_moe_dequantize(const uint8_t* qdata, const uint8_t* scale, const float* global, int32_t per_row,
                               int64_t rows, int64_t n, int64_t k, int32_t dtype, void* out) {
  return guarded([&] {
    if (dtype == kFloat32) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<float*>(out));
    if (dtype == kBFloat16) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<bf16*>(out));
    if (dtype == kFloat16) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<fp16*>(out));
  });
}

// At most that many threads for calls of this thread; 0 is all of torch's.
void thunder_moe_set_workers(int32_t workers) { thunder_moe_most_workers = workers; }

// x (count, k); row ends are held to count. Experts whose number of rows is above max_rows are left out. gemv_rows: rows
// up to which 16-bit x takes the gemv kernel, panel_rows: from which it takes the panel kernel, where there are these.
int32_t thunder_moe_grouped_mm(const void* x, int64_t count, const uint8_t* qdata, const uint8_t* scale,
                               const float* global, int32_t per_column, const int32_t* offsets, int64_t num_experts,
                               int64_t n, int64_t k, int32_t dtype, int64_t max_rows, int64_t gemv_rows,
                               int64_t panel_rows, void* out) {
  return guarded([&] {
    const Problem problem{x, qdata, scale, global, out, n, k, per_column != 0, count, nullptr, nullptr};
    const Limits limits{gemv_rows, panel_rows, max_rows};
    if (dtype == kFloat32) grouped_mm<float>(problem, offsets, num_experts, limits);
    if (dtype == kBFloat16) grouped_mm<bf16>(problem, offsets, num_experts, limits);
    if (dtype == kFloat16) grouped_mm<fp16>(problem, offsets, num_experts, limits);
  });
}

}  // extern "C"
