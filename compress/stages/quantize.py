"""quantize: from 16-bit weights to integers, a block at a time, written as engines read it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from compress import checkpoint, guards, heldout
from compress.algorithms.blockwise import LayerReport
from compress.algorithms.gptq import DAMPING
from compress.artifact import write_json
from compress.blocks.collector import load_block_statistics
from compress.blocks.streams import CalibrationStreams
from compress.blocks.structure import knows
from compress.blocks.work import BlockWork
from compress.budget import choices
from compress.clock import Clock
from compress.errors import ConfigError
from compress.log import logger, progress
from compress.model import BlockModel, storage_dtype
from compress.preflight import preflight
from compress.qtensor import QuantSpec
from compress.quantization_config import quantization_config
from compress.report.words import several
from compress.source import describe
from compress.stage import Run
from compress.stages.calibrate import WINDOWS
from compress.tensors import ToWrite, tensor_names

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
    block, over `steps` steps of `batch` windows, those of `calibrate.written` among them; `rate`:
    by how much of a weight's step its rounding moves in the first).
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 6
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics")
    gives: ClassVar[str | None] = "quantized"
    shares: ClassVar[tuple[str, ...]] = ("model", "engine", "device", "seed", "budget")

    bits: int = 8
    activation_bits: int | None = 8
    group_size: int | None = None
    keep: list[str] = field(default_factory=list)
    smooth: bool = True
    clip: bool = True
    rounding: str = "nearest"
    steps: int = 150
    batch: int = 8
    rate: float = 0.015

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
                f"bits={self.bits} and group_size={self.group_size or 'null'}; wanted bits=8 and "
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
        if not 0 < self.rate <= 1:
            problems.append(f"quantize.rate is {self.rate}; wanted above 0 and at most 1")
        if problems:
            raise ConfigError(problems)

    @property
    def spec(self) -> QuantSpec:
        """The scheme as asked for; the engine's check may repair its group size."""
        return QuantSpec(self.bits, self.group_size, self.activation_bits)

    @torch.no_grad()
    def run(self, run: Run, out: Path) -> dict[str, Any]:
        trusted = run.config.model.trust_remote_code
        model = BlockModel(
            run.artifacts["dense"], device=run.config.device, trust_remote_code=trusted
        )
        dtype = storage_dtype(model.config, run.config.model.dtype)
        specs, ignore, notes = self._chosen(run, model, dtype)
        for note in notes:
            logger.info(f"  {note}")
        clock = Clock()
        layers, first = self._blocks(run, model, specs, dtype, clock)
        for note in _damped(layers):
            notes.append(note)
            logger.info(f"  {note}")
        with clock.part("writing"):
            _write(run, model, quantization_config(specs, ignore), dtype, out)
        with clock.part("held-out"):
            measured = heldout.distance(
                out,
                run.artifacts["statistics"],
                device=run.config.device,
                trust_remote_code=trusted,
            )
        logger.info(f"  held-out KL to the original {measured.kl:.4f}, top-1 {measured.top1:.1%}")
        return {
            "scheme": choices.scheme_of(specs),
            "layers": [asdict(layer) for layer in layers],
            "heldout_kl": {"before": _kl_before(run), "after": measured.kl},
            "heldout": measured.asdict(),
            "seconds_by_part": clock.seconds,
            "went_on": first > 0,  # then these seconds are those of the last process alone
            "notes": notes,
        }

    def _chosen(
        self, run: Run, model: BlockModel, dtype: torch.dtype
    ) -> tuple[dict[str, QuantSpec], list[str], list[str]]:
        """How each quantized linear will be, by its full name; the names of those that stay in 16
        bit; and what is to be said of it.
        """
        chosen = preflight(model.config, run.config)
        if dtype == torch.float16 and run.config.budget is None:
            kept = guards.small_scales(model, chosen.quantize, chosen.spec)
            chosen = preflight(model.config, run.config, kept)
        specs, ignore = dict.fromkeys(chosen.quantize, chosen.spec), chosen.ignore
        notes = list(chosen.notes)
        if run.config.budget is not None:
            specs = choices.read_assignment(run.artifacts["statistics"])
            ignore = [name for name in (*chosen.quantize, *chosen.ignore) if name not in specs]
            notes = [f"mixed precision by the stage allocate, budget={run.config.budget}"]
        if dtype == torch.float16:
            notes += guards.scaling_notes(model, run.artifacts["statistics"])
        if self.smooth and not knows(model.config):
            notes.append(f"no smoothing: blocks of {model.config.model_type} are not known to it")
        return specs, ignore, notes

    def _blocks(
        self,
        run: Run,
        model: BlockModel,
        specs: dict[str, QuantSpec],
        dtype: torch.dtype,
        clock: Clock,
    ) -> tuple[list[LayerReport], int]:
        """Quantize the blocks that no earlier process has, into `run.work`: what was done to the
        linears of all blocks, and the number of the first that was left.
        """
        statistics, streams = run.artifacts["statistics"], self._streams(run, model)
        done = [_restore(run.work, index) for index in range(len(model))]
        first = next((i for i, layers in enumerate(done) if layers is None), len(model))
        if streams is not None:
            first = min(first, streams.done)
        blocks = range(first, len(model))
        for index in progress(blocks, "quantize", "block", total=len(model), done=first):
            work = BlockWork(
                model,
                index,
                specs,
                dtype,
                run.config.seed,
                clock,
                smooth=self.smooth,
                clip=self.clip,
                rounding=self.rounding,
                steps=self.steps,
                rate=self.rate,
            )
            with clock.part("reading"):
                found = load_block_statistics(statistics, index)
            tensors, layers = work.run(found, streams)
            with clock.part("saving"):
                _save_block(run.work, index, tensors, layers)
                if streams is not None:
                    streams.commit()
            del tensors  # on a GPU 0.3 GB of a 7B, beside which the next block would have to fit
            done[index] = layers
        return [layer for layers in done if layers for layer in layers], first

    def _streams(self, run: Run, model: BlockModel) -> CalibrationStreams | None:
        """The calibration windows on their way through the blocks, where rounding needs them."""
        if self.rounding == "nearest":
            return None
        file, learned = run.artifacts["statistics"] / WINDOWS, self.rounding == "learned"
        return CalibrationStreams(model, file, run.work, self.batch, targets=learned)


def _write(
    run: Run, model: BlockModel, quantization: dict[str, Any], dtype: torch.dtype, out: Path
) -> None:
    """Write the checkpoint: the quantized blocks of `run.work`, and what lies outside of them."""
    config = describe(model.folder)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    config["quantization_config"] = quantization
    stored = {
        name: ToWrite.stored(model.tensors.file_of[name], name, dtype)
        for name in model.outside_names()
    }
    for file in (_block_file(run.work, index) for index in range(len(model))):
        stored |= {name: ToWrite.stored(file, name) for name in tensor_names(file)}
    checkpoint.write(out, stored, config, model.folder)


def _damped(layers: list[LayerReport]) -> list[str]:
    """What is to be said of Hessians that wanted more damping than usual."""
    damped = [layer for layer in layers if (layer.damping or 0) > DAMPING]
    if not damped:
        return []
    most = max(damped, key=lambda layer: layer.damping or 0)
    return [
        f"{several(len(damped), 'linear')} with a Hessian that had to be damped by more than "
        f"{DAMPING:g} of its mean diagonal, the most {most.name} with {most.damping:g}"
    ]


def _kl_before(run: Run) -> float:
    """Of the model that is quantized: none, unless it is a student of the original."""
    return run.manifests["shrink"]["metrics"]["kl"]["after"] if "shrink" in run.manifests else 0.0


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
