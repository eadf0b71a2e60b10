"""W8A16 and W4A16 linear: INT8 or INT4 weights, dequantized on the way into a 16-bit product.

    y_MN = x_MK @ (q_NK * scale_NG)^T + bias_N

M tokens, N output channels, K input channels, G scales a row: one (per channel), or K / group size.
The weight comes as in the checkpoint, `packed` int32 [N, ceil(K * bits / 32)]: each value stored as
value + 2^(bits-1), element i of a word at bit `bits * i`. Triton's kernels want the words in
another order (`planar`), into which a weight is put once. `reference.py` is the truth.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compress.kernels.wna16 import reference
from compress.qtensor import QTensor, QuantSpec, unpack_int32

__all__ = ["prepare", "reference"]


def prepare(
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    spec: QuantSpec,
    in_features: int,
    backend: str,
    dtype: torch.dtype,
) -> Callable[[Tensor], Tensor]:
    """A function [..., K] -> [..., N] in the input's dtype that runs on `backend`.

    packed: int32 words, for triton in planar order. weight_scale: [N, G]. bias: [N] or None. dtype:
    of the inputs to come; a backend may need it to repack the weight, which it does here, once.
    """
    if backend == "cpu":
        from compress.kernels.wna16 import cpu

        return cpu.prepare(
            packed, weight_scale, bias, spec=spec, in_features=in_features, dtype=dtype
        )
    if backend == "triton":
        from compress.kernels.wna16 import triton

        return triton.prepare(packed, weight_scale, bias, spec=spec)

    def run(x: Tensor) -> Tensor:
        ints = unpack_int32(packed, spec.bits, in_features)
        return reference.linear(x, QTensor(ints, weight_scale, spec), bias, x.dtype)

    return run
