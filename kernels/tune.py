"""Measure which tile is fastest, shape by shape, and keep it for the launches to come.

    python -m compress.kernels.tune --shapes 4096x4096 [...] [--tokens 1 64 2048] [--kernels w8a8]

Nothing is tuned while requests wait: without this command the shipped tiles are taken. The space is
what they leave open: three tiles a regime, and K in more parts or fewer. W4A16 is measured in
groups of 128, and other groups take the tile that won.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.kernels.bench import (
    copies,
    copy_of,
    median_us,
    random_weight,
    rotating,
    run,
    shape_of,
    tokens_of,
)
from compress.kernels.check import MAX_RELATIVE_ERROR, reference_linear, relative_error
from compress.kernels.quantize import triton as quantize
from compress.kernels.roofline import weight_bytes
from compress.kernels.splits import new_locks
from compress.kernels.tiles import LOCKS, Gpu, Tile, bucket, gpu_of, space
from compress.kernels.tuned import cache_file, keep, key
from compress.kernels.w8a8 import triton as w8a8
from compress.kernels.wna16 import triton as wna16
from compress.kernels.wna16.planar import to_planar
from compress.qtensor import QTensor, QuantSpec, pack_int32

SPECS = {
    "w8a8": QuantSpec(8, activation_bits=8),
    "w8a16": QuantSpec(8),
    "w4a16": QuantSpec(4, 128),
}


def candidates(kernel: str, m: int, n: int, k: int, gpu: Gpu) -> Iterator[Tile]:
    """The tiles worth measuring for an output [m, n]: K is split while programs are few."""
    for tile in space(kernel, m, gpu):
        yield tile
        tiles = tile.count(m, n)
        for parts in (2, 4, 8, 16):
            few = tiles * parts <= 8 * gpu.multiprocessors
            if few and tiles <= LOCKS and k // parts >= 512:
                yield replace(tile, SPLITS=parts)


def launch(weight: QTensor, x_MK: Tensor, y_MN: Tensor) -> Callable[[Tile], None]:
    """A function that writes x @ weight^T into `y_MN` by a given tile."""
    locks, spec = new_locks(x_MK.device), weight.spec
    if spec.activation_bits is not None:
        q, scale = quantize.per_token(x_MK)
        return lambda tile: w8a8.gemm(q, scale, weight.ints, weight.scales, None, locks, y_MN, tile)
    words = to_planar(pack_int32(weight.ints, spec.bits), spec.bits, spec.group_size)
    return lambda tile: wna16.gemm(
        x_MK,
        words,
        weight.scales,
        None,
        locks,
        y_MN,
        bits=spec.bits,
        group_size=spec.group_size,
        tile=tile,
    )


def fastest(kernel: str, m: int, n: int, k: int, device: torch.device) -> tuple[Tile, float]:
    """The tile that takes the fewest microseconds, and these; a wrong product is an error."""
    weight = random_weight(n, k, SPECS[kernel], str(device), torch.bfloat16)
    x = torch.randn((m, k), device=device, dtype=torch.bfloat16)
    y = torch.empty((m, n), device=device, dtype=torch.bfloat16)
    number = copies(weight_bytes(n, k, weight.spec), device)
    runs = [launch(copy_of(weight), x, y) for _ in range(number)]
    expected = reference_linear(x, weight)
    times: dict[Tile, float] = {}
    for tile in candidates(kernel, m, n, k, gpu_of(device)):
        y.fill_(float("nan"))
        runs[0](tile)
        if (error := relative_error(y, expected)) > MAX_RELATIVE_ERROR:
            raise RuntimeError(f"{kernel} {m}x{n}x{k} with {tile} is off by {error:.3g}")
        turns = rotating([partial(run, tile) for run in runs])
        (times[tile],) = median_us({"": turns}, device).values()
    best = min(times, key=lambda tile: times[tile])
    return best, times[best]


@torch.inference_mode()
def main() -> None:
    """Measure, print, and keep each result as soon as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=shape_of, required=True)
    parser.add_argument("--tokens", nargs="+", type=tokens_of, default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--kernels", nargs="+", choices=list(SPECS), default=list(SPECS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "tiles are measured on a GPU; found none, and on CPU no tiles are used\n")
    device = torch.device("cuda", torch.cuda.current_device())
    file = cache_file(gpu_of(device))
    for n, k in options.shapes:
        for m in sorted({bucket(tokens) for tokens in options.tokens}):
            for kernel in options.kernels:
                tile, microseconds = fastest(kernel, m, n, k, device)
                keep(file, {key(kernel, m, n, k): tile})
                sys.stdout.write(f"{kernel} {m}x{n}x{k}: {tile}, {microseconds:.1f} us\n")
    sys.stdout.write(f"kept in {file}\n")


if __name__ == "__main__":
    run(main)
