// cpu.h's product by AMX, for any number of tokens: what is around it is done on the way in and out.
// The bits are the same, but an output below 2^-126 is 0: the CPU rounds to bf16 so.

#pragma once

#include "../native/amx.h"
#include "cpu.h"

#ifdef COMPRESS_AMX

namespace compress {

inline void w8a8_amx(const BFloat16* x_MK, const std::vector<Int8>& weights, BFloat16* y_MN,
                     int64_t m, int64_t n, int64_t k) {
  std::vector<int8_t> q_MK;
  std::vector<float> scales_M;
  const auto rows_of_x = [&](int64_t first, int64_t tokens) {
    q_MK.resize(tokens * k);
    scales_M.resize((tokens + SIDE - 1) / SIDE * SIDE);
    for_rows(tokens, 2 * k, [&](int64_t i) {
      scales_M[i] = quantize(x_MK + (first + i) * k, k, q_MK.data() + i * k);
    });
    return q_MK.data();
  };
  const auto tiled = [&](const Int8& w, int64_t row, int64_t rows, Room& room) {
    return as_they_lie(w.values, row, rows, k, row + BLOCK >= w.rows, room);
  };
  const auto output_of = [&](const Int8& w, int64_t row, int64_t rows, int64_t token) {
    const Floats tokens = load<Floats>(&scales_M[token]);
    return [=, scales = w.scales + row, bias = w.bias ? w.bias + row : nullptr](Words sums,
                                                                               int64_t i) {
      const int64_t there = std::min(i, rows - 1);  // tiles have 32 rows
      Floats product = __builtin_convertvector((Ints)sums, Floats) * scales[there] * tokens;
      if (!bias) return product;
      asm("" : "+v"(product));  // or the addition would be fused with what it waits for
      return product + bias[there];
    };
  };
  amx_product<true>(rows_of_x, weights, y_MN, m, n, k, tiled, output_of);
}

}  // namespace compress

#endif
