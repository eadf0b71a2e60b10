// Products by AMX: y_MN = x_MK @ w_NK^T, of bf16 summed in float32, or of int8 in int32.
//
// A tile of registers has 16 rows of 64 bytes. Those of the weight are 16 of its rows, 32 inputs of
// each (64 of int8), as they lie in memory. Those of x hold 4 bytes of inputs below each other, 16
// tokens side by side, and x is laid out so beforehand. What comes is y transposed, and is put right
// as it is rounded. An output is summed in one order, whatever M and the number of threads: a token's
// outputs have the same bits alone and in any batch, which oneDNN's of bf16 do not.

#pragma once

#include "rows.h"

// GCC 11 has AMX, but not the shuffles.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__) && defined(__linux__) && __has_builtin(__builtin_shufflevector)
#define COMPRESS_AMX

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>

namespace compress {

constexpr int64_t SIDE = 16;            // rows of a tile
constexpr int64_t LINE = 64;            // bytes of a row of a tile, and of the cache's lines
constexpr int64_t BLOCK = 2 * SIDE;     // channels, and tokens, of one block of outputs: 4 tiles
constexpr int64_t L2_BYTES = 3 << 19;   // of x that are gone through for each block of channels

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
    std::fill_n(full.bytes, 8, LINE);
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

// Lines of a row of so many bytes, the last perhaps not whole.
inline int64_t lines_of(int64_t bytes) { return (bytes + LINE - 1) / LINE; }

// x, M rows of `bytes`, as tiles: for 16 tokens after the other, for each line; zeros beyond.
inline std::unique_ptr<Square[]> in_tiles(const void* x, int64_t m, int64_t bytes) {
  const int64_t panels = (m + SIDE - 1) / SIDE, depth = lines_of(bytes);
  auto tiles = std::make_unique_for_overwrite<Square[]>(panels * depth);
  at::parallel_for(0, panels, rows_per_thread(SIDE * bytes), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * depth; at < end * depth; at++) {
      const int64_t token = at / depth * SIDE, from = at % depth * LINE;
      const int64_t tokens = std::min(SIDE, m - token), there = std::min(LINE, bytes - from);
      Square& tile = tiles[at];
      if (tokens < SIDE || there < LINE) tile = {};
      for (int64_t i = 0; i < tokens; i++)
        std::memcpy(&tile.rows[i], static_cast<const char*>(x) + (token + i) * bytes + from, there);
      transpose(tile);
    }
  });
  return tiles;
}

// 32 rows of a weight as tiles find them, `stride` bytes apart. ahead: what will be wanted next, of
// which `lines` of the cache for each line of a row.
struct Tiled {
  const void* values;
  int64_t stride;
  const void* ahead;
  int64_t lines;
};

// Sums of 32 channels and TWO ? 32 : 16 tokens, in tiles 0 to 3: [tokens / 16][channels / 16].
// Of the lines ahead, those from `line` to `end` of each line's are read from memory meanwhile.
template <bool INTS, bool TWO>
void multiply(const Tiled& w, const Square* x, int64_t depth, int64_t line, int64_t end) {
  asm volatile("" ::: "memory");  // nor do those that load tiles say what they read
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) _tile_zero(2);
  if (TWO) _tile_zero(3);
  for (int64_t d = 0; d < depth; d++) {
    for (int64_t i = line; i < end; i++)
      __builtin_prefetch(static_cast<const char*>(w.ahead) + (d * w.lines + i) * LINE);
    const char *upper = static_cast<const char*>(w.values) + d * LINE;
    const char *lower = upper + SIDE * w.stride;
    const Square *left = x + d, *right = left + depth;
    _tile_loadd(4, upper, w.stride);
    _tile_loadd(6, left, LINE);
    if (INTS) _tile_dpbssd(0, 4, 6); else _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower, w.stride);
    if (INTS) _tile_dpbssd(1, 5, 6); else _tile_dpbf16ps(1, 5, 6);
    if (TWO) {
      _tile_loadd(7, right, LINE);
      if (INTS) _tile_dpbssd(2, 4, 7); else _tile_dpbf16ps(2, 4, 7);
      if (INTS) _tile_dpbssd(3, 5, 7); else _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// The sums of 32 channels and 16 tokens.
typedef Square Sums[2];

// `sums` to y in bf16, whose rows are tokens. Rounded, two channels make a word. output(words, i)
// makes floats of the sums of channel i.
template <typename Output>
void put(const Sums& sums, BFloat16* y, int64_t channels, int64_t tokens, int64_t n,
         const Output& output) {
  typedef uint16_t Pairs __attribute__((vector_size(4 * LANES)));
  Square words;
  for (int64_t i = 0; i < BLOCK; i += 2) {
    const Words* rows = &sums[i / SIDE].rows[i % SIDE];
    const Floats even = output(rows[0], i), odd = output(rows[1], i + 1);
    const Pairs apart = (Pairs)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    words.rows[i / 2] = (Words)__builtin_shufflevector(
        apart, apart, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26,
        11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  transpose(words);
  for (int64_t i = 0; i < tokens; i++) {
    if (channels == BLOCK)
      std::memcpy(y + i * n, &words.rows[i], 2 * BLOCK);
    else
      std::memcpy(y + i * n, &words.rows[i], 2 * channels);
  }
}

// All tokens' outputs of `channels` rows, from y's first column on; output_of(token) gives the
// `output` of 16 tokens.
template <bool INTS, typename OutputOf>
void outputs(const Tiled& w, const Square* x, BFloat16* y, int64_t channels, int64_t m, int64_t n,
             int64_t depth, const OutputOf& output_of) {
  const int64_t turns = (m + BLOCK - 1) / BLOCK;
  Sums left, right;
  for (int64_t turn = 0; turn < turns; turn++) {
    const int64_t first = turn * BLOCK, second = first + SIDE;
    const int64_t line = turn * w.lines / turns, end = (turn + 1) * w.lines / turns;
    const Square* from = x + first / SIDE * depth;
    const bool two = second < m;
    if (two)
      multiply<INTS, true>(w, from, depth, line, end);
    else
      multiply<INTS, false>(w, from, depth, line, end);
    _tile_stored(0, &left[0], LINE);
    _tile_stored(1, &left[1], LINE);
    if (two) _tile_stored(2, &right[0], LINE);
    if (two) _tile_stored(3, &right[1], LINE);
    put(left, y + first * n, channels, std::min(SIDE, m - first), n, output_of(first));
    if (two)
      put(right, y + second * n, channels, std::min(SIDE, m - second), n, output_of(second));
  }
}

// Where rows of a weight are put for tiles: at the start of a cache line, zeros until written.
class Room {
 public:
  char* of(int64_t bytes) {
    squares_.resize(std::max<int64_t>(squares_.size(), bytes / sizeof(Square) + 1));
    return reinterpret_cast<char*>(squares_.data());
  }

 private:
  std::vector<Square> squares_;
};

// 32 rows of a weight [N, K], `rows` of which are there: where they lie, or copied to `room`.
inline Tiled as_they_lie(const void* weight, int64_t row, int64_t rows, int64_t bytes, bool last,
                         Room& room) {
  const char* values = static_cast<const char*>(weight) + row * bytes;
  if (rows == BLOCK && bytes % LINE == 0)
    return {values, bytes, values + BLOCK * bytes, last ? 0 : BLOCK};
  const int64_t stride = lines_of(bytes) * LINE;
  char* copy = room.of(BLOCK * stride);
  for (int64_t i = 0; i < rows; i++) std::memcpy(copy + i * stride, values + i * bytes, bytes);
  return {copy, stride, nullptr, 0};
}

// The product of x, M rows of `bytes`, and all rows of `weights`.
// rows_of_x(first, tokens): where so many rows of it lie, from one on, until it is asked again.
// tiled(weight, row, rows, room): up to 32 rows of one of them as tiles find them.
// output_of(weight, row, rows, token): a function of sums of 16 tokens of those that were asked for
// last, and the channel of those rows, that gives floats.
template <bool INTS, typename Weight, typename RowsOfX, typename TiledOf, typename OutputOf>
void amx_product(const RowsOfX& rows_of_x, const std::vector<Weight>& weights, BFloat16* y_MN,
                 int64_t m, int64_t n, int64_t bytes, const TiledOf& tiled,
                 const OutputOf& output_of) {
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
  const int64_t depth = lines_of(bytes);
  const int64_t fit = L2_BYTES / std::max<int64_t>(bytes, 1);
  const int64_t together = std::max(BLOCK, fit / BLOCK * BLOCK);
  for (int64_t first = 0; first < m; first += together) {
    const int64_t tokens = std::min(together, m - first);
    // Of few tokens reading the weight takes the time, of many the products.
    const int64_t grain = rows_per_thread(BLOCK * bytes * std::max<int64_t>(1, tokens / SIDE));
    const auto tiles = in_tiles(rows_of_x(first, tokens), tokens, bytes);
    at::parallel_for(0, blocks.size(), grain, [&](int64_t begin, int64_t end) {
      const Tiles configured;
      Room room;
      for (int64_t i = begin; i < end; i++) {
        const Block& block = blocks[i];
        const int64_t row = block.row, rows = std::min(BLOCK, block.weight->rows - row);
        BFloat16* y = y_MN + first * n + block.out;
        const auto output = [&](int64_t token) {
          return output_of(*block.weight, row, rows, token);
        };
        outputs<INTS>(tiled(*block.weight, row, rows, room), tiles.get(), y, rows, tokens, n, depth,
                      output);
      }
    });
  }
}

// Of sums in float32.
template <typename Weight>
auto as_summed(const Weight&, int64_t, int64_t, int64_t) {
  return [](Words sums, int64_t) { return (Floats)sums; };
}

}  // namespace compress

#endif
