// W8A8 for a few tokens on CPU: the bits of reference.py, so a bias waits for an addition of its own.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../native/rows.h"

namespace compress {

// The integers of a token, each plus 128: products of unsigned with signed bytes have an instruction
// of their own on x86. Returns the token's scale, absmax / 127: 0 for zeros and what is next to
// them, and NaN where a value is not finite, so that this row of the result shows it.
template <typename T>
float quantize(const T* x, int64_t k, uint8_t* q) {
  float peak = 0, poison = 0;
#pragma omp simd reduction(max : peak) reduction(+ : poison)
  for (int64_t i = 0; i < k; i++) {
    peak = std::max(peak, std::fabs(float(x[i])));
    poison += float(x[i]) * 0;
  }
  const bool finite = poison == 0;
  const float scale = peak / 127;
  if (!finite || scale == 0) {
    std::memset(q, 128, k);
    return finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
#pragma omp simd
  for (int64_t i = 0; i < k; i++) q[i] = uint8_t(int(std::nearbyint(float(x[i]) / scale)) + 128);
  return scale;
}

// sums: 128 times the sum of each row of the weight, which the 128 adds to its products.
struct Int8 {
  const int8_t* values;
  const int32_t* sums;
  const float* scales;
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
