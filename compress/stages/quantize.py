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
        dense, options = run.artifacts["dense"], run.config.model
        statistics = run.artifacts["statistics"]
        model = BlockModel(
            dense, device=run.config.device, trust_remote_code=options.trust_remote_code
        )
        dtype = storage_dtype(model.config, options.dtype)
        chosen = preflight(model.config, run.config)
        if dtype == torch.float16 and run.config.budget is None:
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
            learned = self.rounding == "learned"
            file = statistics / WINDOWS
            streams = CalibrationStreams(model, file, run.work, self.batch, targets=learned)
        done = [_restore(run.work, index) for index in range(len(model))]
        first = next((i for i, layers in enumerate(done) if layers is None), len(model))
        if streams is not None:
            first = min(first, streams.done)
        blocks = range(first, len(model))
        clock = Clock()
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
            "heldout_kl": {"before": _kl_before(run), "after": measured.kl},
            "heldout": measured.asdict(),
            "seconds_by_part": clock.seconds,
            "went_on": first > 0,  # then these seconds are those of the last process alone
            "notes": notes,
        }


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
