// cpu.h's product by AMX, for any number of tokens: the weight's tiles are read where they lie.

#pragma once

#include "../native/amx.h"
#include "cpu.h"

#ifdef COMPRESS_AMX

namespace compress {

inline void dense_amx(const BFloat16* x_MK, const std::vector<Dense>& weights, BFloat16* y_MN,
                      int64_t m, int64_t n, int64_t k) {
  const auto tiled = [&](const Dense& w, int64_t row, int64_t rows, Room& room) {
    const BFloat16* values = w.values + row * k;
    if (rows == BLOCK && k % DEPTH == 0)
      return Tiled{values, k, values + BLOCK * k, row + BLOCK < w.rows ? BLOCK : 0};
    const int64_t stride = (k + DEPTH - 1) / DEPTH * DEPTH;
    BFloat16* copy = room.of(BLOCK * stride);
    for (int64_t i = 0; i < rows; i++) std::memcpy(copy + i * stride, values + i * k, 2 * k);
    return Tiled{copy, stride, nullptr, 0};
  };
  amx_product(x_MK, weights, y_MN, m, n, k, tiled);
}

}  // namespace compress

#endif
