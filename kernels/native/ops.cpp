// The CPU's products for a few tokens as operators of torch; build.py has their Python side.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <vector>

#include "../dense/cpu.h"
#include "../token/cpu.h"
#include "../w8a8/cpu.h"
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

std::vector<float> floats(const Tensor& x) {
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  return std::vector<float>(from, from + x.numel());
}

const uint8_t* as_bytes(const Tensor& words) {
  return reinterpret_cast<const uint8_t*>(words.const_data_ptr<int32_t>());
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

Tensor dense(const Tensor& x, const Tensor& weight) {
  const int64_t m = x.size(0), n = weight.size(0), k = weight.size(1);
  expect("x", x, {m, k});
  expect("weight", weight, {n, k});
  Tensor y = at::empty({m, n}, x.options());
  compress::dense(floats(x).data(), weight.const_data_ptr<BFloat16>(), y.data_ptr<BFloat16>(), m, n,
                  k);
  return y;
}

template <typename T, typename Out>
Tensor w8a8_as(const Tensor& x, const Tensor& weight, const Tensor& sums, const Tensor& scales) {
  const int64_t m = x.size(0), n = weight.size(0), k = weight.size(1);
  expect("x", x, {m, k});
  expect("weight", weight, {n, k});
  expect("sums", sums, {n});
  expect("scales", scales, {n});
  Tensor y = at::empty({m, n}, x.options().dtype(c10::CppTypeToScalarType<Out>::value));
  compress::w8a8(x.const_data_ptr<T>(), weight.const_data_ptr<int8_t>(),
                 sums.const_data_ptr<int32_t>(), scales.const_data_ptr<float>(), y.data_ptr<Out>(),
                 m, n, k);
  return y;
}

Tensor w8a8(const Tensor& x, const Tensor& weight, const Tensor& sums, const Tensor& scales,
            const optional<Tensor>& bias) {
  if (x.scalar_type() == at::kFloat) {
    const Tensor y = w8a8_as<float, float>(x, weight, sums, scales);
    return bias ? at::add(y, *bias) : y;
  }
  if (bias) return at::add(w8a8_as<BFloat16, float>(x, weight, sums, scales), *bias).to(at::kBFloat16);
  return w8a8_as<BFloat16, BFloat16>(x, weight, sums, scales);
}

Tensor wna16(const Tensor& x, const Tensor& words, const Tensor& scales, int64_t bits) {
  const compress::Grid grid = grid_of(words, scales, bits);
  const int64_t m = x.size(0), n = words.size(0);
  expect("x", x, {m, grid.groups * grid.group});
  Tensor y = at::empty({m, n}, x.options());
  const float* each = scales.const_data_ptr<float>();
  if (compress::pairs_take(grid))
    compress::pairs(x.const_data_ptr<BFloat16>(), as_bytes(words), each, y.data_ptr<BFloat16>(), m,
                    n, grid);
  else
    compress::wna16(floats(x).data(), as_bytes(words), each, y.data_ptr<BFloat16>(), m, n, grid);
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

Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
              const Tensor& sin, Tensor& keys, Tensor& values, int64_t position, double scale) {
  const int64_t groups = keys.size(0), room = keys.size(1), size = keys.size(2);
  TORCH_CHECK(groups > 0 && size > 0, "keys is ", keys.sizes(), "; wanted heads of some size");
  const int64_t queries = q.numel() / (groups * size);
  TORCH_CHECK(position >= 0 && position < room, "token ", position, " of a cache for ", room);
  expect("q", q, {1, groups * queries * size});
  expect("k", k, {1, groups * size});
  expect("v", v, {1, groups * size});
  expect("cos", cos, {size});
  expect("sin", sin, {size});
  expect("keys", keys, {groups, room, size});
  expect("values", values, {groups, room, size});
  Tensor out = at::empty(q.sizes(), q.options());
  compress::attend(q.const_data_ptr<BFloat16>(), k.const_data_ptr<BFloat16>(),
                   v.const_data_ptr<BFloat16>(), cos.const_data_ptr<BFloat16>(),
                   sin.const_data_ptr<BFloat16>(), keys.data_ptr<BFloat16>(),
                   values.data_ptr<BFloat16>(), out.data_ptr<BFloat16>(), position, scale,
                   {groups, queries, size, room});
  return out;
}

TORCH_LIBRARY(compress_cpu, library) {
  library.def("dense(Tensor x, Tensor weight) -> Tensor");
  library.def("w8a8(Tensor x, Tensor weight, Tensor sums, Tensor scales, Tensor? bias) -> Tensor");
  library.def("wna16(Tensor x, Tensor words, Tensor scales, int bits) -> Tensor");
  library.def("dequantize(Tensor words, Tensor scales, int bits) -> Tensor");
  library.def("rmsnorm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, "
      "Tensor(b!) values, int position, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(compress_cpu, CPU, library) {
  library.impl("dense", dense);
  library.impl("w8a8", w8a8);
  library.impl("wna16", wna16);
  library.impl("dequantize", dequantize);
  library.impl("rmsnorm", rmsnorm);
  library.impl("attend", attend);
}

}  // namespace
