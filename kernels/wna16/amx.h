// W4A16 by AMX, for any number of tokens: 32 rows at a time are dequantized to bf16 in the cache.
//
// Of 64 values in 32 bytes, a shift of all 16 halfwords leaves each fourth value in their lowest bits,
// and a permutation looks those up in the 16 values that the group's scale makes. So 64 values come
// in four parts, those at places 0, 4, 8, ... first, and x is put in the same order.

#pragma once

#include "../native/amx.h"
#include "cpu.h"

#ifdef COMPRESS_AMX

namespace compress {

constexpr int64_t QUARTER = 16;           // values at every fourth place of 64
constexpr int64_t AHEAD = 6144;           // bytes of words, of 3072 to 12288 the fastest
constexpr int64_t PART = 4 * QUARTER;     // values that are dequantized together

// The 16 values of a group: integers times scale, rounded once, as dequantize in cpu.h has them.
inline __m256i values_of(float scale) {
  const __m512 ints = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  return (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(ints, _mm512_set1_ps(scale)));
}

inline void dequantize_row(const uint8_t* w, const float* scales, BFloat16* out, const Grid& grid) {
  for (int64_t g = 0; g < grid.groups; g++) {
    const __m256i values = values_of(scales[g]);
    for (int64_t j = 0; j < grid.group; j += PART, w += PART / 2, out += PART) {
      __builtin_prefetch(w + AHEAD);
      const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
      // The permutation looks at the lowest four bits of each halfword alone.
      auto* quarter = reinterpret_cast<__m256i*>(out);
      _mm256_storeu_si256(quarter, _mm256_permutexvar_epi16(stored, values));
      for (int i = 1; i < 4; i++)
        _mm256_storeu_si256(
            quarter + i, _mm256_permutexvar_epi16(_mm256_srli_epi16(stored, 4 * i), values));
    }
  }
}

// Each 64 values as the weight's come: by fours.
inline std::unique_ptr<BFloat16[]> by_fours(const BFloat16* x, int64_t size) {
  typedef uint16_t Many __attribute__((vector_size(4 * LANES)));
  auto turned = std::make_unique_for_overwrite<BFloat16[]>(size);
  for (int64_t i = 0; i < size; i += PART) {
    const Many a = load<Many>(x + i), b = load<Many>(x + i + PART / 2);
    const Many halves[2] = {
        __builtin_shufflevector(a, b, 0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60,
                                1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61),
        __builtin_shufflevector(a, b, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62,
                                3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63)};
    std::memcpy(&turned[i], halves, sizeof(halves));
  }
  return turned;
}

inline void w4a16_amx(const BFloat16* x_MK, const std::vector<Packed>& weights, BFloat16* y_MN,
                      int64_t m, int64_t n, const Grid& grid) {
  const int64_t k = grid.groups * grid.group;
  const int64_t stride = 2 * k + LINE;  // a power of two apart rows push each other out of the cache
  std::unique_ptr<BFloat16[]> x;
  const auto rows_of_x = [&](int64_t first, int64_t tokens) {
    x = by_fours(x_MK + first * k, tokens * k);
    return x.get();
  };
  const auto tiled = [&](const Packed& w, int64_t row, int64_t rows, Room& room) {
    char* values = room.of(BLOCK * stride);
    for (int64_t i = 0; i < rows; i++)
      dequantize_row(w.bytes + (row + i) * grid.row_bytes(), w.scales + (row + i) * grid.groups,
                     reinterpret_cast<BFloat16*>(values + i * stride), grid);
    return Tiled{values, stride, nullptr, 0};
  };
  amx_product<false>(rows_of_x, weights, y_MN, m, n, 2 * k, tiled, as_summed<Packed>);
}

}  // namespace compress

#endif
