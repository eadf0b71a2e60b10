"""What float16 cannot hold: activations, weights and scales, found before they are served.

float16 ends at 65504 and loses precision below 2^-14; bfloat16 has the range of float32. Beyond
the end is Inf, and NaN soon after. Calibration runs in float32, where all of it shows as numbers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from compress.algorithms.blockwise import divide_outputs
from compress.algorithms.rtn import SMALLEST_SCALE, scales_for
from compress.blocks.collector import load_block_statistics
from compress.blocks.structure import Feed, feeds, stored_name
from compress.errors import UserError
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.soundness import CHUNK
from compress.tensors import TensorFiles

LARGEST = torch.finfo(torch.float16).max
SMALLEST = torch.finfo(torch.float16).smallest_normal
HEADROOM = 4
"""How far below the end activations of the calibration text should stay, for other texts."""
SMALL_SCALES = 0.01
"""Share of a linear's scales that may lie below SMALLEST, where they are raised to it."""
WAY_OUT = "model.dtype=bfloat16 holds it"


def into_range(largest: float) -> float:
    """The power of two that divides activations up to `largest` into range.

    It loses nothing in float32. A weight that it leaves below SMALLEST is stored in float16 with
    fewer bits, at most 2^-25 off; a scale there is raised to SMALLEST. The power is 1 where
    activations are within LARGEST / HEADROOM and not below SMALLEST altogether.
    """
    if largest > LARGEST / HEADROOM:
        return 2.0 ** math.ceil(math.log2(largest * HEADROOM / LARGEST))
    if 0 < largest < SMALLEST:
        return 2.0 ** math.floor(math.log2(largest))
    return 1.0


@dataclass(frozen=True)
class Scaling:
    """What a linear hands to `feed.targets` reaches `largest`, and is divided by `factor`."""

    feed: Feed
    largest: float
    factor: float


def scalings(
    config: PretrainedConfig, block: nn.Module, statistics: Mapping[str, Tensor]
) -> list[Scaling]:
    """What linears hand to linears inside a block of the model out of the range of float16.

    statistics: `<name>.output_absmax` [N] and `<name>.input_absmax` [] by names in the block, of
    whose weights the shapes are looked at alone.
    """
    found = []
    for feed in _between_linears(config, block):
        outputs = statistics[f"{feed.source}.output_absmax"][_rows(feed)]
        inputs = [float(statistics[f"{name}.input_absmax"]) for name in feed.targets]
        largest = max(float(outputs.max()), *inputs)
        if into_range(largest) != 1.0:
            found.append(Scaling(feed, largest, into_range(largest)))
    return found


def scale_into_range(
    config: PretrainedConfig, block: nn.Module, statistics: dict[str, Tensor]
) -> None:
    """Do what `scalings` finds, in place: weights before are divided by a power of two and those
    after multiplied by it, so that the block's result stays (as far as `into_range` says).

    statistics: as there; `mean_abs` [K] and `rows` [R, K] of what is read follow.
    """
    for scaling in scalings(config, block, statistics):
        feed, factor = scaling.feed, scaling.factor
        first = block.get_parameter(f"{feed.targets[0]}.weight")
        scales = first.new_full(first.shape[1:], factor)
        divide_outputs(block.get_submodule(feed.source), scales, feed, torch.float16)
        for name in feed.targets:
            block.get_parameter(f"{name}.weight").mul_(factor)
            for key in ("mean_abs", "rows"):
                statistics[f"{name}.{key}"] = statistics[f"{name}.{key}"] / factor


def scaling_notes(model: BlockModel, folder: Path) -> list[str]:
    """What `scale_into_range` will do by the statistics in `folder`, in words."""
    return [
        f"{name}.{scaling.feed.source} reaches {scaling.largest:.3g}: divided by "
        f"{scaling.factor:g}, which what reads it makes up for, to stay within float16"
        for name, block, statistics in _blocks(model, folder)
        for scaling in scalings(model.config, block, statistics)
    ]


def largest_left(model: BlockModel, folder: Path) -> float:
    """The largest activation by the statistics in `folder` that `scale_into_range` does not bring
    into range.
    """
    found = _blocks(model, folder)
    return max(size for _, block, s in found for *_, size in _left(model.config, block, s))


def refuse_overflow(
    config: PretrainedConfig, name: str, block: nn.Module, statistics: Mapping[str, Tensor]
) -> None:
    """Raise UserError where the block `name` overflows in float16 and no scale helps.

    statistics: `output_absmax` [] of the block, `<name>.output_absmax` [N] and
    `<name>.input_absmax` [] of its linears, by names in the block. What `scale_into_range` scales
    is left to it.
    """
    for linear, what, largest in _left(config, block, statistics):
        if largest > LARGEST:
            raise UserError(
                f"{f'{name}.{linear}'.rstrip('.')}: its {what} reaches {largest:.3g} on the "
                f"calibration text; float16 ends at {LARGEST:g}: {WAY_OUT}"
            )


def refuse_large_weights(tensors: TensorFiles) -> None:
    """Raise UserError for a weight that float16 cannot hold."""
    for name, (_, dtype) in tensors.shapes().items():
        if dtype == torch.float16 or not dtype.is_floating_point:
            continue
        largest = max(float(part.abs().max()) for _, part in tensors.chunks(name, CHUNK))
        if largest > LARGEST:
            raise UserError(f"{name} holds {largest:.3g}; float16 ends at {LARGEST:g}: {WAY_OUT}")


def small_scales(model: BlockModel, names: Iterable[str], spec: QuantSpec) -> dict[str, str]:
    """Of the linears `names` those whose scales float16 cannot hold, each with the reason.

    A scale below SMALLEST is stored as SMALLEST, which makes the steps of its weights coarser than
    was asked for. Groups of zeros have no scale to lose.
    """
    kept = {}
    for name in names:
        weight = model.tensors[stored_name(model.config, f"{name}.weight")]
        scales = scales_for(weight, spec)
        lost = (scales < SMALLEST) & (scales > SMALLEST_SCALE)
        if float(lost.float().mean()) > SMALL_SCALES:
            kept[name] = f"its scales are below float16's {SMALLEST:.1e}; {WAY_OUT}"
    return kept


def remark(largest: float, dtype: torch.dtype) -> str | None:
    """Words for activations that come near the end of float16, or pass it; None below."""
    if dtype == torch.float16 and largest > LARGEST / HEADROOM:
        return (
            f"activations reach {largest:.3g} of the {LARGEST:g} that float16 holds; text unlike "
            f"the calibration text may overflow: {WAY_OUT}"
        )
    if dtype != torch.float16 and largest > LARGEST:
        return (
            f"activations reach {largest:.3g}: float16, which ends at {LARGEST:g}, cannot serve it"
        )
    return None


def _left(
    config: PretrainedConfig, block: nn.Module, statistics: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, float]]:
    """The largest input and output of each linear of a block, and the block's own largest output
    (of ""), but for what `scale_into_range` brings into range.
    """
    between = _between_linears(config, block)
    scaled = {feed.source: _rows(feed) for feed in between}
    eased = {name for feed in between for name in feed.targets}
    for key, absmax in statistics.items():
        linear, _, statistic = key.rpartition(".")
        if statistic == "output_absmax":
            left = absmax.clone()
            if linear in scaled:
                left[scaled[linear]] = 0
            yield linear, "output", float(left.max())
        elif statistic == "input_absmax" and linear not in eased:
            yield linear, "input", float(absmax)


def _blocks(
    model: BlockModel, folder: Path
) -> Iterator[tuple[str, nn.Module, Mapping[str, Tensor]]]:
    """Every block with its name, and its statistics in `folder` by names in the block."""
    for index, block in enumerate(model.blocks):
        name = model.block_name(index)
        found = load_block_statistics(folder, index)
        yield name, block, {key.removeprefix(f"{name}."): value for key, value in found.items()}


def _between_linears(config: PretrainedConfig, block: nn.Module) -> list[Feed]:
    found = feeds(config, block)
    return [feed for feed in found if isinstance(block.get_submodule(feed.source), nn.Linear)]


def _rows(feed: Feed) -> slice | list[int]:
    return slice(None) if feed.rows is None else list(feed.rows)
