// What the CPU's kernels share: vectors, and rows shared out among threads.
//
//     x [M, K], weight [N, K], scales [N, G]  ->  y [M, N]
//
// M tokens, N output channels, K input channels, G groups. Several weights of one input make one
// product: their outputs lie side by side, and N counts the rows of all. At decode the speed of memory should be
// all that counts, so each row of the weight is read once, as the checkpoint stores it, and
// multiplied with up to TILE tokens while it is at hand. An output is summed in one order, whatever
// M and the number of threads. Vectors are GCC's, which Clang has too: no instruction set is named.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace compress {

using c10::BFloat16;

constexpr int64_t LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

// Tokens that one pass over a row serves: their sums stay in registers.
constexpr int64_t TILE = 4;
// Bytes of weight that are worth a thread of their own.
constexpr int64_t BYTES_PER_THREAD = 64 * 1024;

template <typename Vector>
Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(Vector));
  return vector;
}

// 16 values of bf16: the upper halves of float32.
inline Floats widen(Halves values) { return (Floats)(__builtin_convertvector(values, Words) << 16); }

// Rounded to bf16, to even; NaN stays NaN.
inline Halves narrow(Floats values) {
  const Words bits = (Words)values, even = bits >> 16 & 1;
  const Words rounded = bits + 0x7FFF + even;
  return __builtin_convertvector((values == values ? rounded : bits | 0x400000) >> 16, Halves);
}

inline Floats floats(const BFloat16* from) { return widen(load<Halves>(from)); }
inline Floats floats(const float* from) { return load<Floats>(from); }

template <typename Vector, typename Value>
void store(Vector vector, Value* to) {
  static_assert(sizeof(Vector) == LANES * sizeof(Value));
  std::memcpy(to, &vector, sizeof(Vector));
}
inline void store(Floats values, BFloat16* to) { store(narrow(values), to); }

// To whole numbers, to even, below 2^22: 3 * 2^22 has no room for a fraction.
inline Floats whole_numbers(Floats values) { return values + 12582912.f - 12582912.f; }

// By halves, because one lane after the other waits for each addition.
inline float sum(Floats values) {
  typedef float Half __attribute__((vector_size(2 * LANES)));
  typedef float Quarter __attribute__((vector_size(LANES)));
  Half halves[2];
  std::memcpy(halves, &values, sizeof(values));
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof(half));
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// Asks for the cache line that a row's reader gets to some rows later; the CPU's own prefetcher
// stops at pages of 4 KiB.
inline void prefetch(const void* from) {
  __builtin_prefetch(static_cast<const char*>(from) + 3072);
}

inline int64_t rows_per_thread(int64_t bytes_per_row) {
  return BYTES_PER_THREAD / std::max<int64_t>(bytes_per_row, 1) + 1;
}

// Calls row(n) for each of the `rows`, shared out among torch's threads.
template <typename Row>
void for_rows(int64_t rows, int64_t bytes_per_row, const Row& row) {
  at::parallel_for(0, rows, rows_per_thread(bytes_per_row), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) row(n);
  });
}

// Shares out the rows of all `weights` among torch's threads: calls run(weight, begin, end, first)
// for rows of one of them, of which row 0 gives output `first`.
template <typename Weight, typename Run>
void for_runs(const std::vector<Weight>& weights, int64_t bytes_per_row, const Run& run) {
  int64_t rows = 0;
  for (const Weight& weight : weights) rows += weight.rows;
  at::parallel_for(0, rows, rows_per_thread(bytes_per_row), [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const Weight& weight : weights) {
      const int64_t from = std::max<int64_t>(begin - first, 0);
      const int64_t to = std::min(end - first, weight.rows);
      if (from < to) run(weight, from, to, first);
      first += weight.rows;
    }
  });
}

template <int64_t TOKENS>
struct Tokens {};

// Calls product(Tokens<T>, first) for tiles of T tokens that make up m.
template <typename Product>
void for_tiles(int64_t m, const Product& product) {
  int64_t first = 0;
  for (; first + TILE <= m; first += TILE) product(Tokens<TILE>(), first);
  for (; first < m; first++) product(Tokens<1>(), first);
}

}  // namespace compress
