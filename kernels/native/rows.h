// What the products for a few tokens on CPU share: vectors, and rows shared out among threads.
//
//     x [M, K], weight [N, K], scales [N, G]  ->  y [M, N]
//
// M tokens, N output channels, K input channels, G groups. At decode the speed of memory should be
// all that counts, so each row of the weight is read once, as the checkpoint stores it, and
// multiplied with up to TILE tokens while it is at hand. An output is summed in one order, whatever
// M and the number of threads. Vectors are GCC's, which Clang has too: no instruction set is named.

#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

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
inline Floats widen(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

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

// Calls row(n) for each of the `rows`, shared out among torch's threads.
template <typename Row>
void for_rows(int64_t rows, int64_t bytes_per_row, const Row& row) {
  const int64_t grain = BYTES_PER_THREAD / std::max<int64_t>(bytes_per_row, 1) + 1;
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) row(n);
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
