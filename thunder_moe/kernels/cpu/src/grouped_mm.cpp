// CPU grouped GEMM with packed weights: out[m, n] = sum_k x[m, k] code[e, n, k] scale[e, n, k / block] global[e, n].
// Called through ctypes by kernels/cpu/backend.py, which compiles it with -O3 -march=native: C functions on pointers.
// Calls the headers beside it, and at::parallel_for (torch's own thread pool).
//
// NVFP4's e2m1 * e4m3 has 6 significant bits, MXFP8's e4m3 times a power of two has 4, so a weight before its global
// scale is exact in bf16 as well as in fp32; the global scale multiplies the fp32 sum. Products are therefore exact:
// only the accumulation and the last rounding err.
//   gemv   few rows, AVX512 (gemv.h): codes become numbers in registers and are multiplied at once; a weight is read
//          once and never stored. By bf16 dots (AVX512_BF16, 16-bit rows) or fp32 FMA.
//   tile   few rows, 16 bits, AMX (tiles.h): codes become tiles of bf16 in L1, which the matrix unit multiplies.
//   slice  any rows, dtype and machine: a slice of N is dequantized into L2 and multiplied in register tiles;
//          bf16 dots where they are fast, else fp32 FMA on GCC/clang vectors (AVX512, AVX2, NEON, ...).
//   panel  16-bit rows, AVX512_BF16 (panels.h): 64 columns are decoded into L2 for oneDNN's brgemm.
//   exact  outputs that flushed subnormals or an overflow of the sum may have made wrong, again in fp64 (exact.h).
// Every output is the work of one task in a fixed order: results do not depend on the number of threads.
#include "exact.h"
#include "gemv.h"
#include "panels.h"
#include "register_tiles.h"
#include "tiles.h"

namespace {

// A dequantized slice stays in L2. fp16, 64 rows, (N, K) = (1536, 2048), one thread: 75 ms, with 256 KiB 85 ms.
constexpr int64_t kSliceBytes = 512 << 10;
constexpr int64_t kChunkBytes = 4096;  // of K at a time: 6 activation rows + 4 weight rows of 4 KiB stay in a 48 KiB L1
constexpr int64_t kStridePad = 64;     // bytes between packed rows, so that they are not a power of two apart
constexpr int64_t kTaskRows = 384;     // rows of one task of the slice kernel; more rows dequantize the slice again
thread_local Scratch scratch;

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

template <class Format, class T, class Element>
void slice_task(const Problem& problem, const Task& task) {
  const int64_t k = problem.k, padded = padded_k<Element>(k), columns = round_up(task.columns, kTileCols),
                stride = padded + kStridePad / int64_t(sizeof(Element));
  Element* weight = reinterpret_cast<Element*>(scratch.get((columns * padded + kTileRows * stride) * sizeof(Element)));
  Element* packed = weight + columns * padded;
  constexpr int64_t vector = sizeof(Element) == 2 ? 32 : kLanes;
  if (task.columns < columns)
    std::memset(static_cast<void*>(weight + (columns - kTileCols) * padded), 0, kTileCols * padded * sizeof(Element));
  for (int64_t c = 0; c < task.columns; ++c)
    dequantize_column(Format{}, problem.codes(task.expert, task.column + c),
                      problem.scales(task.expert, task.column + c), k, padded,
                      weight + c / kTileCols * kTileCols * padded + c % kTileCols * vector);
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
    write_rows<Format, T>(problem, task, first, rows, acc, columns);
  }
}

#if defined(HAS_BRGEMM)
template <class Format, class T>
void panel_task(const Problem& problem, const Task& task) {
  const int64_t k = problem.k, width = panel_width(task.columns), depth = panel_depth(k);
  const int64_t blocks = (task.rows + kBlockRows - 1) / kBlockRows;
  char* memory = scratch.get(size_t(depth * width) * sizeof(bf16) + size_t(blocks * kBlockRows * width) * sizeof(float));
  float* acc = reinterpret_cast<float*>(memory);
  bf16* panel = reinterpret_cast<bf16*>(acc + blocks * kBlockRows * width);
  for (int64_t first = 0; first < k; first += depth) {
    const int64_t count = std::min(depth, k - first);
    for (int64_t c = 0; c < width; c += 16)
      decode_pairs(Format{}, problem.codes(task.expert, task.column + c) + Format::bytes(first), problem.code_stride,
                   problem.scales(task.expert, task.column + c) + first / Format::kBlock, problem.scale_stride,
                   std::min<int64_t>(16, task.columns - c), count, width, panel + 2 * c);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = block * kBlockRows, rows = std::min(kBlockRows, task.rows - row), padded = padded_rows(rows);
      float* sums = acc + row * width;
      for (int64_t part = 0; part < kParts<T>; ++part) {
        const bf16* from = problem.parts.row(part, task.row + row) + first;
        multiply_panel(problem.parts.readable(task.row + row, padded), width, count, from, problem.parts.stride, panel,
                       first > 0 || part > 0, sums);
      }
      if (first + count == k) write_rows<Format, T>(problem, task, row, rows, sums, width);
    }
  }
}
#endif

template <class Format, class T>
void run_task(const Problem& problem, const Task& task) {
#if defined(HAS_AVX512)
  if (task.kernel == Kernel::fma) return run_fma<Format, T>(problem, task);
#endif
#if defined(HAS_AVX512_BF16)
  if constexpr (sizeof(T) == 2) {
    if (task.kernel == Kernel::dots) return run_dots<Format, T>(problem, task);
#if defined(HAS_BRGEMM)
    if (task.kernel == Kernel::panel) return panel_task<Format, T>(problem, task);
#endif
#if defined(HAS_TILES)
    if constexpr (std::is_same<Format, Nvfp4>::value)
      if (task.kernel == Kernel::tile) return tile_task<T>(problem, task);
#endif
  }
  if constexpr (std::is_same<T, bf16>::value)
    if (task.kernel == Kernel::slice) return slice_task<Format, T, bf16>(problem, task);
#endif
  slice_task<Format, T, float>(problem, task);
}

// Calls run with the format's struct.
template <class F>
void with_format(int32_t format, const F& run) {
  if (format == kNvfp4) run(Nvfp4{});
  if (format == kMxfp8) run(Mxfp8{});
}
// AMX tiles of MXFP8 are panels.
template <class Format>
constexpr bool kHasTiles = std::is_same<Format, Nvfp4>::value;

// The choice of kernels: experts with at most `gemv` rows take a gemv kernel, `fma` or dots; experts with at most `tile`
// rows take tiles, with at least `panel` rows panels, and all others slices, of fp32 or, for 16-bit x, of bf16. Experts
// with more than `most` rows are left out.
struct Limits {
  int64_t gemv, tile, panel, most;
  bool fma, fp32_slices;
};

#if defined(HAS_AVX512_BF16)
template <class T>
Parts as_parts(const T* x, int64_t count, int64_t first, int64_t last, int64_t k, bool copy, Scratch& memory) {
  if constexpr (std::is_same<T, bf16>::value)
    if (!copy) return {x, 0, count, k};
  if constexpr (sizeof(T) == 2)
    return copy_parts<T>(first, last, k, memory, [&](int64_t row, bf16* high, bf16* low) {
      for (int64_t i = 0; i < k; ++i) split(x[row * k + i], high + i, low + i);
    });
  return {};
}
#endif

#if defined(HAS_AVX512)
// Rows of gemv tasks in the order that gemv reads, of all of a group behind each other, and the parts of dots: a row at
// a time by write(row of x, part, number of rows in the group, first element of the group, index within the group).
template <class Element, class F>
const Element* gather_groups(const Problem& problem, const std::vector<Task>& tasks, Kernel kernel, int64_t parts,
                             Scratch& memory, const F& write) {
  struct Row {
    int64_t row, part, group, rows, index;
  };
  std::vector<Row> rows;
  for (const Task& task : tasks)
    if (task.kernel == kernel && task.column == 0)
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t r = 0; r < task.rows; ++r)
          rows.push_back({task.row + r, part, task.permuted, parts * task.rows, part * task.rows + r});
  if (rows.empty()) return nullptr;
  const int64_t padded = round_up(problem.k, 128), count = int64_t(rows.size());
  Element* to = reinterpret_cast<Element*>(memory.get(size_t(count * padded) * sizeof(Element)));
  for_each((count + 15) / 16, [&](int64_t i) {
    for (int64_t j = 16 * i; j < std::min(count, 16 * (i + 1)); ++j) {
      const Row& row = rows[size_t(j)];
      write(row.row, row.part, row.rows, to + row.group * padded + 128 * row.index);
    }
  });
  return to;
}
#endif

#if defined(HAS_TILES)
// Rows of tile tasks as tiles; Task::permuted counts the rows of these tiles.
const bf16* gather_tiles(const Problem& problem, const std::vector<Task>& tasks, int64_t rows, int64_t parts,
                         Scratch& memory) {
  const int64_t padded = round_up(problem.k, 128);
  bf16* to = reinterpret_cast<bf16*>(memory.get(size_t(rows * padded) * sizeof(bf16)));
  std::vector<const Task*> groups;
  for (const Task& task : tasks)
    if (task.kernel == Kernel::tile && task.column == 0) groups.push_back(&task);
  for_each(int64_t(groups.size()), [&](int64_t i) {
    const Task& task = *groups[size_t(i)];
    tile_rows(parts * task.rows, problem.k, to + task.permuted * padded, [&](int64_t r) {
      return problem.parts.row(r / task.rows, task.row + r % task.rows);
    });
  });
  return to;
}
#endif

// Experts [first_expert, last_expert), whose rows are [first_row, last_row); memory for a copy of these.
template <class Format, class T>
void grouped_mm(Problem problem, const int32_t* offsets, int64_t first_expert, int64_t last_expert, int64_t first_row,
                int64_t last_row, const Limits& limits, Scratch& memory) {
  const int64_t k = problem.k, n = problem.n;
#if defined(HAS_AVX512_BF16)
  constexpr bool native = sizeof(T) == 2;
#else
  constexpr bool native = false;
#endif
#if defined(HAS_AVX512)
  const Kernel gemv = native && !limits.fma ? Kernel::dots : Kernel::fma;
  const int64_t gemv_rows = limits.gemv, tile_rows = native && kHasTiles<Format> && has_tiles() ? limits.tile : 0;
#else
  const Kernel gemv = Kernel::fma;
  const int64_t gemv_rows = 0, tile_rows = 0;
#endif
#if defined(HAS_BRGEMM)
  constexpr bool panels = native;
#else
  constexpr bool panels = false;
#endif
  const bool bf16_slices = native && std::is_same<T, bf16>::value && !limits.fp32_slices;
  const int64_t slice = bf16_slices ? slice_columns<bf16>(k) : slice_columns<float>(k);
  std::vector<Task> tasks;
  int64_t gathered_rows = 0, tiled = 0;  // in Problem::permuted or spread, and in Problem::tiled
  [[maybe_unused]] bool some_panels = false;
  const auto within = [&](int64_t row) { return std::min(std::max(row, first_row), last_row); };
  // Rows in groups of about the same size, at most `most`, times columns in slices of `wide`.
  const auto add = [&](Kernel kernel, int64_t e, int64_t begin, int64_t rows, int64_t most, int64_t wide) {
    const int64_t groups = (rows + most - 1) / most, parts = kernel == Kernel::fma ? 1 : kParts<T>;
    int64_t none = 0, &count_of = kernel == Kernel::tile ? tiled : kernel == gemv ? gathered_rows : none;
    const int64_t before = count_of;
    for (int64_t column = 0; column < n; column += wide) {
      count_of = before;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = rows * g / groups, count = rows * (g + 1) / groups - first;
        tasks.push_back({kernel, e, begin + first, count, column, std::min(wide, n - column), count_of});
        count_of += kernel == Kernel::tile ? tiled_rows(parts * count) : parts * count;
      }
    }
  };
  for (int64_t e = first_expert; e < last_expert; ++e) {
    const int64_t begin = e == 0 ? 0 : within(offsets[e - 1]), rows = within(offsets[e]) - begin;
    if (rows <= 0 || rows > limits.most) continue;
    if (rows <= gemv_rows) {
      add(gemv, e, begin, rows, gemv == Kernel::dots ? kDotsRows / kParts<T> : kFmaRows, kGemvCols);
    } else if (rows <= tile_rows) {
      add(Kernel::tile, e, begin, rows, kTilesRows / kParts<T>, kTilesCols);
    } else if (panels && rows >= limits.panel) {
      add(Kernel::panel, e, begin, rows, kPanelTaskRows, kPanelCols);
      some_panels = true;
    } else {
      add(bf16_slices ? Kernel::slice : Kernel::slice_fp32, e, begin, rows, kTaskRows, slice);
    }
  }
  Scratch for_gemv, for_tiles;
#if defined(HAS_AVX512_BF16)
  if (some_panels || tiled > 0 || (gathered_rows > 0 && gemv == Kernel::dots)) {
#if defined(HAS_BRGEMM)
    const bool copy = some_panels && has_matrix_unit();
#else
    const bool copy = false;
#endif
    problem.parts =
        as_parts<T>(static_cast<const T*>(problem.x), problem.count, first_row, last_row, k, copy, memory);
    problem.permuted = gather_groups<bf16>(
        problem, tasks, Kernel::dots, kParts<T>, for_gemv, [&](int64_t row, int64_t part, int64_t rows, bf16* to) {
          permute_row(Format{}, problem.parts.row(part, row), k, rows, to);
        });
  }
#endif
#if defined(HAS_TILES)
  if (tiled > 0) problem.tiled = gather_tiles(problem, tasks, tiled, kParts<T>, for_tiles);
#endif
#if defined(HAS_AVX512)
  problem.spread = gather_groups<float>(
      problem, tasks, Kernel::fma, 1, for_gemv, [&](int64_t row, int64_t, int64_t rows, float* to) {
        spread_row(Format{}, static_cast<const T*>(problem.x) + row * k, k, rows, to);
      });
#endif
  for_each(
      int64_t(tasks.size()), [&](int64_t i) { run_task<Format, T>(problem, tasks[size_t(i)]); },
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

template <class Format, class T>
void dequantize_rows(const uint8_t* qdata, const uint8_t* scale, const float* global, bool per_row, int64_t rows,
                     int64_t n, int64_t k, T* out) {
  constexpr int64_t kRows = 16;
  for_each((rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t row = kRows * i; row < std::min(rows, kRows * (i + 1)); ++row) {
      const float factor = global == nullptr ? 1.f : global[per_row ? row : row / n];
      const uint8_t *codes = qdata + row * Format::bytes(k), *scales = scale + row * (k / Format::kBlock);
      T* to = out + row * k;
      for (int64_t block = 0; block < k / 16; ++block) {
        const uint8_t* from = codes + Format::bytes(16) * block;
        if (Format::bytes(16 * block) % 64 == 0) prefetch(from);
        alignas(64) float values[16];
        dequantize_block<Format>(from, block_scale<Format>(scales, block) * factor, values);
        store_values(values, to + 16 * block);
      }
    }
  });
}

}  // namespace

extern "C" {

// The error of the last call in this thread that returned 2.
const char* thunder_moe_error() { return thunder_moe_last_error.c_str(); }

// Kernels that were built for this CPU: 1 dots, 2 panels, 4 fma, 8 tiles.
int32_t thunder_moe_kernels() {
  int32_t kernels = 0;
#if defined(HAS_AVX512_BF16)
  kernels |= 1;
#endif
#if defined(HAS_BRGEMM)
  kernels |= 2;
#endif
#if defined(HAS_AVX512)
  kernels |= 4;
#endif
#if defined(HAS_TILES)
  if (has_tiles()) kernels |= 8;
#endif
  return kernels;
}

// out[row, k] for rows of [E, N]; per_row: global is [E * N] rather than [E]. Returns the result of guarded.
int32_t thunder_moe_dequantize(const uint8_t* qdata, const uint8_t* scale, const float* global, int32_t per_row,
                               int64_t rows, int64_t n, int64_t k, int32_t dtype, int32_t format, void* out) {
  return guarded([&] {
    with_format(format, [&](auto decode) {
      const auto run = [&](auto* to) {
        dequantize_rows<decltype(decode)>(qdata, scale, global, per_row != 0, rows, n, k, to);
      };
      if (dtype == kFloat32) run(static_cast<float*>(out));
      if (dtype == kBFloat16) run(static_cast<bf16*>(out));
      if (dtype == kFloat16) run(static_cast<fp16*>(out));
    });
  });
}

// Limits the threads of calls from this thread; 0 allows all of torch's threads.
void thunder_moe_set_workers(int32_t workers) { thunder_moe_most_workers = workers; }

// x (count, k); row ends are clamped to count. Experts with more than max_rows rows are left out. If this CPU has the
// kernels, up to gemv_rows rows take a gemv kernel (fma, else dots if x has 16 bits), up to tile_rows rows of 16-bit x
// take tiles, and from panel_rows rows on it takes panels. fp32_slices: bf16 x takes slices of fp32, too.
int32_t thunder_moe_grouped_mm(const void* x, int64_t count, const uint8_t* qdata, const uint8_t* scale,
                               const float* global, int32_t per_column, const int32_t* offsets, int64_t num_experts,
                               int64_t n, int64_t k, int32_t dtype, int32_t format, int64_t max_rows, int64_t gemv_rows,
                               int64_t tile_rows, int64_t panel_rows, int32_t fma, int32_t fp32_slices, void* out) {
  return guarded([&] {
    Problem problem{};
    problem.x = x, problem.qdata = qdata, problem.scale = scale, problem.global = global, problem.out = out;
    problem.n = n, problem.k = k, problem.per_column = per_column != 0, problem.count = count;
    const Limits limits{gemv_rows, tile_rows, panel_rows, max_rows, fma != 0, fp32_slices != 0};
    const int64_t bytes = dtype == kFloat32 ? 0 : 2 * (dtype == kFloat16 ? 2 : 1) * k;
    with_format(format, [&](auto decode) {
      using Format = decltype(decode);
      problem.code_stride = Format::bytes(k), problem.scale_stride = k / Format::kBlock;
      for_ranges(offsets, num_experts, count, bytes,
                 [&](int64_t first, int64_t last, int64_t row, int64_t end, Scratch& memory) {
                   const auto run = [&](auto* type) {
                     using T = std::remove_pointer_t<decltype(type)>;
                     grouped_mm<Format, T>(problem, offsets, first, last, row, end, limits, memory);
                   };
                   if (dtype == kFloat32) run(static_cast<float*>(nullptr));
                   if (dtype == kBFloat16) run(static_cast<bf16*>(nullptr));
                   if (dtype == kFloat16) run(static_cast<fp16*>(nullptr));
                 });
    });
  });
}

}  // extern "C"
