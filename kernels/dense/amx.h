// cpu.h's product by AMX, for any number of tokens: the weight's tiles are read where they lie.

#pragma once

#include "../native/amx.h"
#include "cpu.h"

#ifdef COMPRESS_AMX

namespace compress {

inline void dense_amx(const BFloat16* x_MK, const std::vector<Dense>& weights, BFloat16* y_MN,
                      int64_t m, int64_t n, int64_t k) {
  const auto rows_of_x = [&](int64_t first, int64_t) { return x_MK + first * k; };
  const auto tiled = [&](const Dense& w, int64_t row, int64_t rows, Room& room) {
    return as_they_lie(w.values, row, rows, 2 * k, row + BLOCK >= w.rows, room);
  };
  amx_product<false>(rows_of_x, weights, y_MN, m, n, 2 * k, tiled, as_summed<Dense>);
}

}  // namespace compress

#endif
