"""W8A8 linear: INT8 weights per channel times activations quantized to INT8 per token.

    x_MK  ->  q_MK int8, s_M        s = absmax / 127 of each row, q = round(x / s)
    q_MK, w_NK  ->  acc_MN int32    exact
    y_MN = acc * s_M * w_scale_N + bias_N

M tokens, N output channels, K input channels. `reference.py` is the truth; `cpu.py` and
`triton.py` must agree with it.
"""

from collections.abc import Callable

from torch import Tensor

from compress.kernels.w8a8 import reference

__all__ = ["prepare", "reference"]


def prepare(
    weight: Tensor, weight_scale: Tensor, bias: Tensor | None, backend: str
) -> Callable[[Tensor], Tensor]:
    """A function [..., K] -> [..., N] in the input's dtype that runs on `backend`.

    weight: int8 [N, K]. weight_scale: [N, 1]. bias: [N] or None. The weight is not copied.
    """
    if backend == "cpu":
        from compress.kernels.w8a8 import cpu

        return cpu.prepare(weight, weight_scale, bias)
    if backend == "triton":
        from compress.kernels.w8a8 import triton

        return triton.prepare(weight, weight_scale, bias)
    return lambda x: reference.linear(x, weight, weight_scale, bias, x.dtype)
