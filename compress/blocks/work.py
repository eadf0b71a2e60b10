"""One block on its way to integers: smoothed, clipped, rounded, and what became of its linears."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress import checkpoint, guards
from compress.algorithms.blockwise import (
    LayerReport,
    clip_of,
    error_of_rtn,
    report_on,
    smooth_block,
    weight_of,
)
from compress.algorithms.gptq import gptq
from compress.algorithms.learned import RoundingLinear, learn, relative_error
from compress.algorithms.rtn import rtn
from compress.blocks.hessians import factored
from compress.blocks.streams import FULL, QUANTIZED, CalibrationStreams, swapped
from compress.blocks.structure import feeds
from compress.clock import Clock
from compress.log import logger
from compress.model import BlockModel
from compress.qtensor import QTensor, QuantSpec
from compress.training.trainable import ScaleLinear


@dataclass(frozen=True)
class BlockWork:
    """What is done to block `index` of `model`.

    specs: how each linear of the model that is quantized is, by its full name. dtype: of what is
    stored beside integers. smooth, clip, rounding, steps, rate: as in `stages.quantize.Quantize`.
    """

    model: BlockModel
    index: int
    specs: Mapping[str, QuantSpec]
    dtype: torch.dtype
    seed: int
    clock: Clock
    smooth: bool
    clip: bool
    rounding: str
    steps: int
    rate: float

    def run(
        self, statistics: Mapping[str, Tensor], streams: CalibrationStreams | None
    ) -> tuple[dict[str, Tensor], list[LayerReport]]:
        """The block's tensors as the checkpoint holds them, and what was done to its linears."""
        prefix = f"{self.model.block_name(self.index)}."
        local = {n.removeprefix(prefix): t.to(self.model.device) for n, t in statistics.items()}
        specs = {n.removeprefix(prefix): s for n, s in self.specs.items() if n.startswith(prefix)}
        dtype = self.dtype
        with ExitStack() as stack:
            with self.clock.part("reading"):
                block = stack.enter_context(self.model.block(self.index))
            if streams is not None and streams.targets:
                with self.clock.part("forward"):
                    streams.advance(FULL, block, self.index)
            if dtype == torch.float16:
                guards.scale_into_range(self.model.config, block, local)
            with self.clock.part("reporting"):
                errors_rtn = {
                    name: error_of_rtn(weight_of(block, name), local[f"{name}.rows"], spec, dtype)
                    for name, spec in specs.items()
                }
            divided: dict[str, Tensor] = {}
            strengths: dict[str, float] = {}
            if self.smooth:
                found = feeds(self.model.config, block)
                with self.clock.part("search"):
                    divided, strengths = smooth_block(block, found, local, specs, dtype)
            tensors, weights = {}, {f"{name}.weight" for name in specs}
            for name, stored in block.state_dict().items():
                if name not in weights:
                    tensors[prefix + name] = cast(stored, dtype)
                    stored.copy_(tensors[prefix + name])  # what comes next is made for this
            rounded, dampings = self._round(block, specs, local, divided, streams)
            reports = []
            for name, weight in rounded.items():
                tensors |= checkpoint.pack(prefix + name, weight)
                with self.clock.part("reporting"):
                    reports.append(
                        report_on(
                            prefix + name,
                            errors_rtn[name],
                            weight_of(block, name),
                            weight,
                            local[f"{name}.rows"],
                            divided.get(name),
                            strengths.get(name),
                            dtype,
                            dampings.get(name),
                        )
                    )
            if streams is not None:
                served = {n: ScaleLinear(q, _bias_of(block, n)) for n, q in rounded.items()}
                with self.clock.part("forward"), swapped(block, served):
                    streams.advance(QUANTIZED, block, self.index)
        return tensors, reports

    def _round(
        self,
        block: nn.Module,
        specs: Mapping[str, QuantSpec],
        statistics: Mapping[str, Tensor],
        divided: Mapping[str, Tensor],
        streams: CalibrationStreams | None,
    ) -> tuple[dict[str, QTensor], dict[str, float]]:
        """The integers of every linear in `specs`, by its name in the block, and by GPTQ the
        dampings of their Hessians.
        """
        dtype = self.dtype
        clips: dict[str, Tensor | float] = dict.fromkeys(specs, 1.0)
        if self.clip:
            with self.clock.part("search"):
                for n, spec in specs.items():
                    rows = statistics[f"{n}.rows"]
                    clips[n] = clip_of(weight_of(block, n), rows, divided.get(n), spec, dtype)
        if streams is not None and self.rounding == "gptq":
            return self._gptq(block, specs, clips, streams)
        with self.clock.part("rounding"):
            rounded = {n: rtn(weight_of(block, n), s, dtype, clips[n]) for n, s in specs.items()}
        return rounded if streams is None else self._learned(block, rounded, streams), {}

    def _gptq(
        self,
        block: nn.Module,
        specs: Mapping[str, QuantSpec],
        clips: Mapping[str, Tensor | float],
        streams: CalibrationStreams,
    ) -> tuple[dict[str, QTensor], dict[str, float]]:
        rounded: dict[str, QTensor] = {}
        dampings: dict[str, float] = {}
        with self.clock.part("Hessians"):
            hessians = streams.hessians(block, self.index, list(specs))
        while hessians:
            names, hessian = hessians.pop(0)
            with self.clock.part("factors"):
                found = factored(f"{names[0]} of block {self.index}", hessian, "quantize")
            for n in names:
                dampings[n] = found.damping
                with self.clock.part("rounding"):
                    rounded[n] = gptq(weight_of(block, n), found, specs[n], self.dtype, clips[n])
            del hessian, found  # one storage, 485 MB for the down_proj of a 7B
        return rounded, dampings

    def _learned(
        self, block: nn.Module, rounded: dict[str, QTensor], streams: CalibrationStreams
    ) -> dict[str, QTensor]:
        """`rounded` learned on, where the block's error on the same windows becomes smaller."""
        linears = {
            n: RoundingLinear(weight_of(block, n), _bias_of(block, n), start)
            for n, start in rounded.items()
        }
        windows = streams.drawn(self.index, seed=self.seed + self.index)

        def error() -> float:
            return sum(
                float(relative_error(block(same.inputs, **same.call), same))
                for same in streams.first(self.index)
            )

        with self.clock.part("learning"), swapped(block, linears):
            before = error()
            learn(block, linears, windows, count=self.steps, rate=self.rate)
            after = error()
        if after < before:
            return {name: linear.qtensor() for name, linear in linears.items()}
        logger.info(f"  block {self.index}: learning did not lessen its error, nearest is kept")
        return rounded


def _bias_of(block: nn.Module, name: str) -> Tensor | None:
    bias = block.get_submodule(name).bias
    return bias if isinstance(bias, Tensor) else None


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` as the checkpoint holds it: in `dtype`, unless it is of integers."""
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
