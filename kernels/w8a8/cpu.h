// W8A8 on CPU: the whole product for a few tokens, and what surrounds oneDNN's for many. The bits are
// those of reference.py, so a bias waits for an addition of its own.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "../native/rows.h"

namespace compress {

typedef int8_t Bytes __attribute__((vector_size(LANES)));

// The integers of a token as int8, or as uint8 with 128 added: products of unsigned with signed bytes
// have an instruction of their own on x86. Returns the token's scale, absmax / 127: 0 for zeros and
// what is next to them, and NaN where a value is not finite, so that this row of the result shows it.
template <typename T, typename Q>
float quantize(const T* x, int64_t k, Q* q) {
  constexpr int OFFSET = std::is_unsigned_v<Q> ? 128 : 0;
  const int64_t whole = k / LANES * LANES;
  Floats peaks = {}, poisons = {};
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats values = floats(x + i), size = values < 0.f ? -values : values;
    peaks = size > peaks ? size : peaks;
    poisons += values * 0.f;
  }
  float peak = 0, poison = sum(poisons);
  for (int64_t i = 0; i < LANES; i++) peak = std::max(peak, peaks[i]);
  for (int64_t i = whole; i < k; i++) {
    peak = std::max(peak, std::fabs(float(x[i])));
    poison += float(x[i]) * 0;
  }
  const bool finite = poison == 0;
  const float scale = peak / 127;
  if (!finite || scale == 0) {
    std::memset(q, OFFSET, k);
    return finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t i = 0; i < whole; i += LANES) {
    Floats steps = whole_numbers(floats(x + i) / scale);
    // A scale next to zero is rounded by much of itself.
    steps = steps > 127.f ? Floats{} + 127.f : steps;
    steps = steps < -127.f ? Floats{} - 127.f : steps;
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(steps, Ints) + OFFSET, Bytes);
    std::memcpy(q + i, &bytes, sizeof(bytes));
  }
  for (int64_t i = whole; i < k; i++)
    q[i] = Q(int(std::clamp(std::nearbyint(float(x[i]) / scale), -127.f, 127.f)) + OFFSET);
  return scale;
}

// `sums` of integers [N] to outputs: times the scales of weight and token.
template <typename Out>
void rescale(const int32_t* sums, const float* scales, float scale, Out* y, int64_t n) {
  const int64_t whole = n / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats values = __builtin_convertvector(load<Ints>(sums + i), Floats);
    store(values * load<Floats>(scales + i) * scale, y + i);
  }
  for (int64_t i = whole; i < n; i++) y[i] = Out(float(sums[i]) * scales[i] * scale);
}

// sums: 128 times the sum of each row of the weight, which the 128 adds to its products. bias: of each
// row, or nullptr; amx.h alone adds it.
struct Int8 {
  const int8_t* values;
  const int32_t* sums;
  const float *scales, *bias;
  int64_t rows;
};

template <typename T, typename Out>
void w8a8(const T* x_MK, const std::vector<Int8>& weights, Out* y_MN, int64_t m, int64_t n,
          int64_t k) {
  std::vector<uint8_t> q_MK(m * k);
  std::vector<float> scales_M(m);
  for (int64_t i = 0; i < m; i++) scales_M[i] = quantize(x_MK + i * k, k, &q_MK[i * k]);
  for_runs(weights, k, [&](const Int8& weight, int64_t begin, int64_t end, int64_t out) {
    for (int64_t row = begin; row < end; row++) {
      const int8_t* w = weight.values + row * k;
      for (int64_t i = 0; i < m; i++) {
        const uint8_t* q = &q_MK[i * k];
        int32_t acc = 0;
        for (int64_t j = 0; j < k; j++) acc += int32_t(q[j]) * int32_t(w[j]);
        const float product = float(acc - weight.sums[row]) * weight.scales[row];
        y_MN[i * n + out + row] = Out(product * scales_M[i]);
      }
    }
  });
}

}  // namespace compress
