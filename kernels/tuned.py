"""Tiles that `compress.kernels.tune` measured, kept on disk, and taken before the shipped ones.

A file belongs to one GPU, one version of torch (which fixes Triton's), and one text of the kernels;
others read none of it. A shape that is not in the file gets the shipped tile.
"""

import functools
import hashlib
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import torch

from compress.errors import UserError
from compress.kernels.tiles import LOCKS, Gpu, Tile, bucket, default_tile, gpu_of

VARIABLE = "COMPRESS_CACHE"
KERNELS = ("splits.py", "w8a8/triton.py", "wna16/triton.py", "wna16/planar.py")


def cache_folder() -> Path:
    """Where what was made for a machine is kept: $COMPRESS_CACHE, else ~/.cache/compress.

    Raises RuntimeError where there is no home folder.
    """
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "compress")


def cache_file(gpu: Gpu) -> Path:
    """Where the tiles of `gpu` lie."""
    here = Path(__file__).parent
    texts = b"".join((here / name).read_bytes() for name in KERNELS)
    versions = f"torch{torch.__version__}-{hashlib.sha256(texts).hexdigest()[:12]}"
    return cache_folder() / "tiles" / f"{re.sub(r'[^A-Za-z0-9]+', '_', gpu.name)}-{versions}.json"


def key(kernel: str, m: int, n: int, k: int) -> str:
    """The name of a shape in the file: tokens in their bucket."""
    return f"{kernel} {bucket(m)}x{n}x{k}"


@functools.cache
def table(file: Path) -> dict[str, Tile]:
    """The tiles in `file`, none where it is missing. Raises UserError where it does not read."""
    if not file.exists():
        return {}
    try:
        return {name: Tile(**tile) for name, tile in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: no table of tiles ({error}); delete it") from error


def keep(file: Path, tiles: dict[str, Tile]) -> None:
    """Add `tiles` to what `file` holds, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {name: asdict(tile) for name, tile in (table(file) | tiles).items()}, indent=1
    )
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(text)
    aside.replace(file)
    forget()


def forget() -> None:
    """Read the file again at the next launch."""
    table.cache_clear()
    _tile_for.cache_clear()


def tile_for(kernel: str, m: int, n: int, k: int, steps: int, device: torch.device) -> Tile:
    """The measured tile of a launch, else the shipped one; K takes `steps` steps of the kernel."""
    tile = _tile_for(kernel, bucket(m), n, k, steps, device)
    # The last bucket has no end: more tokens may be more tiles than there are locks.
    if tile.SPLITS > 1 and tile.count(m, n) > LOCKS:
        return replace(tile, SPLITS=1)
    return tile


@functools.cache
def _tile_for(kernel: str, m: int, n: int, k: int, steps: int, device: torch.device) -> Tile:
    gpu = gpu_of(device)
    try:
        measured = table(cache_file(gpu)).get(key(kernel, m, n, k))
    except RuntimeError:  # no home folder, so nothing was kept
        measured = None
    return measured or default_tile(kernel, m, n, steps, gpu)
