"""Quantized weights as plain data: what a spec says, what a tensor holds, how it is packed.

Shapes: N output channels, K input channels, G scales a row (1 per channel, or K / group_size).
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

SCHEME = re.compile(r"W([48])A(8|16)(?: ?g(\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class QuantSpec:
    """How a linear layer is quantized: symmetric integers, one scale a row or a group of a row.

    `QuantSpec(8, activation_bits=8)` is W8A8: INT8 weights per channel, INT8 activations per token,
    quantized as they arrive. `QuantSpec(4, group_size=64)` is W4A16 in groups of 64.
    """

    bits: int
    group_size: int | None = None
    activation_bits: int | None = None

    @property
    def scheme(self) -> str:
        """The field's name for it: `W8A8`, `W8A16`, `W4A16 g64`."""
        group = f" g{self.group_size}" if self.group_size else ""
        return f"W{self.bits}A{self.activation_bits or 16}{group}"

    @property
    def qmin(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def groups(self, in_features: int) -> int:
        """Scales a row. Raises ValueError where the group size does not divide `in_features`."""
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise ValueError(f"group size {self.group_size} does not divide {in_features}")
        return in_features // self.group_size


def parse_scheme(text: str) -> QuantSpec | None:
    """The inverse of `QuantSpec.scheme`; None for what does not read as one."""
    found = SCHEME.fullmatch(text)
    if found is None:
        return None
    bits, activations, group = int(found[1]), int(found[2]), found[3]
    return QuantSpec(bits, int(group) if group else None, None if activations == 16 else 8)


@dataclass(frozen=True)
class QTensor:
    """A quantized weight: `ints` int8 [N, K], `scales` [N, G] in the model's dtype."""

    ints: Tensor
    scales: Tensor
    spec: QuantSpec

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that the integers stand for, [N, K]: ints times the scale of their group."""
        return dequantize(self.ints, self.scales, dtype)


def quantize(weight: Tensor, scales: Tensor, spec: QuantSpec) -> Tensor:
    """Round `weight` [N, K] to the grid of `scales` [N, G]: int8 [N, K] in [qmin, qmax].

    Half-way cases go to the even integer (torch.round). Arithmetic is float32, whatever comes in,
    and the scale is divided by as it will be stored.
    """
    n, k = weight.shape
    grouped = weight.float().reshape(n, scales.shape[1], -1)
    steps = torch.round(grouped / scales.float().unsqueeze(-1))
    return steps.clamp_(spec.qmin, spec.qmax).to(torch.int8).reshape(n, k)


def dequantize(ints: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Integers [N, K] times their scales [N, G], multiplied in float32 and cast once."""
    n, k = ints.shape
    grouped = ints.reshape(n, scales.shape[1], -1).float() * scales.float().unsqueeze(-1)
    return grouped.reshape(n, k).to(dtype)


def pack_int32(ints: Tensor, bits: int) -> Tensor:
    """Pack int8 [N, K] into int32 [N, ceil(K * bits / 32)], the compressed-tensors layout.

    Each value is stored as value + 2^(bits-1); element i of a word sits at bit `bits * i`, lowest
    first. A row that does not fill its last word is padded with stored zeros. `bits` is 4 or 8.
    """
    unsigned = ints.view(torch.uint8) + (1 << (bits - 1))  # wraps as wanted
    fields = torch.nn.functional.pad(unsigned, (0, -ints.shape[1] % (32 // bits)))
    if bits == 4:
        fields = fields[:, 0::2] | (fields[:, 1::2] << 4)
    return fields.contiguous().view(torch.int32)


def unpack_int32(packed: Tensor, bits: int, in_features: int) -> Tensor:
    """The inverse of `pack_int32`: int8 [N, in_features]."""
    fields = packed.contiguous().view(torch.uint8)
    if bits == 4:
        fields = torch.stack((fields & 15, fields >> 4), dim=-1).flatten(1)
    return (fields[:, :in_features] - (1 << (bits - 1))).view(torch.int8)
