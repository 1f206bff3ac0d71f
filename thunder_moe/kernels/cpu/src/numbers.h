// 16-bit floats and the parallel loop over tasks, for all CPU kernels.
// Included by decode.h and swiglu_combine.cpp; calls at::parallel_for (torch's own thread pool).
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

inline thread_local std::string thunder_moe_last_error;
inline thread_local int64_t thunder_moe_most_workers = 0;

namespace {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum NumberFormat : int32_t { kNvfp4 = 0, kMxfp8 = 1 };
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return float_of(uint32_t(value.bits) << 16); }
inline float to_float(fp16 value) {  // exact, subnormals included
  const uint32_t twice = uint32_t(value.bits) << 17;
  const float normal = float_of((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = float_of((twice >> 17) | (126u << 23)) - 0.5f;
  return float_of((uint32_t(value.bits & 0x8000) << 16) | bits_of(twice < (1u << 27) ? subnormal : normal));
}

// Round to nearest even, overflow to infinity, as torch casts.
template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline bf16 from_float<bf16>(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return bf16{uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
}
template <>
inline fp16 from_float<fp16>(float value) {
  const uint32_t twice = bits_of(value) << 1;
  const float scaled = (float_of(twice >> 1) * 0x1.0p+112f) * 0x1.0p-110f;
  const uint32_t bias = std::max(twice & 0xFF000000u, 0x71000000u);
  const uint32_t bits = bits_of(float_of((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t magnitude = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  return fp16{uint16_t(((bits_of(value) >> 16) & 0x8000u) | (twice > 0xFF000000u ? 0x7E00u : magnitude))};
}

// Threads take tasks one at a time, which balances ragged experts; each calls `finish` when none is left.
template <class F, class G>
void for_each(int64_t count, const F& run, const G& finish) {
  std::atomic<int64_t> next{0};
  const int64_t most = thunder_moe_most_workers > 0 ? thunder_moe_most_workers : at::get_num_threads();
  at::parallel_for(0, std::min(count, most), 1, [&](int64_t begin, int64_t end) {
    (void)begin, (void)end;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(i);
    finish();
  });
}
template <class F>
void for_each(int64_t count, const F& run) {
  for_each(count, run, [] {});
}

// Runs and returns 0; 1 when out of memory, 2 for another error, which thunder_moe_error() describes.
template <class F>
int32_t guarded(const F& run) {
  try {
    run();
  } catch (const std::bad_alloc&) {
    return 1;
  } catch (const std::exception& error) {
    thunder_moe_last_error = error.what();
    return 2;
  }
  return 0;
}

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

}  // namespace
