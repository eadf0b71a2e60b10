"""Weight-only quantization as it is meant: read this first. See the package for the letters."""

import torch
from torch import Tensor

from compress.qtensor import QTensor


def linear(x: Tensor, weight: QTensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`x` [..., K] to [..., N], in float32 throughout and rounded once, to `out_dtype`."""
    y = x.float() @ weight.dequantize(torch.float32).t()
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)
