"""W8A16 and W4A16 on CPU, in bf16: integers as they are read for few tokens, dequantized for many.

Reading a half or a quarter of the bytes of bf16 pays while reading the weight is what takes the
time; from some tokens on, bf16 matrix multiplication is so much faster that dequantizing first
wins. cpu.h does both from the checkpoint's words. Without a compiler ATen's weight-only ops serve,
INT4's from a second copy of the integers, in the op's own order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.kernels import dense
from compress.kernels.native import build
from compress.kernels.native.bias import side_by_side
from compress.qtensor import QuantSpec, dequantize, unpack_int32

# Tokens up to which the product of integers beats dequantizing: crossings measured on one core of
# an AMD EPYC with AVX512-VNNI and BF16, with weights that no cache holds (docs/kernels.md).
FEW_TOKENS = 8
# The same for ATen's ops: 576x1536 and 2048x2048, 2 cores.
ATEN_INT8_MAX_TOKENS = 12
ATEN_INT4_MAX_TOKENS = 96

_INT4_GROUPS = (256, 128, 64, 32)

Product = Callable[[Tensor], Tensor]
"""bf16 [M, K] to [M, N]."""


def prepare(
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    spec: QuantSpec,
    in_features: int,
    dtype: torch.dtype,
) -> Callable[[Tensor], Tensor]:
    """Bind the weight `packed` int32 [N, words], repacked for the op that its shape allows."""
    if dtype == torch.bfloat16:
        if native_takes(in_features, spec) and build.available():
            by_amx = amx_takes(in_features, spec)
            return Packed(packed, weight_scale.float(), spec.bits, bias, by_amx, dense.linear())
        # The int8 op reads K in sixteens: from any other K wrong sums, or memory not its own.
        if spec.bits == 8 and spec.group_size is None and in_features % 16 == 0:
            return _by_tokens(*_aten_int8(packed, weight_scale, in_features), bias)
        group_size = int4_op_group(len(packed), in_features, spec)
        if group_size is not None:
            return _by_tokens(*_aten_int4(packed, weight_scale, in_features, group_size), bias)

    def run(x: Tensor) -> Tensor:
        ints = unpack_int32(packed, spec.bits, in_features)
        return F.linear(x, dequantize(ints, weight_scale, x.dtype), bias)

    return run


def _by_tokens(
    few: Product, up_to: int, many: Product, bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """`few` for up to `up_to` tokens, else `many`; from [..., K] to [..., N], with the bias."""

    def run(x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        y_MN = few(x_MK) if len(x_MK) <= up_to else many(x_MK)
        if bias is not None:
            y_MN += bias
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    return run


def native_takes(k: int, spec: QuantSpec) -> bool:
    """Whether cpu.h reads rows of K elements: whole vectors of 16 bytes in each group."""
    width = spec.group_size or k
    return k % width == 0 and width * spec.bits % 128 == 0


def amx_takes(k: int, spec: QuantSpec) -> bool:
    """Whether amx.h, where the CPU has AMX, dequantizes rows of K elements: by 64."""
    return build.has_amx() and spec.bits == 4 and (spec.group_size or k) % 64 == 0


@dataclass(frozen=True)
class Packed:
    """[..., K] to [..., N] in bf16. weight: the checkpoint's words, int32 [N, words]; scales [N, G]
    in float32; bias [N] or None. by_amx: any number of tokens by amx.h, a token with the same bits
    in any batch; otherwise few by cpu.h, in whose sums the weight is not rounded to bf16, and many
    dequantized, by `linear`. By torch's product, dequantized, where a gradient is asked for.
    """

    weight: Tensor
    scales: Tensor
    bits: int
    bias: Tensor | None
    by_amx: bool
    linear: dense.Linear

    def __call__(self, x: Tensor) -> Tensor:
        ops, x_MK = torch.ops.compress_cpu, x.reshape(-1, x.shape[-1]).contiguous()
        if torch.is_grad_enabled() and x.requires_grad:
            y_MN = F.linear(x_MK, ops.dequantize(self.weight, self.scales, self.bits))
        elif self.by_amx:
            y_MN = ops.w4a16_amx(x_MK, [self.weight], [self.scales])
        elif len(x_MK) <= FEW_TOKENS:
            y_MN = ops.wna16(x_MK, [self.weight], [self.scales], self.bits)
        else:
            weight_NK = ops.dequantize(self.weight, self.scales, self.bits)
            y_MN = self.linear(x_MK, weight_NK, None)
        if self.bias is not None:
            y_MN += self.bias
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])

    @staticmethod
    def joined(parts: "Sequence[Packed]") -> Callable[[Tensor], Tensor] | None:
        """One token [1, K] to the outputs of `parts` side by side, by one product of cpu.h, which
        reads a weight for one token fastest; None where their bits or groups differ.
        """
        if len({(part.bits, part.scales.shape[1]) for part in parts}) > 1:
            return None
        weights, scales = [part.weight for part in parts], [part.scales for part in parts]
        bits, bias = parts[0].bits, side_by_side(parts)

        def run(x: Tensor) -> Tensor:
            y_MN = torch.ops.compress_cpu.wna16(x, weights, scales, bits)
            return y_MN if bias is None else y_MN.add_(bias)

        return run


def int4_op_group(n: int, k: int, spec: QuantSpec) -> int | None:
    """The group size to give to the int4 op for a weight [n, k], or None where it takes none.

    The op knows groups of 32 to 256 and N in sixteens. A larger group, or a whole row, is served as
    several groups with the same scale.
    """
    width = spec.group_size or k
    if spec.bits != 4 or n % 16 or k % width:
        return None
    return next((group for group in _INT4_GROUPS if width % group == 0), None)


def _aten_int8(
    packed: Tensor, weight_scale: Tensor, in_features: int
) -> tuple[Product, int, Product]:
    ints = unpack_int32(packed, 8, in_features)
    scale_bf16 = weight_scale.reshape(-1).to(torch.bfloat16)

    def few(x_MK: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x_MK, ints, scale_bf16)

    def many(x_MK: Tensor) -> Tensor:
        # Integers up to 2^7 are exact in bf16, so the scale can wait for the smaller product.
        return F.linear(x_MK, ints.to(torch.bfloat16)).mul_(scale_bf16)

    return few, ATEN_INT8_MAX_TOKENS, many


def _aten_int4(
    packed: Tensor, weight_scale: Tensor, in_features: int, group_size: int
) -> tuple[Product, int, Product]:
    # The op's integers are 0 to 15 around a zero point of 8, as the words hold them; its pairs are
    # (scale, zero), zero being what is added after scaling: none, as the grid is symmetric. In
    # place, because temporaries of 4 bytes a weight would leave the heap in pieces.
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    unsigned = (packed.unsqueeze(-1) >> shifts).bitwise_and_(15).view(len(packed), in_features)
    op_weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1)
    repeat = in_features // group_size // weight_scale.shape[1]
    scale_GN = weight_scale.repeat_interleave(repeat, dim=1).t().to(torch.bfloat16)
    op_scales = torch.stack([scale_GN, torch.zeros_like(scale_GN)], dim=-1).contiguous()

    def few(x_MK: Tensor) -> Tensor:
        op = torch.ops.aten._weight_int4pack_mm_for_cpu
        return op(x_MK, op_weight, group_size, op_scales)

    def many(x_MK: Tensor) -> Tensor:
        return planar(x_MK) @ dequantize_planar(packed, weight_scale).t()

    return few, ATEN_INT4_MAX_TOKENS, many


def dequantize_planar(packed: Tensor, scales: Tensor) -> Tensor:
    """INT4 words [N, K/8] to bf16 [N, K], columns in the order of `planar`; 4 times as fast.

    0x4300 is 128 in bf16 with the units in its lowest mantissa bit, so 0x4300 | nibble is
    128 + nibble: one shift and one mask make two bf16 values, nibbles j and j + 4 of the word, with
    no conversion. Subtracting 136 takes off the 128 and the stored offset of 8.
    """
    n, words = packed.shape
    shifts = torch.arange(0, 16, 4, dtype=torch.int32)
    pairs = (packed.unsqueeze(-1) >> shifts).bitwise_and_(0x000F000F).bitwise_or_(0x43004300)
    values = pairs.view(torch.bfloat16).view(n, scales.shape[1], -1)
    return values.sub_(136).mul_(scales.to(torch.bfloat16).unsqueeze(-1)).view(n, words * 8)


def planar(x_MK: Tensor) -> Tensor:
    """Columns 8i + 4h + j put at 8i + 2j + h, to meet `dequantize_planar`."""
    m, k = x_MK.shape
    return x_MK.view(m, k // 8, 2, 4).transpose(2, 3).reshape(m, k)
