"""quantize: from 16-bit weights to integers, a block at a time, written as engines read it."""

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import checkpoint, engines, heldout
from compress.algorithms.blockwise import LayerReport, quantize_linear, smooth_block, weight_of
from compress.artifact import write_json
from compress.errors import ConfigError
from compress.log import logger, progress
from compress.model import BlockModel, linear_shapes, storage_dtype
from compress.qtensor import QuantSpec
from compress.source import describe
from compress.stage import Run
from compress.stages.calibrate import load_block_statistics
from compress.structure import LLAMA_LIKE, feeds


@dataclass(kw_only=True)
class Quantize:
    """Which scheme, and what is done so that it costs little.

    bits: of the weights, 8 or 4. activation_bits: 8 (INT8, per token, as they arrive) or null
    (16 bit). group_size: weights that share a scale, along the input; null: one scale an output
    channel. keep: linears left in 16 bit, by full name, wildcard, or `re:` pattern.
    smooth: move outliers from activations to weights, strength searched per layer.
    clip: search the largest weight that is kept, per channel or group.
    """

    name: ClassVar[str] = "quantize"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics")
    gives: ClassVar[str | None] = "quantized"
    shares: ClassVar[tuple[str, ...]] = ("model", "engine", "device")

    bits: int = 8
    activation_bits: int | None = 8
    group_size: int | None = None
    keep: list[str] = field(default_factory=list)
    smooth: bool = True
    clip: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.bits not in (4, 8):
            problems.append(f"quantize.bits is {self.bits}; wanted 8 or 4")
        if self.activation_bits not in (8, None):
            problems.append(
                f"quantize.activation_bits is {self.activation_bits}; wanted 8, or null for 16 bit"
            )
        if self.activation_bits == 8 and (self.bits != 8 or self.group_size is not None):
            problems.append(
                "quantize.activation_bits is 8 with "
                f"bits={self.bits} and group_size={self.group_size}; wanted bits=8 and "
                "group_size=null, or activation_bits=null"
            )
        if self.group_size is not None and self.group_size < 1:
            problems.append(f"quantize.group_size is {self.group_size}; wanted 128, 64, 32 or null")
        if problems:
            raise ConfigError(problems)

    @property
    def spec(self) -> QuantSpec:
        """The scheme as asked for; the engine's check may repair its group size."""
        return QuantSpec(self.bits, self.group_size, self.activation_bits)

    @torch.no_grad()
    def run(self, run: Run, out: Path) -> dict[str, Any]:
        dense, options = run.artifacts["dense"], run.config.model
        model = BlockModel(
            dense, device=run.config.device, trust_remote_code=options.trust_remote_code
        )
        shapes = linear_shapes(model.config, options.trust_remote_code)
        chosen = engines.preflight(shapes, self.spec, run.config.engine, self.keep)
        notes = list(chosen.notes)
        dtype = storage_dtype(model.config, options.dtype)
        if self.smooth and model.config.model_type not in LLAMA_LIKE:
            notes.append(f"no smoothing: blocks of {model.config.model_type} are not known to it")
        for note in notes:
            logger.info(f"  {note}")

        done = [_restore(run.work, index) for index in range(len(model))]
        first = next((i for i, layers in enumerate(done) if layers is None), len(model))
        blocks = range(first, len(model))
        for index in progress(blocks, "quantize", "block", total=len(model), done=first):
            statistics = load_block_statistics(run.artifacts["statistics"], index)
            tensors, layers = self._block(model, index, statistics, chosen, dtype)
            _save_block(run.work, index, tensors, layers)
            done[index] = layers

        config = describe(dense)
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        specs = dict.fromkeys(chosen.quantize, chosen.spec)
        config["quantization_config"] = checkpoint.quantization_config(specs, chosen.ignore)
        outside = ({n: _cast(t, dtype)} for n, t in model.outside_tensors())
        inside = (load_file(_block_file(run.work, index)) for index in range(len(model)))
        checkpoint.write(out, itertools.chain(outside, inside), config, dense)
        measured = heldout.distance(
            out,
            run.artifacts["statistics"],
            device=run.config.device,
            trust_remote_code=options.trust_remote_code,
        )
        logger.info(f"  held-out KL to the original {measured.kl:.4f}, top-1 {measured.top1:.1%}")
        return {
            "scheme": chosen.spec.scheme,
            "layers": [asdict(layer) for layers in done if layers for layer in layers],
            "heldout_kl": {"before": 0.0, "after": measured.kl, "rtn": None},
            "heldout": measured.asdict(),
            "notes": notes,
        }

    def _block(
        self,
        model: BlockModel,
        index: int,
        statistics: dict[str, Tensor],
        chosen: engines.Preflight,
        dtype: torch.dtype,
    ) -> tuple[dict[str, Tensor], list[LayerReport]]:
        """The tensors of block `index` as the checkpoint holds them, and what was done."""
        prefix = f"{model.block_name(index)}."
        local = {n.removeprefix(prefix): t.to(model.device) for n, t in statistics.items()}
        quantized = {n.removeprefix(prefix) for n in chosen.quantize if n.startswith(prefix)}
        tensors, reports = {}, []
        with model.block(index) as block:
            original = {name: weight_of(block, name).clone() for name in quantized}
            divided: dict[str, Tensor] = {}
            strengths: dict[str, float] = {}
            if self.smooth:
                found = feeds(model.config, block)
                divided, strengths = smooth_block(
                    block, found, local, quantized, chosen.spec, dtype
                )
            for name, parameter in block.named_parameters():
                linear, _, what = name.rpartition(".")
                if what != "weight" or linear not in quantized:
                    tensors[prefix + name] = _cast(parameter, dtype)
                    continue
                weight, report = quantize_linear(
                    prefix + linear,
                    original[linear],
                    parameter,
                    local[f"{linear}.rows"],
                    divided.get(linear),
                    strengths.get(linear),
                    chosen.spec,
                    dtype,
                    clip=self.clip,
                )
                tensors |= checkpoint.pack(prefix + linear, weight)
                reports.append(report)
        return tensors, reports


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
