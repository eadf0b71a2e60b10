"""Split-K in one launch: the program of a tile that is last adds up what the others left.

A linear for few tokens has fewer tiles than a GPU has multiprocessors, so several programs share a
tile, each with its part of K. They leave partial sums in a workspace and count themselves at the
tile's lock; the last adds the parts in their order, so that results do not depend on who came when,
and leaves the lock at 0 for the next launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.tiles import LOCKS, Tile


@triton.jit
def add_up(acc, parts_ptr, lock_ptr, tile, split, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Leave `acc` [A, B] as part `split` of `tile`. Returns (sum of parts, whether this was last).

    parts: [tiles, SPLITS, A, B] in the dtype of `acc`. The sum is whole only where this was last.
    """
    A: tl.constexpr = acc.shape[0]
    B: tl.constexpr = acc.shape[1]
    place = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    parts = parts_ptr + tile.to(tl.int64) * (SPLITS * A * B) + place
    tl.store(parts + split * (A * B), acc)
    # All threads' parts are written before one of them counts the program.
    tl.debug_barrier()
    last = tl.atomic_add(lock_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros_like(acc)
        for s in range(SPLITS):
            # Past the L1 cache, which knows nothing of other multiprocessors' writes.
            acc += tl.load(parts + s * (A * B), cache_modifier=".cg")
        tl.store(lock_ptr + tile, 0)
    return acc, last


def new_parts(tile: Tile, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for the parts of an output [m, n]; nothing where K is not split."""
    parts = 0 if tile.SPLITS == 1 else tile.count(m, n) * tile.SPLITS
    return torch.empty(parts * tile.BLOCK_M * tile.BLOCK_N, dtype=dtype, device=device)


def new_locks(device: torch.device) -> Tensor:
    """The locks of one linear, which must not run on two streams at once: int32 zeros."""
    return torch.zeros(LOCKS, dtype=torch.int32, device=device)
