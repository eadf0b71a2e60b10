"""quantize: from 16-bit weights to integers, a block at a time, written as engines read it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compress import checkpoint, choices, guards, heldout
from compress.algorithms.blockwise import (
    LayerReport,
    clip_of,
    error_of_rtn,
    report_on,
    smooth_block,
    weight_of,
)
from compress.algorithms.gptq import DAMPING, Factor, factor, gptq
from compress.algorithms.learned import RoundingLinear, learn, relative_error
from compress.algorithms.rtn import rtn
from compress.artifact import write_json
from compress.clock import Clock
from compress.collector import load_block_statistics
from compress.errors import ConfigError, UserError
from compress.log import logger, progress
from compress.model import BlockModel, storage_dtype
from compress.preflight import preflight
from compress.qtensor import QTensor, QuantSpec
from compress.source import describe
from compress.stage import Run
from compress.stages.calibrate import WINDOWS
from compress.streams import FULL, QUANTIZED, CalibrationStreams, swapped
from compress.structure import feeds, knows
from compress.tensors import ToWrite, tensor_names
from compress.trainable import ScaleLinear

ROUNDINGS = ("nearest", "gptq", "learned")


@dataclass(kw_only=True)
class Quantize:
    """Which scheme, and what is done so that it costs little.

    bits: of the weights, 8 or 4. activation_bits: 8 (INT8, per token, as they arrive) or null
    (16 bit). group_size: weights that share a scale, along the input; null: one scale an output
    channel. keep: linears left in 16 bit, by full name, wildcard, or `re:` pattern.
    smooth: move outliers from activations to weights, strength searched per layer.
    clip: search the largest weight that is kept, per channel or group.
    rounding: nearest; gptq (a column at a time, the rest makes up for it); or learned (block by
    block, over `steps` steps of `batch` windows; `rate`: by how much of a weight's step its
    rounding moves in the first).
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 4
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics")
    gives: ClassVar[str | None] = "quantized"
    shares: ClassVar[tuple[str, ...]] = ("model", "engine", "device", "seed")

    bits: int = 8
    activation_bits: int | None = 8
    group_size: int | None = None
    keep: list[str] = field(default_factory=list)
    smooth: bool = True
    clip: bool = True
    rounding: str = "nearest"
    steps: int = 100
    batch: int = 8
    rate: float = 0.01

    def __post_init__(self) -> None:
        problems = []
        if self.bits not in (4, 8):
            problems.append(f"quantize.bits is {self.bits}; wanted 8 or 4")
        if self.activation_bits not in (8, None):
            problems.append(
                f"quantize.activation_bits is {self.activation_bits}; wanted 8, or null for 16 bit"
            )
        elif self.activation_bits == 8 and (self.bits == 4 or self.group_size is not None):
            problems.append(
                "quantize.activation_bits is 8 with "
                f"bits={self.bits} and group_size={self.group_size}; wanted bits=8 and "
                "group_size=null, or activation_bits=null"
            )
        if self.group_size is not None and self.group_size < 1:
            problems.append(f"quantize.group_size is {self.group_size}; wanted 128, 64, 32 or null")
        if self.rounding not in ROUNDINGS:
            problems.append(
                f"quantize.rounding is {self.rounding!r}; wanted one of {', '.join(ROUNDINGS)}"
            )
        problems += [
            f"quantize.{name} is {value}; wanted at least 1"
            for name, value in (("steps", self.steps), ("batch", self.batch))
            if value < 1
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def spec(self) -> QuantSpec:
        """The scheme as asked for; the engine's check may repair its group size."""
        return QuantSpec(self.bits, self.group_size, self.activation_bits)

    @torch.no_grad()
    def run(self, run: Run, out: Path) -> dict[str, Any]:
        dense, options = run.artifacts["dense"], run.config.model
        statistics = run.artifacts["statistics"]
        model = BlockModel(
            dense, device=run.config.device, trust_remote_code=options.trust_remote_code
        )
        dtype = storage_dtype(model.config, options.dtype)
        chosen = preflight(model.config, run.config)
        if dtype == torch.float16:
            kept = guards.small_scales(model, chosen.quantize, chosen.spec)
            chosen = preflight(model.config, run.config, kept)
        specs, ignore = dict.fromkeys(chosen.quantize, chosen.spec), chosen.ignore
        notes = list(chosen.notes)
        if run.config.budget is not None:
            specs = choices.read_assignment(statistics)
            ignore = [name for name in (*chosen.quantize, *chosen.ignore) if name not in specs]
            notes = [f"mixed precision by the stage allocate, budget={run.config.budget}"]
        if dtype == torch.float16:
            notes += guards.scaling_notes(model, statistics)
        if self.smooth and not knows(model.config):
            notes.append(f"no smoothing: blocks of {model.config.model_type} are not known to it")
        for note in notes:
            logger.info(f"  {note}")

        streams = None
        if self.rounding != "nearest":
            streams = CalibrationStreams(model, statistics / WINDOWS, run.work, self.batch)
        done = [_restore(run.work, index) for index in range(len(model))]
        first = next((i for i, layers in enumerate(done) if layers is None), len(model))
        if streams is not None:
            first = min(first, streams.done)
        blocks = range(first, len(model))
        clock = Clock()
        for index in progress(blocks, "quantize", "block", total=len(model), done=first):
            work = BlockWork(self, model, index, specs, dtype, run.config.seed, clock)
            tensors, layers = work.run(load_block_statistics(statistics, index), streams)
            _save_block(run.work, index, tensors, layers)
            if streams is not None:
                streams.commit()
            done[index] = layers

        config = describe(dense)
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        config["quantization_config"] = checkpoint.quantization_config(specs, ignore)
        stored = {
            name: ToWrite.stored(model.tensors.file_of[name], name, dtype)
            for name in model.outside_names()
        }
        for file in (_block_file(run.work, index) for index in range(len(model))):
            stored |= {name: ToWrite.stored(file, name) for name in tensor_names(file)}
        with clock.part("writing"):
            checkpoint.write(out, stored, config, dense)
        with clock.part("held-out"):
            measured = heldout.distance(
                out,
                statistics,
                device=run.config.device,
                trust_remote_code=options.trust_remote_code,
            )
        logger.info(f"  held-out KL to the original {measured.kl:.4f}, top-1 {measured.top1:.1%}")
        return {
            "scheme": choices.scheme_of(specs),
            "layers": [asdict(layer) for layers in done if layers for layer in layers],
            "heldout_kl": {"before": 0.0, "after": measured.kl},
            "heldout": measured.asdict(),
            "seconds_by_part": clock.seconds,
            "notes": notes,
        }


@dataclass(frozen=True)
class BlockWork:
    """One block of the model on its way to integers.

    specs: how each linear of the model that is quantized is, by its full name.
    """

    options: Quantize
    model: BlockModel
    index: int
    specs: Mapping[str, QuantSpec]
    dtype: torch.dtype
    seed: int
    clock: Clock

    def run(
        self, statistics: Mapping[str, Tensor], streams: CalibrationStreams | None
    ) -> tuple[dict[str, Tensor], list[LayerReport]]:
        """The block's tensors as the checkpoint holds them, and what was done to its linears."""
        prefix = f"{self.model.block_name(self.index)}."
        local = {n.removeprefix(prefix): t.to(self.model.device) for n, t in statistics.items()}
        specs = {n.removeprefix(prefix): s for n, s in self.specs.items() if n.startswith(prefix)}
        dtype = self.dtype
        with self.model.block(self.index) as block:
            if streams is not None:
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
            if self.options.smooth:
                found = feeds(self.model.config, block)
                with self.clock.part("search"):
                    divided, strengths = smooth_block(block, found, local, specs, dtype)
            tensors, weights = {}, {f"{name}.weight" for name in specs}
            for name, parameter in block.named_parameters():
                if name not in weights:
                    tensors[prefix + name] = _cast(parameter, dtype)
                    parameter.copy_(tensors[prefix + name])  # what comes next is made for this
            rounded = self._round(block, specs, local, divided, streams)
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
    ) -> dict[str, QTensor]:
        """The integers of every linear in `specs`, by its name in the block."""
        dtype = self.dtype
        clips: dict[str, Tensor | float] = dict.fromkeys(specs, 1.0)
        if self.options.clip:
            with self.clock.part("search"):
                for n, spec in specs.items():
                    rows = statistics[f"{n}.rows"]
                    clips[n] = clip_of(weight_of(block, n), rows, divided.get(n), spec, dtype)
        if streams is not None and self.options.rounding == "gptq":
            return self._gptq(block, specs, clips, streams)
        with self.clock.part("rounding"):
            rounded = {n: rtn(weight_of(block, n), s, dtype, clips[n]) for n, s in specs.items()}
        return rounded if streams is None else self._learned(block, rounded, streams)

    def _gptq(
        self,
        block: nn.Module,
        specs: Mapping[str, QuantSpec],
        clips: Mapping[str, Tensor | float],
        streams: CalibrationStreams,
    ) -> dict[str, QTensor]:
        rounded: dict[str, QTensor] = {}
        with self.clock.part("Hessians"):
            hessians = streams.hessians(block, self.index, list(specs))
        while hessians:
            names, hessian = hessians.pop(0)
            with self.clock.part("factors"):
                found = self._factor(names[0], hessian)
            del hessian  # 485 MB for the down_proj of a 7B
            for n in names:
                with self.clock.part("rounding"):
                    rounded[n] = gptq(weight_of(block, n), found, specs[n], self.dtype, clips[n])
        return rounded

    def _factor(self, name: str, hessian: Tensor) -> Factor:
        try:
            found = factor(hessian)
        except ValueError as error:
            raise UserError(
                f"{name} of block {self.index}: {error}; quantize.rounding=nearest does without"
            ) from error
        if found.damping > DAMPING:
            logger.info(f"  block {self.index} {name}: Hessian damped by {found.damping:g}")
        return found

    def _learned(
        self, block: nn.Module, rounded: dict[str, QTensor], streams: CalibrationStreams
    ) -> dict[str, QTensor]:
        """`rounded` learned on, where the block's error on the same windows becomes smaller."""
        linears = {
            n: RoundingLinear(weight_of(block, n), _bias_of(block, n), q.spec, self.dtype, q.scales)
            for n, q in rounded.items()
        }
        batches = streams.batches(self.index, seed=self.seed + self.index)
        same = streams.first(self.index)
        with self.clock.part("learning"), swapped(block, linears):
            before = float(relative_error(block(same.inputs, **same.call), same))
            learn(block, linears, batches, steps=self.options.steps, rate=self.options.rate)
            after = float(relative_error(block(same.inputs, **same.call), same))
        if after < before:
            return {name: linear.qtensor() for name, linear in linears.items()}
        logger.info(f"  block {self.index}: learning did not lessen its error, nearest is kept")
        return rounded


def _bias_of(block: nn.Module, name: str) -> Tensor | None:
    bias = block.get_submodule(name).bias
    return bias if isinstance(bias, Tensor) else None


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor


def _block_file(work: Path, index: int) -> Path:
    return work / f"block_{index:03d}.safetensors"


def _save_block(
    work: Path, index: int, tensors: dict[str, Tensor], layers: list[LayerReport]
) -> None:
    """Keep a finished block; its report is written last and says that it is whole."""
    save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, _block_file(work, index))
    write_json(work / f"block_{index:03d}.json", [asdict(layer) for layer in layers])


def _restore(work: Path, index: int) -> list[LayerReport] | None:
    file = work / f"block_{index:03d}.json"
    return [LayerReport(**x) for x in json.loads(file.read_text())] if file.exists() else None
