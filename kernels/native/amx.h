// Products in bf16 by AMX: y_MN = x_MK @ w_NK^T, summed in float32 and rounded once.
//
// A tile of registers has 16 rows of 64 bytes. Those of the weight are 16 of its rows, 32 inputs of
// each, as they lie in memory. Those of x hold pairs of inputs below each other, 16 tokens side by
// side, and x is laid out so beforehand. What comes is y transposed, and is put right as it is
// rounded. An output is summed in one order, whatever M and the number of threads: a token's outputs
// have the same bits alone and in any batch, which oneDNN's do not.

#pragma once

#include "rows.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define COMPRESS_AMX

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>

namespace compress {

constexpr int64_t SIDE = 16;            // rows of a tile
constexpr int64_t DEPTH = 32;           // inputs of a tile
constexpr int64_t BLOCK = 2 * SIDE;     // channels, and tokens, of one block of outputs: 4 tiles
constexpr int64_t L2_BYTES = 3 << 19;  // of x that are gone through for each block of channels

// Linux gives a process these registers once it asks for them.
inline bool amx_allowed() {
  constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
  return allowed;
}

// How many bytes and rows each tile has, as the CPU reads it.
struct alignas(64) Shapes {
  uint8_t palette, from, nothing[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// The compiler's own intrinsics do not say that they read the whole of it.
inline void load_shapes(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline Shapes stored_shapes() {
  Shapes shapes;
  asm volatile("sttilecfg %0" : "=m"(shapes));
  return shapes;
}

// All eight tiles at full size, as long as it lives; then as they were, since oneDNN has its own.
class Tiles {
 public:
  Tiles() : before_(stored_shapes()) {
    Shapes full = {.palette = 1};
    std::fill_n(full.bytes, 8, 2 * DEPTH);
    std::fill_n(full.rows, 8, SIDE);
    load_shapes(full);
  }
  ~Tiles() { load_shapes(before_); }
  Tiles(const Tiles&) = delete;

 private:
  Shapes before_;
};

struct alignas(64) Square {
  Words rows[SIDE];
};

// Each round takes the first row, the ninth, the second, ... and so turns the eight bits of a
// place, four of row and four of column, by one.
inline void transpose(Square& square) {
  for (int round = 0; round < 4; round++) {
    Square turned;
    for (int i = 0; i < 8; i++) {
      const Words a = square.rows[i], b = square.rows[i + 8];
      turned.rows[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                                   6, 22, 7, 23);
      turned.rows[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                                       13, 29, 14, 30, 15, 31);
    }
    square = turned;
  }
}

// x [M, K] as tiles: for 16 tokens after the other, for 32 inputs after the other; zeros beyond.
inline std::unique_ptr<Square[]> in_tiles(const BFloat16* x, int64_t m, int64_t k) {
  const int64_t panels = (m + SIDE - 1) / SIDE, depth = (k + DEPTH - 1) / DEPTH;
  auto tiles = std::make_unique_for_overwrite<Square[]>(panels * depth);
  const int64_t grain = rows_per_thread(2 * SIDE * k);
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * depth; at < end * depth; at++) {
      const int64_t token = at / depth * SIDE, input = at % depth * DEPTH;
      const int64_t tokens = std::min(SIDE, m - token), bytes = 2 * std::min(DEPTH, k - input);
      Square& tile = tiles[at];
      if (tokens < SIDE || bytes < 2 * DEPTH) tile = {};
      for (int64_t i = 0; i < tokens; i++)
        std::memcpy(&tile.rows[i], x + (token + i) * k + input, bytes);
      transpose(tile);
    }
  });
  return tiles;
}

// 32 rows of a weight as tiles find them, `stride` values apart. ahead: what will be wanted next, of
// which `lines` of the cache for each 32 inputs.
struct Tiled {
  const BFloat16* values;
  int64_t stride;
  const void* ahead;
  int64_t lines;
};

// Sums of 32 channels and TWO ? 32 : 16 tokens, in tiles 0 to 3: [tokens / 16][channels / 16].
// Of the lines ahead, those from `line` to `end` of each 32 inputs' are read from memory meanwhile.
template <bool TWO>
void multiply(const Tiled& w, const Square* x, int64_t depth, int64_t line, int64_t end) {
  asm volatile("" ::: "memory");  // nor do those that load tiles say what they read
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) _tile_zero(2);
  if (TWO) _tile_zero(3);
  for (int64_t d = 0; d < depth; d++) {
    for (int64_t i = line; i < end; i++)
      __builtin_prefetch(static_cast<const char*>(w.ahead) + (d * w.lines + i) * 64);
    const BFloat16 *upper = w.values + d * DEPTH, *lower = upper + SIDE * w.stride;
    const Square *left = x + d, *right = left + depth;
    _tile_loadd(4, upper, 2 * w.stride);
    _tile_loadd(6, left, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower, 2 * w.stride);
    _tile_dpbf16ps(1, 5, 6);
    if (TWO) {
      _tile_loadd(7, right, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Sums [32 channels, 16 tokens] to y, whose rows are tokens. Rounded, two channels make a word.
inline void put(const Square (&sums)[2], BFloat16* y, int64_t channels, int64_t tokens, int64_t n) {
  typedef uint16_t Pairs __attribute__((vector_size(4 * LANES)));
  Square words;
  for (int64_t i = 0; i < SIDE; i++) {
    const Words* rows = &sums[2 * i / SIDE].rows[2 * i % SIDE];
    const Pairs apart = (Pairs)_mm512_cvtne2ps_pbh((__m512)rows[1], (__m512)rows[0]);
    words.rows[i] = (Words)__builtin_shufflevector(apart, apart, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
                                                   5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11,
                                                   27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  transpose(words);
  for (int64_t i = 0; i < tokens; i++) {
    if (channels == BLOCK)
      std::memcpy(y + i * n, &words.rows[i], 2 * BLOCK);
    else
      std::memcpy(y + i * n, &words.rows[i], 2 * channels);
  }
}

// All tokens' outputs of `channels` rows, from y's first column on.
inline void outputs(const Tiled& w, const Square* x, BFloat16* y, int64_t channels, int64_t m,
                    int64_t n, int64_t depth) {
  const int64_t turns = (m + BLOCK - 1) / BLOCK;
  Square left[2], right[2];
  for (int64_t turn = 0; turn < turns; turn++) {
    const int64_t first = turn * BLOCK;
    const int64_t line = turn * w.lines / turns, end = (turn + 1) * w.lines / turns;
    const Square* from = x + first / SIDE * depth;
    const bool two = m - first > SIDE;
    if (two)
      multiply<true>(w, from, depth, line, end);
    else
      multiply<false>(w, from, depth, line, end);
    _tile_stored(0, &left[0], 64);
    _tile_stored(1, &left[1], 64);
    if (two) _tile_stored(2, &right[0], 64);
    if (two) _tile_stored(3, &right[1], 64);
    put(left, y + first * n, channels, std::min(SIDE, m - first), n);
    if (two) put(right, y + (first + SIDE) * n, channels, std::min(SIDE, m - first - SIDE), n);
  }
}

// Where rows of a weight are put for tiles: at the start of a cache line, zeros until written.
class Room {
 public:
  BFloat16* of(int64_t values) {
    lines_.resize(std::max<int64_t>(lines_.size(), (values + DEPTH * SIDE - 1) / (DEPTH * SIDE)));
    return reinterpret_cast<BFloat16*>(lines_.data());
  }

 private:
  std::vector<Square> lines_;
};

// The product of x [M, K] and all rows of `weights`. tiled(weight, row, rows, room) gives up to 32
// rows of one of them as tiles find them.
template <typename Weight, typename Rows>
void amx_product(const BFloat16* x_MK, const std::vector<Weight>& weights, BFloat16* y_MN, int64_t m,
                 int64_t n, int64_t k, const Rows& tiled) {
  struct Block {
    const Weight* weight;
    int64_t row, out;
  };
  std::vector<Block> blocks;
  int64_t out = 0;
  for (const Weight& weight : weights) {
    for (int64_t row = 0; row < weight.rows; row += BLOCK) blocks.push_back({&weight, row, out + row});
    out += weight.rows;
  }
  const int64_t depth = (k + DEPTH - 1) / DEPTH;
  const int64_t together = std::max(BLOCK, L2_BYTES / (2 * std::max<int64_t>(k, 1)) / BLOCK * BLOCK);
  const int64_t grain = rows_per_thread(2 * BLOCK * k);
  for (int64_t first = 0; first < m; first += together) {
    const int64_t tokens = std::min(together, m - first);
    const auto x = in_tiles(x_MK + first * k, tokens, k);
    at::parallel_for(0, blocks.size(), grain, [&](int64_t begin, int64_t end) {
      const Tiles tiles;
      Room room;
      for (int64_t i = begin; i < end; i++) {
        const auto& [weight, row, to] = blocks[i];
        const int64_t rows = std::min(BLOCK, weight->rows - row);
        outputs(tiled(*weight, row, rows, room), x.get(), y_MN + first * n + to, rows, tokens, n,
                depth);
      }
    });
  }
}

}  // namespace compress

#endif
