"""Which tile a launch takes: by shape and GPU, or as measured (`compress.kernels.tune`).

A linear of M tokens, N output and K input channels is in one of three regimes: decode, bound by
reading the weight; prefill, bound by arithmetic; and what lies between.
"""

import functools
from dataclasses import dataclass, replace

import torch

DECODE_TOKENS = 16
MIDDLE_TOKENS = 256
LOCKS = 1024
"""Tiles that may share K among programs, at most: the length of a linear's locks (`splits`)."""


@dataclass(frozen=True)
class Tile:
    """BLOCK_M tokens by BLOCK_N output channels, K in SPLITS parts; and how it is compiled."""

    BLOCK_M: int
    BLOCK_N: int
    SPLITS: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    """Registers a thread, at most; None: as the compiler likes."""

    def count(self, m: int, n: int) -> int:
        """Tiles of an output [m, n]."""
        return -(-m // self.BLOCK_M) * -(-n // self.BLOCK_N)

    def arguments(self) -> dict[str, int]:
        """Of a launch, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Gpu:
    """What a choice of tiles depends on; capability: 80 for NVIDIA's 8.0, 0 for other makers'."""

    name: str
    capability: int
    multiprocessors: int


A100 = Gpu("NVIDIA A100-SXM4-80GB", 80, 108)


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a device; an A100 stands in for what is none (Triton's interpreter)."""
    if device.type not in ("cuda", "xpu"):
        return A100
    properties = torch.get_device_module(device).get_device_properties(device)
    if device.type == "xpu":
        return Gpu(properties.name, 0, properties.max_compute_units)
    # AMD's major and minor are of another series.
    capability = 0 if torch.version.hip else 10 * properties.major + properties.minor
    return Gpu(properties.name, capability, properties.multi_processor_count)


def regime(m: int) -> str:
    """`decode`, `middle` or `prefill`, for `m` tokens."""
    if m <= DECODE_TOKENS:
        return "decode"
    return "middle" if m <= MIDDLE_TOKENS else "prefill"


def bucket(m: int) -> int:
    """The power of two from `m` on, 16 at least and 4096 at most: what tiles are chosen for."""
    return min(4096, max(DECODE_TOKENS, 1 << (m - 1).bit_length()))


def splits(tiles: int, steps: int, gpu: Gpu) -> int:
    """Parts of K, a power of two: for two programs a multiprocessor, each of two steps at least."""
    parts = 1
    while parts * tiles < 2 * gpu.multiprocessors and 4 * parts <= steps and tiles <= LOCKS:
        parts *= 2
    return parts


def default_tile(kernel: str, m: int, n: int, steps: int, gpu: Gpu) -> Tile:
    """The tile that is shipped for `kernel`: w8a8, w8a16 or w4a16. K takes it `steps` steps."""
    first = space(kernel, m, gpu)[0]
    return replace(first, SPLITS=splits(first.count(m, n), steps, gpu))


def space(kernel: str, m: int, gpu: Gpu) -> list[Tile]:
    """What tuning tries for `m` tokens, K unsplit; the default is first."""
    tiles = _W8A8 if kernel == "w8a8" else _WNA16
    # 256 channels want the registers and the shared memory of Hopper.
    fitting = [t for t in tiles[regime(m)] if t.BLOCK_N < 256 or gpu.capability == 90]
    # Other makers' compilers take no limit of registers.
    return fitting if gpu.capability else [replace(t, maxnreg=None) for t in fitting]


_W8A8 = {
    "decode": [Tile(16, 64, 1, 4, 5), Tile(16, 32, 1, 4, 6), Tile(16, 128, 1, 4, 4)],
    "middle": [Tile(64, 64, 1, 4, 4), Tile(32, 64, 1, 4, 4), Tile(128, 64, 1, 4, 3)],
    "prefill": [Tile(128, 256, 1, 8, 3), Tile(128, 128, 1, 8, 3), Tile(128, 64, 1, 4, 4)],
}
# Weight-only prefill has two accumulators where groups are scaled: 128 x 128 would spill. At decode
# ptxas aims at 72 registers for sm_86 and sm_89, and spills, unless told that 128 are fine.
_WNA16 = {
    "decode": [
        Tile(16, 64, 1, 4, 4, maxnreg=128),
        Tile(16, 32, 1, 2, 4, maxnreg=128),
        Tile(16, 128, 1, 8, 4, maxnreg=128),
    ],
    "middle": [Tile(64, 64, 1, 4, 3), Tile(32, 64, 1, 4, 4), Tile(64, 128, 1, 8, 3)],
    "prefill": [Tile(64, 128, 1, 8, 3), Tile(64, 128, 1, 8, 2), Tile(128, 64, 1, 8, 2)],
}
