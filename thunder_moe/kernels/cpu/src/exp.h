// The exponential function, for loops that compilers vectorize.
// Included by swiglu_combine.cpp and router.cpp; calls numbers.h.
#pragma once
#include "numbers.h"

namespace {

// They take values, unlike std::min and std::max, so that compilers vectorize them; a NaN in `a` stays NaN.
inline float least(float a, float b) { return b < a ? b : a; }
inline float most(float a, float b) { return b > a ? b : a; }

// exp(x), relative error below 3e-7, without a branch, so that compilers vectorize it; infinite from 88.4 on, and
// exp(-87) below -87.
inline float exp_of(float x) {
  x = least(most(x, -87.0f), 89.0f);
  const float scaled = x * 1.44269504f;
  const int32_t n = int32_t(scaled + (scaled < 0 ? -0.5f : 0.5f));
  const float r = (x - float(n) * 0.693359375f) + float(n) * 2.12194440e-4f;
  const float tail = 1.0f / 24 + r * (1.0f / 120 + r * (1.0f / 720 + r * (1.0f / 5040)));
  return (1 + r * (1 + r * (0.5f + r * (1.0f / 6 + r * tail)))) * float_of(uint32_t(n + 127) << 23);
}

}  // namespace
