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
#include "decode.h"
#include "register_tiles.h"

#include "exact.h"

namespace {

// A dequantized slice stays in L2. fp16, 64 rows, (N, K) = (1536, 2048), one thread: 75 ms, with 256 KiB 85 ms.
constexpr int64_t kSliceBytes = 512 << 10;
constexpr int64_t kChunkBytes = 4096;  // of K at a time: 6 activation rows + 4 weight rows of 4 KiB stay in a 48 KiB L1
constexpr int64_t kStridePad = 64;     // bytes between packed rows, so that they are not a power of two apart
constexpr int64_t kTaskRows = 384;     // rows of one task of the slice kernel; more rows dequantize the slice again
constexpr int64_t kGemvCols = 32;      // outputs per task of the gemv kernel
constexpr int64_t kGemvRows = 8;       // rows at a time there: 2 x 8 sums + 2 x 4 weights + 2 dots of 32 registers

// A worker's buffer: kept between calls, because fresh pages cost more than a small GEMM.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};
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

template <int R>
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
  write_rows<bf16>(problem, task, 0, R, sums[0], kGemvCols);
}

void run_gemv(const Problem& problem, const Task& task) {
  switch (task.rows) {
    case 1:
      return gemv_task<1>(problem, task);
    case 2:
      return gemv_task<2>(problem, task);
    case 3:
      return gemv_task<3>(problem, task);
    case 4:
      return gemv_task<4>(problem, task);
    case 5:
      return gemv_task<5>(problem, task);
    case 6:
      return gemv_task<6>(problem, task);
    case 7:
      return gemv_task<7>(problem, task);
    case 8:
      return gemv_task<8>(problem, task);
  }
}
#endif

void run_task(const Problem& problem, const Task& task, int32_t dtype) {
  if (dtype == kFloat32) return slice_task<float, float>(problem, task);
  if (dtype == kFloat16) return slice_task<fp16, float>(problem, task);
#if defined(HAS_AVX512_BF16)
  return task.permuted >= 0 ? run_gemv(problem, task) : slice_task<bf16, bf16>(problem, task);
#else
  return slice_task<bf16, float>(problem, task);
#endif
}

template <class T>
void dequantize_rows(const uint8_t* qdata, const uint8_t* scale, const float* global, bool per_row, int64_t rows,
                     int64_t n, int64_t k, T* out) {
  constexpr int64_t kRows = 16;
  for_each((rows + kRows - 1) / kRows, [&](int64_t i) {
    for (int64_t row = kRows * i; row < std::min(rows, kRows * (i + 1)); ++row) {
      const float factor = global[per_row ? row : row / n];
      for (int64_t block = 0; block < k / 16; ++block) {
        float values[16];
        dequantize_block(qdata + row * (k / 2) + 8 * block, kTables.e4m3[scale[row * (k / 16) + block]] * factor,
                         values);
        for (int j = 0; j < 16; ++j) out[row * k + 16 * block + j] = from_float<T>(values[j]);
      }
    }
  });
}

}  // namespace

extern "C" {

// 1 when bf16 activations are multiplied as bf16 (twice the speed of fp32), 0 when they are converted to fp32.
int32_t thunder_moe_has_bf16() {
#if defined(HAS_AVX512_BF16)
  return 1;
#else
  return 0;
#endif
}

// out[row, k] for rows of [E, N]; per_row: global is [E * N] rather than [E]. Returns 0, or 1 when out of memory.
int32_t thunder_moe_dequantize(const uint8_t* qdata, const uint8_t* scale, const float* global, int32_t per_row,
                               int64_t rows, int64_t n, int64_t k, int32_t dtype, void* out) {
  try {
    if (dtype == kFloat32) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<float*>(out));
    if (dtype == kBFloat16) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<bf16*>(out));
    if (dtype == kFloat16) dequantize_rows(qdata, scale, global, per_row != 0, rows, n, k, static_cast<fp16*>(out));
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// x (count, k); row ends are held to count. Experts whose number of rows is above max_rows are left out. gemv_rows:
// rows up to which bf16 takes the gemv kernel.
int32_t thunder_moe_grouped_mm(const void* x, int64_t count, const uint8_t* qdata, const uint8_t* scale,
                               const float* global, int32_t per_column, const int32_t* offsets, int64_t num_experts,
                               int64_t n, int64_t k, int32_t dtype, int64_t max_rows, int64_t gemv_rows, void* out) {
  try {
    Problem problem{x, qdata, scale, global, out, n, k, per_column != 0, nullptr};
    std::vector<Task> tasks;
    struct Row {
      int64_t row, group, rows;  // the row of x, the first permuted row of its group, the rows of that group
    };
    std::vector<Row> permute;
    const bool native = dtype == kBFloat16 && thunder_moe_has_bf16() != 0;
    const int64_t slice = native ? slice_columns<bf16>(k) : slice_columns<float>(k);
    const auto within = [&](int64_t row) { return std::min(std::max<int64_t>(row, 0), count); };
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t begin = e == 0 ? 0 : within(offsets[e - 1]), rows = within(offsets[e]) - begin;
      if (rows <= 0 || rows > max_rows) continue;
      if (native && rows <= gemv_rows) {
        const int64_t groups = (rows + kGemvRows - 1) / kGemvRows, base = int64_t(permute.size());
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t first = rows * g / groups, last = rows * (g + 1) / groups;
          for (int64_t row = first; row < last; ++row) permute.push_back({begin + row, base + first, last - first});
        }
        for (int64_t column = 0; column < n; column += kGemvCols)
          for (int64_t g = 0; g < groups; ++g) {
            const int64_t first = rows * g / groups, last = rows * (g + 1) / groups;
            tasks.push_back({e, begin + first, last - first, column, std::min(kGemvCols, n - column), base + first});
          }
        continue;
      }
      for (int64_t row = 0; row < rows; row += kTaskRows)
        for (int64_t column = 0; column < n; column += slice)
          tasks.push_back({e, begin + row, std::min(kTaskRows, rows - row), column, std::min(slice, n - column), -1});
    }
    Scratch permuted;
#if defined(HAS_AVX512_BF16)
    if (!permute.empty()) {
      const int64_t padded = round_up(k, 128), permuted_rows = int64_t(permute.size());
      bf16* to = reinterpret_cast<bf16*>(permuted.get(permuted_rows * padded * sizeof(bf16)));
      problem.permuted = to;
      for_each((permuted_rows + 15) / 16, [&](int64_t i) {
        for (int64_t j = 16 * i; j < std::min(permuted_rows, 16 * (i + 1)); ++j) {
          const Row& row = permute[j];
          permute_row(static_cast<const bf16*>(x) + row.row * k, k, row.rows,
                      to + row.group * padded + 128 * (j - row.group));
        }
      });
    }
#endif
    for_each(int64_t(tasks.size()), [&](int64_t i) { run_task(problem, tasks[i], dtype); });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
