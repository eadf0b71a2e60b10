"""W8A8 on CPU: cpu.h for a few tokens, `torch._int_mm` (oneDNN: VNNI or AMX) for more.

Where the CPU has AMX, amx.h takes any number in bf16. In float32 the others give the bits of the
reference. Without a compiler `_int_mm` has all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.kernels.native import build
from compress.kernels.native.bias import side_by_side
from compress.kernels.w8a8 import reference

# Tokens up to which cpu.h is faster than oneDNN, which multiplies by AMX or by VNNI: measured on
# one core of a Xeon, and on an EPYC with torch's operations around oneDNN's product, with weights
# that no cache holds (docs/kernels.md). The bits are the same.
FEW_TOKENS = 4 if build.has("amx_int8") else 16
# One dimension, so that bf16 divided by it promotes to float32, which a Python number would not.
_STEPS = torch.tensor([127.0])


def prepare(
    weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Bind the weight, as a view: `_int_mm` is fastest at small M on the transposed [N, K]."""
    if weight.shape[1] == 1:
        # `_int_mm` of torch 2.13 takes one input channel and gives garbage.
        return lambda x: reference.linear(x, weight, weight_scale, bias, x.dtype)
    scales_N = weight_scale.float().reshape(-1)
    by_torch = partial(linear, weight_KN=weight.t(), scale_N=scales_N, bias=bias)
    if not build.available():
        return by_torch
    # Activations come to the product with 128 added: unsigned. `sum` would first make int32 of the
    # weight, and of such temporaries the heap kept up to three times the model.
    ones_K1 = torch.ones((weight.shape[1], 1), dtype=torch.int8)
    sums_N = torch._int_mm(weight, ones_K1).view(-1).mul_(128)
    bias_N = None if bias is None else bias.float()
    return Int8(weight, sums_N, scales_N, bias_N, by_torch, build.has_amx())


@dataclass(frozen=True)
class Int8:
    """[..., K] to [..., N] by amx.h, or by cpu.h, or for many tokens by `_int_mm` between two
    passes of it: all with the same bits, but that amx.h has no subnormal numbers.

    weight int8 [N, K]; scales and bias [N] in float32; sums [N]: 128 times those of the rows.
    by_torch: the same without cpu.h, for inputs that are neither bf16 nor float32.
    amx: whether bf16 goes by amx.h.
    """

    weight: Tensor
    sums: Tensor
    scales: Tensor
    bias: Tensor | None
    by_torch: Callable[[Tensor], Tensor]
    amx: bool

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.bfloat16, torch.float32):
            return self.by_torch(x)
        x_MK = x.reshape(-1, x.shape[-1]).contiguous()
        if x.dtype == torch.bfloat16 and self.amx:
            y_MN = self.by_amx(x_MK)
        else:
            y_MN = self.few(x_MK) if len(x_MK) <= FEW_TOKENS else self.many(x_MK)
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    def by_amx(self, x_MK: Tensor) -> Tensor:
        """As one operator, bf16 alone."""
        op = torch.ops.compress_cpu.w8a8_amx
        return op(x_MK, [self.weight], [self.sums], [self.scales], self.bias)

    def few(self, x_MK: Tensor) -> Tensor:
        """As one operator."""
        op = torch.ops.compress_cpu.w8a8
        return op(x_MK, [self.weight], [self.sums], [self.scales], self.bias)

    def many(self, x_MK: Tensor) -> Tensor:
        """As three, with oneDNN's product in the middle."""
        ops = torch.ops.compress_cpu
        dtype = x_MK.dtype if self.bias is None else torch.float32
        q_MK, scales_M = ops.quantize(x_MK)
        sums_MN = torch._int_mm(q_MK, self.weight.t())
        y_MN = ops.rescale(sums_MN, self.scales, scales_M, dtype)
        return y_MN if self.bias is None else y_MN.add_(self.bias).to(x_MK.dtype)

    @staticmethod
    def joined(parts: "Sequence[Int8]") -> Callable[[Tensor], Tensor]:
        """One token [1, K] to the outputs of `parts` side by side, quantized once."""
        weights, sums = [part.weight for part in parts], [part.sums for part in parts]
        scales = [part.scales for part in parts]
        bias = side_by_side(parts)
        few = torch.ops.compress_cpu.w8a8
        by_amx = torch.ops.compress_cpu.w8a8_amx if parts[0].amx else few

        def run(x: Tensor) -> Tensor:
            op = by_amx if x.dtype == torch.bfloat16 else few
            return op(x, weights, sums, scales, bias)

        return run


def quantize_per_token(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference, but the integers of a row of zeros are unspecified (its scale is 0)."""
    scale_M1 = x_MK.abs().amax(-1, True) / _STEPS
    return (x_MK / scale_M1).round_().clamp_(-127, 127).to(torch.int8), scale_M1


def linear(x: Tensor, *, weight_KN: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., K] to [..., N] in the dtype of `x`, by torch alone.

    Each ATen call takes one to three microseconds, so there are few: no guard for a row of zeros
    (0 / 0 becomes some integer, which its scale of 0 wipes out), and the last multiplication casts
    to the output's dtype by writing into it.
    """
    q_MK, scale_M1 = quantize_per_token(x.reshape(-1, x.shape[-1]))
    acc_MN = torch._int_mm(q_MK, weight_KN) * scale_N
    y_MN = torch.empty(acc_MN.shape, dtype=x.dtype)
    if bias is None:
        torch.mul(acc_MN, scale_M1, out=y_MN)
    else:
        torch.add(acc_MN.mul_(scale_M1), bias, out=y_MN)
    return y_MN.view(*x.shape[:-1], y_MN.shape[1])
