"""What a device can do: published peaks of some GPUs, with the share of them that is reckoned with.

GB, TFLOP and TOP are powers of ten. Peaks are without sparsity, 16 bit with float32 accumulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

CPU = "cpu"
BANDWIDTH_SHARE = 0.7
COMPUTE_SHARE = 0.5
"""Shares of the published peaks that are reckoned with: assumptions, not measurements."""
GPU_BLOCK_SECONDS = 20e-6
"""About ten kernels of a decoder block at 2 microseconds each, as in a CUDA graph: assumed."""
GPU_FORWARD_SECONDS = 500e-6
"""What an engine does on the host for each step: assumed."""
LINK_BYTES_PER_S = 25e9
"""Between two machines, one of which prefills for the other: a network of 200 Gbit/s."""
FUSED = {"norm": 4, "rotation": 4, "product": 6}
"""Bytes that a value moves where each is one kernel, 16 bit in and out; the product reads two."""


class Rate(Protocol):
    """How fast the linears of a kind run, or what is done to each value of a token."""

    def seconds(self, weights: int, size: int, tokens: int) -> float:
        """Of so many `weights` (or values a token) in `size` bytes, for a forward of `tokens`."""
        ...


@dataclass(frozen=True)
class Roofline:
    """The longer of reading the weights and multiplying (Williams et al., 2009)."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, weights: int, size: int, tokens: int) -> float:
        """As in Rate."""
        return max(size / self.bytes_per_s, 2 * tokens * weights / self.flops_per_s)


@dataclass(frozen=True)
class Steady:
    """The same for every value of every token: value_s seconds."""

    value_s: float

    def seconds(self, weights: int, size: int, tokens: int) -> float:
        """As in Rate."""
        return weights * tokens * self.value_s


@dataclass(frozen=True)
class Curve:
    """Measured: seconds a weight at some numbers of tokens, ascending; between them by logarithm,
    and beyond the last in proportion.
    """

    tokens: Sequence[int]
    per_weight: Sequence[float]

    def seconds(self, weights: int, size: int, tokens: int) -> float:
        """As in Rate."""
        last = self.tokens[-1]
        if tokens > last:
            return weights * self.per_weight[-1] * tokens / last
        logs = np.log(self.tokens), np.log(self.per_weight)
        return weights * float(np.exp(np.interp(np.log(tokens), *logs)))


@dataclass(frozen=True)
class Device:
    """Where a model is served; all times in seconds.

    memory: bytes. rates: of linears by kind (16, W8A8, W8A16, W4A16). values: of what is done to
    each value of a token, in place of a weight: a norm with the residual after it, a rotation, and
    the product of gate and up. pair_s: a channel of a query meeting one of a key. kv_s: a byte of
    the KV cache in a decoding step. block_s, forward_s: a block and a forward, however little they
    compute. call_s: by kind, what the call of a quantized linear takes more than that of another.
    source: of these figures.
    """

    name: str
    memory: int
    rates: Mapping[str, Rate]
    values: Mapping[str, Rate]
    pair_s: float
    kv_s: float
    block_s: float
    forward_s: float
    source: str
    call_s: Mapping[str, float] = field(default_factory=dict)


def _gpu(
    name: str, memory_gb: float, gb_per_s: float, tflops: float, tops: float, source: str
) -> Device:
    bandwidth = BANDWIDTH_SHARE * gb_per_s * 1e9
    half, int8 = (COMPUTE_SHARE * peak * 1e12 for peak in (tflops, tops))
    return Device(
        name=name,
        memory=int(memory_gb * 1e9),
        rates={
            **dict.fromkeys(("16", "W8A16", "W4A16"), Roofline(bandwidth, half)),
            "W8A8": Roofline(bandwidth, int8),
        },
        values={work: Steady(size / bandwidth) for work, size in FUSED.items()},
        pair_s=4 / half,  # a product with K and one with V, 2 operations each
        kv_s=1 / bandwidth,
        block_s=GPU_BLOCK_SECONDS,
        forward_s=GPU_FORWARD_SECONDS,
        source=f"peaks from the {source}: {gb_per_s:g} GB/s, of which {BANDWIDTH_SHARE:.0%} are "
        f"reckoned with, {tflops:g} TFLOP/s in 16 bit and {tops:g} TOP/s in INT8, "
        f"{COMPUTE_SHARE:.0%}",
    )


GPUS: Mapping[str, Device] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a10g", 24, 600, 70, 140, "NVIDIA A10G data sheet"),
        _gpu("l4", 24, 300, 121, 242, "NVIDIA L4 data sheet"),
        _gpu("rtx4090", 24, 1008, 165.2, 660.6, "NVIDIA Ada architecture white paper"),
        _gpu("a100", 80, 2039, 312, 624, "NVIDIA A100 80GB SXM data sheet"),
        _gpu("h100", 80, 3350, 989, 1979, "NVIDIA H100 SXM data sheet"),
        _gpu("h200", 141, 4800, 989, 1979, "NVIDIA H200 SXM data sheet"),
    )
}


def first_with(memory: int) -> Device:
    """The first GPU of the table that has so many bytes; the last where none has."""
    return next((gpu for gpu in GPUS.values() if gpu.memory >= memory), GPUS["h200"])
