// W4A16 by the instruction that multiplies pairs of bf16 and adds them up in float32 (AVX512-BF16).
//
// Unpacked one after the other into floats, a weight of 442 kB takes 64 us, and 45 as here
// (docs/kernels.md). A shift and one more operation of a vector of 16 words give 32 values: 0x4300
// is 128 in bf16 with the units in its last bit, so 0x4300 | nibble is 128 + nibble, nibbles j and
// j + 4 of a word side by side. What that adds to a word's products, 128 and the stored offset of 8,
// is 136 times the sum of its inputs, which the accumulator starts from.

#pragma once

#include <algorithm>
#include <vector>

#include "cpu.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace compress {

constexpr int64_t WORD = 8;              // values of 4 bit
constexpr int64_t PLANES = WORD / 2;     // pairs of a word
constexpr int64_t VECTOR = LANES * WORD; // values of a vector of words

#ifdef __AVX512BF16__

// Whether a vector of words is in one group or in whole groups.
inline bool pairs_take(const Grid& grid) {
  const int64_t words = grid.group / WORD;
  return grid.bits == 4 && (grid.groups == 1 || words % LANES == 0 || LANES % words == 0);
}

// What all rows share. pairs: the inputs as the nibbles lie, zeros past the end, [M, vectors, PLANES,
// LANES, 2]. starts: what the accumulators start from, [M, vectors, LANES]. Of each vector: its first
// group, and which words and groups are there.
struct Paired {
  int64_t vectors;
  std::vector<BFloat16> pairs;
  std::vector<float> starts;
  std::vector<int64_t> group;
  std::vector<__mmask16> words, groups;
  int32_t group_of_lane[LANES];

  Paired(const BFloat16* x_MK, int64_t m, const Grid& grid)
      : vectors((grid.groups * grid.group + VECTOR - 1) / VECTOR), pairs(m * vectors * VECTOR),
        starts(m * vectors * LANES) {
    const int64_t row_words = grid.groups * grid.group / WORD, group_words = grid.group / WORD;
    for (int64_t i = 0; i < m * row_words; i++) {
      const BFloat16* from = x_MK + i * WORD;
      const int64_t vector = i / row_words * vectors + i % row_words / LANES;
      const int64_t lane = i % row_words % LANES;
      float total = 0;
      for (int64_t j = 0; j < PLANES; j++) {
        BFloat16* pair = &pairs[((vector * PLANES + j) * LANES + lane) * 2];
        pair[0] = from[j];
        pair[1] = from[j + PLANES];
        total += float(from[j]) + float(from[j + PLANES]);
      }
      starts[vector * LANES + lane] = -136 * total;
    }
    const auto first = [](int64_t count) { return __mmask16((1 << std::min(LANES, count)) - 1); };
    for (int64_t v = 0; v < vectors; v++) {
      group.push_back(v * LANES / group_words);
      words.push_back(first(row_words - v * LANES));
      groups.push_back(first(std::min(grid.groups - group[v], (LANES - 1) / group_words + 1)));
    }
    for (int64_t i = 0; i < LANES; i++) group_of_lane[i] = i / group_words;
  }
};

template <int64_t TOKENS>
void pairs_row(const Paired& x, int64_t first, const uint8_t* w, const float* scales, BFloat16* y,
               int64_t n) {
  const __m512i nibbles = _mm512_set1_epi32(0x000F000F), units = _mm512_set1_epi32(0x43004300);
  const __m512i group_of_lane = _mm512_loadu_si512(x.group_of_lane);
  __m512 total[TOKENS] = {};
  for (int64_t v = 0; v < x.vectors; v++, w += 4 * LANES) {
    prefetch(w);
    const __m512i words = _mm512_maskz_loadu_epi32(x.words[v], w);
    const __m512i shifted[PLANES] = {words, _mm512_srli_epi32(words, 4),
                                     _mm512_srli_epi32(words, 8), _mm512_srli_epi32(words, 12)};
    const __m512 known = _mm512_maskz_loadu_ps(x.groups[v], scales + x.group[v]);
    const __m512 scale = _mm512_permutexvar_ps(group_of_lane, known);
    for (int64_t i = 0; i < TOKENS; i++) {
      const int64_t vector = (first + i) * x.vectors + v;
      __m512 part = _mm512_loadu_ps(&x.starts[vector * LANES]);
      for (int64_t j = 0; j < PLANES; j++) {
        // (shifted & nibbles) | units
        const __m512i plane = _mm512_ternarylogic_epi32(shifted[j], nibbles, units, 0xEA);
        const __m512i inputs = _mm512_loadu_si512(&x.pairs[(vector * PLANES + j) * 2 * LANES]);
        part = _mm512_dpbf16_ps(part, (__m512bh)plane, (__m512bh)inputs);
      }
      total[i] = _mm512_fmadd_ps(part, scale, total[i]);
    }
  }
  for (int64_t i = 0; i < TOKENS; i++) y[i * n] = BFloat16(sum((Floats)total[i]));
}

inline void pairs(const BFloat16* x_MK, const std::vector<Packed>& weights, BFloat16* y_MN, int64_t m,
                  int64_t n, const Grid& grid) {
  const Paired x(x_MK, m, grid);
  for_runs(weights, grid.row_bytes(), [&](const Packed& w, int64_t begin, int64_t end, int64_t out) {
    for (int64_t row = begin; row < end; row++)
      for_tiles(m, [&]<int64_t TOKENS>(Tokens<TOKENS>, int64_t first) {
        pairs_row<TOKENS>(x, first, w.bytes + row * grid.row_bytes(), w.scales + row * grid.groups,
                          y_MN + first * n + out + row, n);
      });
  });
}

#else

inline bool pairs_take(const Grid&) { return false; }
inline void pairs(const BFloat16*, const std::vector<Packed>&, BFloat16*, int64_t, int64_t,
                  const Grid&) {}

#endif

}  // namespace compress
