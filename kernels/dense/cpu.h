// y_MN = x_MK @ w_NK^T for weights in bf16: products and sums in float32, rounded once.

#pragma once

#include "../native/rows.h"

namespace compress {

template <int64_t TOKENS>
void dense_row(const float* x, const BFloat16* w, BFloat16* y, int64_t n, int64_t k) {
  const int64_t whole = k / (2 * LANES) * 2 * LANES;
  Floats even[TOKENS] = {}, odd[TOKENS] = {};
  for (int64_t j = 0; j < whole; j += 2 * LANES) {
    prefetch(w + j);
    const Floats first = floats(w + j), second = floats(w + j + LANES);
    for (int64_t i = 0; i < TOKENS; i++) {
      even[i] += first * load<Floats>(x + i * k + j);
      odd[i] += second * load<Floats>(x + i * k + j + LANES);
    }
  }
  for (int64_t i = 0; i < TOKENS; i++) {
    float value = sum(even[i] + odd[i]);
    for (int64_t j = whole; j < k; j++) value += float(w[j]) * x[i * k + j];
    y[i * n] = BFloat16(value);
  }
}

struct Dense {
  const BFloat16* values;
  int64_t rows;
};

inline void dense(const float* x_MK, const std::vector<Dense>& weights, BFloat16* y_MN, int64_t m,
                  int64_t n, int64_t k) {
  for_runs(weights, 2 * k, [&](const Dense& w, int64_t begin, int64_t end, int64_t out) {
    for (int64_t row = begin; row < end; row++)
      for_tiles(m, [&]<int64_t TOKENS>(Tokens<TOKENS>, int64_t first) {
        dense_row<TOKENS>(x_MK + first * k, w.values + row * k, y_MN + first * n + out + row, n, k);
      });
  });
}

}  // namespace compress
