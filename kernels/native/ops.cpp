// What the CPU does itself as operators of torch; build.py has their Python side.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "../dense/amx.h"
#include "../dense/cpu.h"
#include "../token/cpu.h"
#include "../w8a8/amx.h"
#include "../w8a8/cpu.h"
#include "../wna16/amx.h"
#include "../wna16/cpu.h"
#include "../wna16/pairs.h"

namespace {

using at::Tensor;
using c10::BFloat16;
using std::optional;

// The products read memory by these sizes, row after row, and look at no stride.
void expect(const char* name, const Tensor& operand, at::IntArrayRef sizes) {
  TORCH_CHECK(operand.sizes() == sizes && operand.is_contiguous(), name, " is ", operand.sizes(),
              " with strides ", operand.strides(), "; wanted contiguous ", sizes);
}

constexpr auto NO_AMX = "no AMX for this process; wanted a CPU and a Linux that have it";

std::vector<float> as_floats(const Tensor& x) {
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  return std::vector<float>(from, from + x.numel());
}

const uint8_t* as_bytes(const Tensor& words) {
  return reinterpret_cast<const uint8_t*>(words.const_data_ptr<int32_t>());
}

int64_t rows_of(at::TensorList weights) {
  TORCH_CHECK(!weights.empty(), "no weight; wanted one or more");
  int64_t rows = 0;
  for (const Tensor& weight : weights) rows += weight.size(0);
  return rows;
}

compress::Grid grid_of(const Tensor& words, const Tensor& scales, int64_t bits) {
  TORCH_CHECK(bits == 4 || bits == 8, bits, " bits; wanted 4 or 8");
  const int64_t n = words.size(0), count = words.size(1), groups = scales.size(1);
  expect("words", words, {n, count});
  expect("scales", scales, {n, groups});
  TORCH_CHECK(groups > 0 && count > 0 && count % (4 * groups) == 0, count, " words in ", groups,
              " groups; wanted whole vectors of 16 bytes in each");
  return {bits, groups, count * 32 / bits / groups};
}

std::vector<compress::Dense> dense_weights(const Tensor& x, at::TensorList weights) {
  const int64_t k = x.size(1);
  expect("x", x, {x.size(0), k});
  std::vector<compress::Dense> each;
  for (const Tensor& weight : weights) {
    expect("weight", weight, {weight.size(0), k});
    each.push_back({weight.const_data_ptr<BFloat16>(), weight.size(0)});
  }
  return each;
}

Tensor dense(const Tensor& x, at::TensorList weights) {
  const int64_t m = x.size(0), n = rows_of(weights);
  const auto each = dense_weights(x, weights);
  Tensor y = at::empty({m, n}, x.options());
  compress::dense(as_floats(x).data(), each, y.data_ptr<BFloat16>(), m, n, x.size(1));
  return y;
}

bool amx() {
#ifdef COMPRESS_AMX
  return compress::amx_allowed();
#else
  return false;
#endif
}

Tensor dense_amx(const Tensor& x, at::TensorList weights) {
  TORCH_CHECK(amx(), NO_AMX);
  const int64_t m = x.size(0), n = rows_of(weights);
  const auto each = dense_weights(x, weights);
  Tensor y = at::empty({m, n}, x.options());
#ifdef COMPRESS_AMX
  compress::dense_amx(x.const_data_ptr<BFloat16>(), each, y.data_ptr<BFloat16>(), m, n, x.size(1));
#endif
  return y;
}

std::vector<compress::Int8> int8_weights(int64_t k, at::TensorList weights, at::TensorList sums,
                                         at::TensorList scales, const optional<Tensor>& bias) {
  if (bias) expect("bias", *bias, {rows_of(weights)});
  TORCH_CHECK(sums.size() == weights.size() && scales.size() == weights.size(), weights.size(),
              " weights, ", sums.size(), " sums, ", scales.size(), " scales; wanted as many of each");
  const float* of_rows = bias ? bias->const_data_ptr<float>() : nullptr;
  std::vector<compress::Int8> each;
  for (size_t i = 0; i < weights.size(); i++) {
    const int64_t rows = weights[i].size(0);
    expect("weight", weights[i], {rows, k});
    expect("sums", sums[i], {rows});
    expect("scales", scales[i], {rows});
    each.push_back({weights[i].const_data_ptr<int8_t>(), sums[i].const_data_ptr<int32_t>(),
                    scales[i].const_data_ptr<float>(), of_rows, rows});
    if (of_rows) of_rows += rows;
  }
  return each;
}

template <typename T, typename Out>
Tensor w8a8_as(const Tensor& x, const std::vector<compress::Int8>& weights, int64_t n) {
  Tensor y = at::empty({x.size(0), n}, x.options().dtype(c10::CppTypeToScalarType<Out>::value));
  compress::w8a8(x.const_data_ptr<T>(), weights, y.data_ptr<Out>(), x.size(0), n, x.size(1));
  return y;
}

Tensor w8a8(const Tensor& x, at::TensorList weights, at::TensorList sums, at::TensorList scales,
            const optional<Tensor>& bias) {
  const int64_t n = rows_of(weights), k = x.size(1);
  expect("x", x, {x.size(0), k});
  const auto each = int8_weights(k, weights, sums, scales, bias);
  if (x.scalar_type() == at::kFloat) {
    const Tensor y = w8a8_as<float, float>(x, each, n);
    return bias ? at::add(y, *bias) : y;
  }
  if (bias) return at::add(w8a8_as<BFloat16, float>(x, each, n), *bias).to(at::kBFloat16);
  return w8a8_as<BFloat16, BFloat16>(x, each, n);
}

Tensor w8a8_amx(const Tensor& x, at::TensorList weights, at::TensorList sums, at::TensorList scales,
                const optional<Tensor>& bias) {
  TORCH_CHECK(amx(), NO_AMX);
  const int64_t m = x.size(0), n = rows_of(weights), k = x.size(1);
  expect("x", x, {m, k});
  const auto each = int8_weights(k, weights, sums, scales, bias);
  Tensor y = at::empty({m, n}, x.options());
#ifdef COMPRESS_AMX
  compress::w8a8_amx(x.const_data_ptr<BFloat16>(), each, y.data_ptr<BFloat16>(), m, n, k);
#endif
  return y;
}

template <typename T>
void quantize_rows(const Tensor& x, Tensor& ints, Tensor& scales) {
  const int64_t k = x.size(1);
  const T* from = x.const_data_ptr<T>();
  int8_t* to = ints.data_ptr<int8_t>();
  float* scale = scales.data_ptr<float>();
  compress::for_rows(x.size(0), x.element_size() * k, [&](int64_t i) {
    scale[i] = compress::quantize(from + i * k, k, to + i * k);
  });
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x) {
  const int64_t m = x.size(0);
  expect("x", x, {m, x.size(1)});
  Tensor ints = at::empty(x.sizes(), x.options().dtype(at::kChar));
  Tensor scales = at::empty({m}, x.options().dtype(at::kFloat));
  if (x.scalar_type() == at::kFloat)
    quantize_rows<float>(x, ints, scales);
  else
    quantize_rows<BFloat16>(x, ints, scales);
  return {ints, scales};
}

Tensor rescale(const Tensor& sums, const Tensor& scales, const Tensor& token_scales,
               at::ScalarType dtype) {
  const int64_t m = sums.size(0), n = sums.size(1);
  expect("sums", sums, {m, n});
  expect("scales", scales, {n});
  expect("token_scales", token_scales, {m});
  Tensor y = at::empty(sums.sizes(), sums.options().dtype(dtype));
  const auto fill = [&](auto* to) {
    compress::for_rows(m, sizeof(int32_t) * n, [&](int64_t i) {
      compress::rescale(sums.const_data_ptr<int32_t>() + i * n, scales.const_data_ptr<float>(),
                        token_scales.const_data_ptr<float>()[i], to + i * n, n);
    });
  };
  if (dtype == at::kFloat)
    fill(y.data_ptr<float>());
  else
    fill(y.data_ptr<BFloat16>());
  return y;
}

std::vector<compress::Packed> packed_weights(at::TensorList words, at::TensorList scales) {
  TORCH_CHECK(scales.size() == words.size(), words.size(), " weights, ", scales.size(),
              " scales; wanted as many of each");
  std::vector<compress::Packed> each;
  for (size_t i = 0; i < words.size(); i++) {
    const int64_t rows = words[i].size(0);
    expect("words", words[i], {rows, words[0].size(1)});
    expect("scales", scales[i], {rows, scales[0].size(1)});
    each.push_back({as_bytes(words[i]), scales[i].const_data_ptr<float>(), rows});
  }
  return each;
}

Tensor wna16(const Tensor& x, at::TensorList words, at::TensorList scales, int64_t bits) {
  const int64_t m = x.size(0), n = rows_of(words);
  const auto each = packed_weights(words, scales);
  const compress::Grid grid = grid_of(words[0], scales[0], bits);
  expect("x", x, {m, grid.groups * grid.group});
  Tensor y = at::empty({m, n}, x.options());
  if (compress::pairs_take(grid))
    compress::pairs(x.const_data_ptr<BFloat16>(), each, y.data_ptr<BFloat16>(), m, n, grid);
  else
    compress::wna16(as_floats(x).data(), each, y.data_ptr<BFloat16>(), m, n, grid);
  return y;
}

Tensor w4a16_amx(const Tensor& x, at::TensorList words, at::TensorList scales) {
  TORCH_CHECK(amx(), NO_AMX);
  const int64_t m = x.size(0), n = rows_of(words);
  const auto each = packed_weights(words, scales);
  const compress::Grid grid = grid_of(words[0], scales[0], 4);
  expect("x", x, {m, grid.groups * grid.group});
  TORCH_CHECK(grid.group % 64 == 0, "groups of ", grid.group, "; wanted a multiple of 64");
  Tensor y = at::empty({m, n}, x.options());
#ifdef COMPRESS_AMX
  compress::w4a16_amx(x.const_data_ptr<BFloat16>(), each, y.data_ptr<BFloat16>(), m, n, grid);
#endif
  return y;
}

Tensor dequantize(const Tensor& words, const Tensor& scales, int64_t bits) {
  const compress::Grid grid = grid_of(words, scales, bits);
  const int64_t n = words.size(0);
  Tensor out = at::empty({n, grid.groups * grid.group}, scales.options().dtype(at::kBFloat16));
  compress::dequantize(as_bytes(words), scales.const_data_ptr<float>(), out.data_ptr<BFloat16>(), n,
                       grid);
  return out;
}

Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t m = x.size(0), k = x.size(1);
  expect("x", x, {m, k});
  expect("weight", weight, {k});
  Tensor y = at::empty({m, k}, x.options());
  for (int64_t i = 0; i < m; i++)
    compress::rmsnorm(x.const_data_ptr<BFloat16>() + i * k, weight.const_data_ptr<BFloat16>(),
                      y.data_ptr<BFloat16>() + i * k, k, eps);
  return y;
}

Tensor swiglu(const Tensor& gate_up) {
  const int64_t m = gate_up.size(0), n = gate_up.size(1) / 2;
  expect("gate_up", gate_up, {m, 2 * n});
  Tensor y = at::empty({m, n}, gate_up.options());
  for (int64_t i = 0; i < m; i++)
    compress::swiglu(gate_up.const_data_ptr<BFloat16>() + 2 * i * n,
                     gate_up.const_data_ptr<BFloat16>() + (2 * i + 1) * n,
                     y.data_ptr<BFloat16>() + i * n, n);
  return y;
}

Tensor attend(const Tensor& qkv, const Tensor& cos, const Tensor& sin, Tensor& keys, Tensor& values,
              int64_t position, double scale) {
  const int64_t groups = keys.size(0), room = keys.size(1), size = keys.size(2);
  TORCH_CHECK(groups > 0 && size > 0, "keys is ", keys.sizes(), "; wanted heads of some size");
  const int64_t queries = qkv.numel() / (groups * size) - 2;
  TORCH_CHECK(position >= 0 && position < room, "token ", position, " of a cache for ", room);
  TORCH_CHECK(queries > 0, "qkv is ", qkv.sizes(), "; wanted a query or more to each key");
  expect("qkv", qkv, {1, groups * (queries + 2) * size});
  expect("cos", cos, {size});
  expect("sin", sin, {size});
  expect("keys", keys, {groups, room, size});
  expect("values", values, {groups, room, size});
  Tensor out = at::empty({1, groups * queries * size}, qkv.options());
  const BFloat16* q = qkv.const_data_ptr<BFloat16>();
  const BFloat16* k = q + groups * queries * size;
  compress::attend(q, k, k + groups * size, cos.const_data_ptr<BFloat16>(),
                   sin.const_data_ptr<BFloat16>(), keys.data_ptr<BFloat16>(),
                   values.data_ptr<BFloat16>(), out.data_ptr<BFloat16>(), position, scale,
                   {groups, queries, size, room});
  return out;
}

TORCH_LIBRARY(compress_cpu, library) {
  library.def("amx() -> bool", amx);
  library.def("dense(Tensor x, Tensor[] weights) -> Tensor");
  library.def("dense_amx(Tensor x, Tensor[] weights) -> Tensor");
  library.def(
      "w8a8(Tensor x, Tensor[] weights, Tensor[] sums, Tensor[] scales, Tensor? bias) -> Tensor");
  library.def(
      "w8a8_amx(Tensor x, Tensor[] weights, Tensor[] sums, Tensor[] scales, Tensor? bias) -> Tensor");
  library.def("quantize(Tensor x) -> (Tensor, Tensor)");
  library.def(
      "rescale(Tensor sums, Tensor scales, Tensor token_scales, ScalarType dtype) -> Tensor");
  library.def("wna16(Tensor x, Tensor[] words, Tensor[] scales, int bits) -> Tensor");
  library.def("w4a16_amx(Tensor x, Tensor[] words, Tensor[] scales) -> Tensor");
  library.def("dequantize(Tensor words, Tensor scales, int bits) -> Tensor");
  library.def("rmsnorm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("swiglu(Tensor gate_up) -> Tensor");
  library.def(
      "attend(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
      "int position, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(compress_cpu, CPU, library) {
  library.impl("dense", dense);
  library.impl("dense_amx", dense_amx);
  library.impl("w8a8", w8a8);
  library.impl("w8a8_amx", w8a8_amx);
  library.impl("quantize", quantize);
  library.impl("rescale", rescale);
  library.impl("wna16", wna16);
  library.impl("w4a16_amx", w4a16_amx);
  library.impl("dequantize", dequantize);
  library.impl("rmsnorm", rmsnorm);
  library.impl("swiglu", swiglu);
  library.impl("attend", attend);
}

}  // namespace
