"""calibrate: what each linear sees, and what the original says of the held-out text.

One pass of the original over the calibration windows, block by block; the held-out windows go
through with them, so that the original is read from disk once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from compress import data, heldout
from compress.errors import ConfigError, UserError
from compress.hidden import HiddenStates
from compress.log import logger, progress
from compress.model import BlockModel
from compress.stage import Run

OUTLIER = 6.0  # times the root mean square of the layer's input
FEW_TOKENS = 1024
TINY = 1e-12
WINDOWS = "windows.safetensors"
"""Token ids and mask [n, T] of the calibration windows, for stages that read them again."""


@dataclass(kw_only=True)
class Calibrate:
    """Statistics of every linear's input, per channel, over the data of `data`.

    rows: inputs of each linear kept as they are, for searches that need real ones.
    heldout_windows, heldout_length: held-out text on which every later stage is measured.
    batch: windows that go through a block together.
    """

    name: ClassVar[str] = "calibrate"
    version: ClassVar[int] = 3
    needs: ClassVar[tuple[str, ...]] = ("dense",)
    gives: ClassVar[str | None] = "statistics"
    shares: ClassVar[tuple[str, ...]] = ("model", "data", "device")

    rows: int = 256
    heldout_windows: int = 8
    heldout_length: int = 256
    batch: int = 4

    def __post_init__(self) -> None:
        problems = [
            f"calibrate.{name} is {value}; wanted at least {least}"
            for name, value, least in (
                ("rows", self.rows, 16),
                ("heldout_windows", self.heldout_windows, 1),
                ("heldout_length", self.heldout_length, 16),
                ("batch", self.batch, 1),
            )
            if value < least
        ]
        if problems:
            raise ConfigError(problems)

    @torch.no_grad()
    def run(self, run: Run, out: Path) -> dict[str, Any]:
        config = run.config
        model = BlockModel(
            run.artifacts["dense"],
            device=config.device,
            trust_remote_code=config.model.trust_remote_code,
        )
        windows, held = self._windows(run, model)
        save_file({"ids": windows.ids, "mask": windows.mask}, out / WINDOWS)
        notes = _hygiene(windows)
        pick = _picked_rows(windows.mask, self.rows)
        states = HiddenStates(run.work)
        for name, texts in (("calibration", windows), ("heldout", held)):
            if name not in states:
                states.create(name, _embed(model, texts, self.batch))

        start = states.done("heldout")
        blocks = range(start, len(model))
        for index in progress(blocks, "calibrate", "block", total=len(model), done=start):
            with model.block(index) as block:
                collector = Collector(model.block_linears(index), pick)
                with collector:
                    self._advance(model, block, index, states, "calibration", windows, collector)
                self._advance(model, block, index, states, "heldout", held, None)
            save_file(collector.tensors(), out / f"block_{index:03d}.safetensors")
            states.commit("calibration", "heldout")

        perplexity = _keep_heldout(model, states, held, out)
        return {
            "samples": len(windows.ids),
            "length": windows.ids.shape[1],
            "tokens": windows.tokens,
            "padding_tokens": windows.ids.numel() - windows.tokens,
            "template_tokens": windows.template_tokens,
            "source": windows.description,
            **_layer_figures(out, len(model)),
            "heldout": {
                "windows": len(held.ids),
                "tokens": held.tokens,
                "description": held.description,
                "ppl": perplexity,
            },
            "notes": notes,
        }

    def _windows(self, run: Run, model: BlockModel) -> tuple[data.Windows, data.Windows]:
        tokenizer = AutoTokenizer.from_pretrained(
            run.artifacts["dense"], trust_remote_code=run.config.model.trust_remote_code
        )
        settings = run.config.data
        rest, held, description = data.split(settings)
        longest = model.config.get_text_config().max_position_embeddings
        length = min(settings.length, longest)
        if length < settings.length:
            logger.info(f"  windows of {length} tokens, the model's own limit")
        windows = data.windows(
            rest,
            tokenizer,
            count=settings.samples,
            length=length,
            seed=settings.seed,
            description=settings.source,
        )
        held_windows = data.windows(
            held,
            tokenizer,
            count=self.heldout_windows,
            length=min(self.heldout_length, length),
            seed=settings.seed,
            description=description,
        )
        return windows, held_windows

    def _advance(
        self,
        model: BlockModel,
        block: nn.Module,
        index: int,
        states: HiddenStates,
        name: str,
        windows: data.Windows,
        collector: "Collector | None",
    ) -> None:
        """Send the stream `name` of `windows` through the block."""
        for rows, hidden in states.batches(name, self.batch):
            ids, mask = windows.ids[rows].to(model.device), windows.mask[rows].to(model.device)
            calls = model.calls(ids, mask)
            if collector is not None:
                collector.start(rows.start, mask)
            states.write(name, rows, block(hidden.to(model.device), **calls[index]))


class Collector:
    """Gathers what a block's linears see. Linears that read the same tensor share one entry."""

    def __init__(self, linears: dict[str, nn.Linear], pick: Tensor) -> None:
        self.linears = linears
        self.pick = pick
        self.owner: dict[str, str] = {}
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._seen: dict[int, str] = {}

    def __enter__(self) -> "Collector":
        self._hooks = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self._see(name, args[0]))
            for name, linear in self.linears.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._seen = {}

    def start(self, first: int, mask: Tensor) -> None:
        """Announce a batch: the number of its first window, and its mask [B, T]."""
        self._first, self._mask, self._seen = first, mask, {}
        self._alive: list[Tensor] = []

    def _see(self, name: str, inputs: Tensor) -> None:
        owner = self._seen.setdefault(id(inputs), name)
        self.owner[name] = owner
        if owner != name:
            return
        self._alive.append(inputs)  # or its id could be another's before the batch ends
        picked = self.pick[self._first : self._first + len(inputs)].to(inputs.device)
        rows = inputs.gather(1, picked.unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
        x = inputs[self._mask.bool()].float()
        size = x.abs()
        relative = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(TINY)
        outliers = (size > OUTLIER * x.square().mean().sqrt()).sum(0)
        batch = {
            "absmax": size.amax(0),
            "sum_abs": size.sum(0, dtype=torch.float64),
            "sum_squares": x.square().sum(0, dtype=torch.float64),
            "sum_relative": relative.square().sum(0, dtype=torch.float64),
            "outliers": outliers,
            "tokens": torch.tensor(len(x)),
            "rows": rows.flatten(0, 1),
        }
        sums = self._sums.get(name)
        if sums is None:
            self._sums[name] = batch
            return
        sums["absmax"] = torch.maximum(sums["absmax"], batch["absmax"])
        for key in ("sum_abs", "sum_squares", "sum_relative", "outliers", "tokens"):
            sums[key] = sums[key] + batch[key]
        sums["rows"] = torch.cat([sums["rows"], batch["rows"]])

    def tensors(self) -> dict[str, Tensor]:
        """`<linear>.<statistic>` for every linear: absmax, mean_abs, second_moment, relative and
        outlier_share [K], tokens [], rows [R, K].

        relative: root mean square after each token was divided by its own, which is how an input
        quantized per token looks to the quantizer. Raises UserError where a linear saw nothing,
        or something not finite.
        """
        found = {}
        for name in self.linears:
            sums = self._sums.get(self.owner.get(name, ""))
            if sums is None:
                raise UserError(f"{name}: no calibration token reached it; nothing can be measured")
            if not torch.isfinite(sums["absmax"]).all():
                raise UserError(f"{name}: its inputs overflow on the calibration data (NaN or Inf)")
            tokens = sums["tokens"]
            statistics = {
                "absmax": sums["absmax"],
                "mean_abs": (sums["sum_abs"] / tokens).float(),
                "second_moment": (sums["sum_squares"] / tokens).float(),
                "relative": (sums["sum_relative"] / tokens).sqrt().float(),
                "outlier_share": (sums["outliers"] / tokens).float(),
                "tokens": tokens,
                "rows": sums["rows"],
            }
            for key, value in statistics.items():
                found[f"{name}.{key}"] = value.cpu().contiguous().clone()
        return found


def load_block_statistics(folder: Path, index: int) -> dict[str, Tensor]:
    """What `Collector.tensors` gave for block `index`."""
    return load_file(folder / f"block_{index:03d}.safetensors")


def _picked_rows(mask: Tensor, rows: int) -> Tensor:
    """For each window the positions [n, r] of real tokens whose inputs are kept as they are.

    The first is always one: models park attention there, with activations a thousand times those
    of other tokens (Sun et al. 2024, arXiv:2402.17762), which no random pick would meet.
    """
    generator = torch.Generator().manual_seed(0)
    each = max(2, -(-rows // len(mask)))
    picked = []
    for row in mask:
        real = max(2, int(row.sum()))
        others = torch.randint(1, real, (each - 1,), generator=generator)
        picked.append(torch.cat([torch.zeros(1, dtype=torch.int64), others]))
    return torch.stack(picked)


def _hygiene(windows: data.Windows) -> list[str]:
    """What in the data would bend the statistics, in words; each is logged too."""
    notes = []
    if windows.tokens < FEW_TOKENS:
        notes.append(f"only {windows.tokens} calibration tokens; a few thousand are usual")
    padding = windows.ids.numel() - windows.tokens
    if padding:
        share = padding / windows.ids.numel()
        notes.append(f"{share:.0%} of the calibration windows is padding, which is not counted")
    if windows.template_tokens:
        share = windows.template_tokens / max(1, windows.tokens)
        notes.append(f"{share:.0%} of the calibration tokens are of the chat template")
    if windows.description == data.PYTHON_DOCS:
        notes.append(
            f"calibrated on {windows.tokens:,} tokens of CPython's documentation; give "
            "data.path=FILE with text of the domain that the model will serve"
        )
    for note in notes:
        logger.info(f"  {note}")
    return notes


def _embed(model: BlockModel, windows: data.Windows, batch: int) -> Iterator[Tensor]:
    for ids, mask in zip(windows.ids.split(batch), windows.mask.split(batch), strict=True):
        yield model.embed(ids.to(model.device), mask.to(model.device))


def _keep_heldout(model: BlockModel, states: HiddenStates, held: data.Windows, out: Path) -> float:
    """Write the original's log-probabilities of the held-out windows; returns its perplexity."""
    losses = []

    def logprobs() -> Iterator[Tensor]:
        for rows, hidden in states.batches("heldout", 1):
            row, real = held.ids[rows][0], int(held.mask[rows].sum())
            found = model.logits(hidden.to(model.device))[0].log_softmax(-1).cpu()
            losses.append(nn.functional.nll_loss(found[: real - 1], row[1:real], reduction="none"))
            yield found

    heldout.save(out, held.ids, held.mask, logprobs())
    return float(torch.cat(losses).mean().exp())


def _layer_figures(folder: Path, blocks: int) -> dict[str, Any]:
    layers, least = [], None
    for index in range(blocks):
        tensors = load_block_statistics(folder, index)
        for key in tensors:
            name, _, statistic = key.rpartition(".")
            if statistic != "absmax":
                continue
            tokens = int(tensors[f"{name}.tokens"])
            least = tokens if least is None else min(least, tokens)
            layers.append(
                {
                    "name": name,
                    "absmax": float(tensors[key].max()),
                    "mean_abs": float(tensors[f"{name}.mean_abs"].mean()),
                    "outlier_share": float(tensors[f"{name}.outlier_share"].mean()),
                }
            )
    return {"linears": len(layers), "least_tokens": least, "layers": layers}
