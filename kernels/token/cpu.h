// RMSNorm, SwiGLU and attention of one token, as reference.py has them.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../native/rows.h"

namespace compress {

inline void rmsnorm(const BFloat16* x, const BFloat16* weight, BFloat16* y, int64_t k, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < k; i++) squares += float(x[i]) * float(x[i]);
  const float factor = 1 / std::sqrt(squares / k + eps);
#pragma omp simd
  for (int64_t i = 0; i < k; i++)
    y[i] = BFloat16(float(BFloat16(float(x[i]) * factor)) * float(weight[i]));
}

// e^x to 2^-22 of itself: 2^n times a polynomial. Below e^-87 it stays, above e^88 it is infinite.
inline Floats exp(Floats exponent) {
  Floats x = exponent < -87.f ? Floats{} - 87.f : exponent;
  x = x > 88.f ? Floats{} + 88.f : x;
  const Floats n = whole_numbers(x * 1.44269504f);
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * (1.f / 720) + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const Floats power = p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  return exponent > 88.f ? Floats{} + std::numeric_limits<float>::infinity() : power;
}

// exp of `size` values in place, less `peak`.
inline void exp_less(float* x, int64_t size, float peak) {
  const int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    store(exp(load<Floats>(x + i) - peak), x + i);
  }
  for (int64_t i = whole; i < size; i++) x[i] = std::exp(x[i] - peak);
}

// Rounded where bf16 modules round.
inline void swiglu(const BFloat16* gate, const BFloat16* up, BFloat16* y, int64_t k) {
  const int64_t whole = k / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats x = floats(gate + i);
    const Halves silu = narrow(x / (1.f + exp(-x)));
    store(widen(silu) * floats(up + i), y + i);
  }
  for (int64_t i = whole; i < k; i++) {
    const float x = float(gate[i]);
    y[i] = BFloat16(float(BFloat16(x / (1 + std::exp(-x)))) * float(up[i]));
  }
}

// A head turned by RoPE, rounded where bf16 modules round.
inline void rope(const BFloat16* x, const BFloat16* cos, const BFloat16* sin, BFloat16* y,
                 int64_t d) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < d; i++) {
    const float other = i < half ? -float(x[i + half]) : float(x[i - half]);
    y[i] = BFloat16(float(BFloat16(float(x[i]) * float(cos[i]))) +
                    float(BFloat16(other * float(sin[i]))));
  }
}

struct Heads {
  int64_t groups;   // of keys and values
  int64_t queries;  // to each
  int64_t size;     // D
  int64_t room;     // T
};

inline float dot(const float* a, const float* b, int64_t size) {
  const int64_t whole = size / LANES * LANES;
  Floats sums = {};
  for (int64_t i = 0; i < whole; i += LANES) sums += load<Floats>(a + i) * load<Floats>(b + i);
  float rest = 0;
  for (int64_t i = whole; i < size; i++) rest += a[i] * b[i];
  return sum(sums) + rest;
}

inline void softmax(float* x, int64_t size) {
  const float peak = *std::max_element(x, x + size);
  exp_less(x, size, peak);
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; i++) total += x[i];
  for (int64_t i = 0; i < size; i++) x[i] /= total;
}

// `queries` heads [.., D] over the first `length` of `keys` and `values` [T, D], each of which is
// read and widened once.
inline void attend_group(const BFloat16* q, const BFloat16* keys, const BFloat16* values,
                         BFloat16* out, int64_t length, float scale, const Heads& heads) {
  const int64_t d = heads.size, width = heads.queries * d;
  std::vector<float> query(width), row(d), weights(heads.queries * length), sums(width);
  for (int64_t i = 0; i < width; i++) query[i] = float(q[i]) * scale;
  for (int64_t t = 0; t < length; t++) {
    for (int64_t i = 0; i < d; i++) row[i] = float(keys[t * d + i]);
    for (int64_t h = 0; h < heads.queries; h++) {
      weights[h * length + t] = dot(&query[h * d], row.data(), d);
    }
  }
  for (int64_t h = 0; h < heads.queries; h++) softmax(&weights[h * length], length);
  for (int64_t t = 0; t < length; t++) {
    for (int64_t i = 0; i < d; i++) row[i] = float(values[t * d + i]);
    for (int64_t h = 0; h < heads.queries; h++) {
      const float weight = weights[h * length + t];
#pragma omp simd
      for (int64_t i = 0; i < d; i++) sums[h * d + i] += weight * row[i];
    }
  }
  for (int64_t i = 0; i < width; i++) out[i] = BFloat16(sums[i]);
}

inline void attend(const BFloat16* q, const BFloat16* k, const BFloat16* v, const BFloat16* cos,
                   const BFloat16* sin, BFloat16* keys, BFloat16* values, BFloat16* out,
                   int64_t position, float scale, const Heads& heads) {
  const int64_t d = heads.size, width = heads.queries * d;
  for_rows(heads.groups, 2 * (position + 1) * d * sizeof(BFloat16), [&](int64_t g) {
    BFloat16 *own_keys = keys + g * heads.room * d, *own_values = values + g * heads.room * d;
    rope(k + g * d, cos, sin, own_keys + position * d, d);
    std::copy_n(v + g * d, d, own_values + position * d);
    std::vector<BFloat16> turned(width);
    for (int64_t h = 0; h < heads.queries; h++)
      rope(q + g * width + h * d, cos, sin, &turned[h * d], d);
    attend_group(turned.data(), own_keys, own_values, out + g * width, position + 1, scale, heads);
  });
}

}  // namespace compress
