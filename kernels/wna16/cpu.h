// W4A16 and W8A16 on CPU from the checkpoint's words, as reference.py has them: products in float32
// for a few tokens, and the dequantized weight for many.
//
// In bytes, a word of INT4 has its elements in order, the even ones in the lower halves. So 16 bytes
// are 32 elements: 16 even ones, which meet x at even places, and 16 odd ones.

#pragma once

#include <vector>

#include "../native/rows.h"

namespace compress {

// A row of G groups of `group` elements, a multiple of 32 at 4 bit and of 16 at 8.
struct Grid {
  int64_t bits, groups, group;
  int64_t row_bytes() const { return groups * group * bits / 8; }
};

// A weight of such rows: the checkpoint's words, and G scales a row.
struct Packed {
  const uint8_t* bytes;
  const float* scales;
  int64_t rows;
};

inline Floats integers(Ints stored, int32_t offset) {
  return __builtin_convertvector(stored - offset, Floats);
}

// A loop, because GCC 12 makes four times as many instructions of __builtin_convertvector here.
inline Ints bytes(const uint8_t* from) {
  int32_t wide[LANES];
  for (int64_t i = 0; i < LANES; i++) wide[i] = from[i];
  return load<Ints>(wide);
}

// x [M, K] with the even elements of each 32 before the odd ones, as the nibbles of 16 bytes lie.
inline void planar(float* x, int64_t size) {
  for (float* at = x; at < x + size; at += 2 * LANES) {
    float odd[LANES];
    for (int64_t i = 0; i < LANES; i++) odd[i] = at[2 * i + 1];
    for (int64_t i = 0; i < LANES; i++) at[i] = at[2 * i];
    std::memcpy(at + LANES, odd, sizeof(odd));
  }
}

template <int64_t TOKENS>
void wna16_row(const float* x, const uint8_t* w, const float* scales, BFloat16* y, int64_t n,
               const Grid& grid) {
  const int64_t k = grid.groups * grid.group;
  Floats total[TOKENS] = {};
  for (int64_t g = 0; g < grid.groups; g++) {
    Floats part[TOKENS] = {}, other[TOKENS] = {};
    prefetch(w);
    for (int64_t j = g * grid.group; j < (g + 1) * grid.group;) {
      const Ints stored = bytes(w);
      w += LANES;
      if (grid.bits == 8) {
        const Floats ints = integers(stored, 128);
        for (int64_t i = 0; i < TOKENS; i++) part[i] += ints * load<Floats>(x + i * k + j);
        j += LANES;
      } else {
        const Floats even = integers(stored & 15, 8), odd = integers(stored >> 4, 8);
        for (int64_t i = 0; i < TOKENS; i++) {
          part[i] += even * load<Floats>(x + i * k + j);
          other[i] += odd * load<Floats>(x + i * k + j + LANES);
        }
        j += 2 * LANES;
      }
    }
    for (int64_t i = 0; i < TOKENS; i++) total[i] += (part[i] + other[i]) * scales[g];
  }
  for (int64_t i = 0; i < TOKENS; i++) y[i * n] = BFloat16(sum(total[i]));
}

// `x_MK` is used up.
inline void wna16(float* x_MK, const std::vector<Packed>& weights, BFloat16* y_MN, int64_t m,
                  int64_t n, const Grid& grid) {
  const int64_t k = grid.groups * grid.group;
  if (grid.bits == 4) planar(x_MK, m * k);
  for_runs(weights, grid.row_bytes(), [&](const Packed& w, int64_t begin, int64_t end, int64_t out) {
    for (int64_t row = begin; row < end; row++)
      for_tiles(m, [&]<int64_t TOKENS>(Tokens<TOKENS>, int64_t first) {
        wna16_row<TOKENS>(x_MK + first * k, w.bytes + row * grid.row_bytes(),
                          w.scales + row * grid.groups, y_MN + first * n + out + row, n, grid);
      });
  });
}

// The weight [N, K] in bf16: integers times scales, rounded once.
inline void dequantize(const uint8_t* w, const float* scales_NG, BFloat16* out_NK, int64_t n,
                       const Grid& grid) {
  for_rows(n, grid.row_bytes(), [&](int64_t row) {
    const uint8_t* stored = w + row * grid.row_bytes();
    BFloat16* out = out_NK + row * grid.groups * grid.group;
    for (int64_t g = 0; g < grid.groups; g++) {
      const float scale = scales_NG[row * grid.groups + g];
      if (grid.bits == 8) {
        for (int64_t j = 0; j < grid.group; j++) *out++ = BFloat16(float(*stored++ - 128) * scale);
      } else {
        for (int64_t j = 0; j < grid.group / 2; j++, stored++) {
          *out++ = BFloat16(float((*stored & 15) - 8) * scale);
          *out++ = BFloat16(float((*stored >> 4) - 8) * scale);
        }
      }
    }
  });
}

}  // namespace compress
