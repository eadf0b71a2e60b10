// The CPU's products for a few tokens as operators of torch; build.py has their Python side.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "../dense/cpu.h"
#include "../w8a8/cpu.h"
#include "../wna16/cpu.h"

namespace {

using at::Tensor;
using c10::BFloat16;
using std::optional;

std::vector<float> floats(const Tensor& x) {
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  return std::vector<float>(from, from + x.numel());
}

const uint8_t* as_bytes(const Tensor& words) {
  return reinterpret_cast<const uint8_t*>(words.const_data_ptr<int32_t>());
}

compress::Grid grid_of(const Tensor& words, const Tensor& scales, int64_t bits) {
  return {bits, scales.size(1), words.size(1) * 32 / bits / scales.size(1)};
}

Tensor dense(const Tensor& x, const Tensor& weight) {
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  Tensor y = at::empty({m, n}, x.options());
  compress::dense(floats(x).data(), weight.const_data_ptr<BFloat16>(), y.data_ptr<BFloat16>(), m, n,
                  k);
  return y;
}

template <typename T, typename Out>
Tensor w8a8_as(const Tensor& x, const Tensor& weight, const Tensor& sums, const Tensor& scales) {
  const int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
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
  const int64_t m = x.size(0), n = words.size(0);
  Tensor y = at::empty({m, n}, x.options());
  compress::wna16(floats(x).data(), as_bytes(words), scales.const_data_ptr<float>(),
                  y.data_ptr<BFloat16>(), m, n, grid_of(words, scales, bits));
  return y;
}

Tensor dequantize(const Tensor& words, const Tensor& scales, int64_t bits) {
  const int64_t n = words.size(0), k = words.size(1) * 32 / bits;
  Tensor out = at::empty({n, k}, scales.options().dtype(at::kBFloat16));
  compress::dequantize(as_bytes(words), scales.const_data_ptr<float>(), out.data_ptr<BFloat16>(), n,
                       grid_of(words, scales, bits));
  return out;
}

TORCH_LIBRARY(compress_cpu, library) {
  library.def("dense(Tensor x, Tensor weight) -> Tensor");
  library.def("w8a8(Tensor x, Tensor weight, Tensor sums, Tensor scales, Tensor? bias) -> Tensor");
  library.def("wna16(Tensor x, Tensor words, Tensor scales, int bits) -> Tensor");
  library.def("dequantize(Tensor words, Tensor scales, int bits) -> Tensor");
}

TORCH_LIBRARY_IMPL(compress_cpu, CPU, library) {
  library.impl("dense", dense);
  library.impl("w8a8", w8a8);
  library.impl("wna16", wna16);
  library.impl("dequantize", dequantize);
}

}  // namespace
