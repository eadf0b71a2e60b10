"""calibrate: what each linear sees, and what the original says of the held-out text.

One pass of the original over the calibration windows, block by block; the held-out windows go
through with them, so that the original is read from disk once. What would make the statistics
worthless, or the checkpoint unservable, ends the run here, as early as it can be seen.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from compress import guards, heldout, processes
from compress.blocks.collector import Collector, compared, layer_figures, picked_rows
from compress.blocks.hidden import HiddenStates, together
from compress.errors import ConfigError
from compress.log import logger, progress
from compress.model import BlockModel, storage_dtype
from compress.preflight import preflight
from compress.stage import Run
from compress.text import documents, hygiene, written
from compress.text.windows import Windows, draw, leading_ids

WINDOWS = "windows.safetensors"
"""Token ids and mask [n, T] of the calibration windows, and ids `written` [m, T] by the model, for
stages that read them again.
"""


@dataclass(frozen=True)
class Stream:
    """Windows on their way through the blocks; pick: see `Collector`."""

    name: str
    windows: Windows
    pick: Tensor


@dataclass(kw_only=True)
class Calibrate:
    """Statistics of every linear's input, per channel, over the data of `data`.

    rows: inputs of each linear kept as they are, for searches that need real ones.
    least_tokens: tokens, without padding, that have to reach every linear.
    heldout_windows, heldout_length: held-out text on which every later stage is measured.
    batch: windows that go through a block together. written: windows that the model writes itself,
    for quantize.rounding=learned and distill to learn from; the whole model is in memory for that.
    """

    name: ClassVar[str] = "calibrate"
    version: ClassVar[int] = 6
    needs: ClassVar[tuple[str, ...]] = ("dense",)
    gives: ClassVar[str | None] = "statistics"
    shares: ClassVar[tuple[str, ...]] = ("model", "data", "device")

    rows: int = 256
    least_tokens: int = 128
    heldout_windows: int = 8
    heldout_length: int = 256
    batch: int = 4
    written: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"calibrate.{name} is {value}; wanted at least {least}"
            for name, value, least in (
                ("rows", self.rows, 16),
                ("least_tokens", self.least_tokens, 1),
                ("heldout_windows", self.heldout_windows, 1),
                ("heldout_length", self.heldout_length, 16),
                ("batch", self.batch, 1),
                ("written", self.written, 0),
            )
            if value < least
        ]
        if problems:
            raise ConfigError(problems)

    @torch.no_grad()
    def run(self, run: Run, out: Path) -> dict[str, Any]:
        config, model = run.config, _model(run)
        if "quantize" in config.stages:
            preflight(model.config, config)  # refuses what would be refused after all this work
        dtype = storage_dtype(model.config, config.model.dtype)
        windows, held, leading = self._windows(run, model)
        hygiene.refuse_few("data", windows.tokens, self.least_tokens)
        vocabulary = model.config.get_text_config().vocab_size
        tokens_diverge = hygiene.token_divergence(windows, held, vocabulary)
        if dtype == torch.float16:
            guards.refuse_large_weights(model.tensors)  # reads them all, so after the counting
        notes = hygiene.text_notes(windows, held, tokens_diverge)
        for note in notes:
            logger.info(f"  {note}")
        self._keep_windows(run, windows, leading, out)
        states = self._sent(run, model, windows, held, dtype, out)

        if run.original == run.artifacts["dense"]:
            perplexity = _keep_heldout(model, states, held, out)
        else:
            perplexity = heldout.record(run, held, out)
        calibration_perplexity = _perplexity(model, states, windows, held.ids)
        figures = layer_figures(out, len(model))
        later = hygiene.layer_notes(figures["layers"], windows, held)
        half = dtype == torch.float16
        largest = guards.largest_left(model, out) if half else figures["largest_activation"]
        later += filter(None, [guards.remark(largest, dtype)])
        for note in later:
            logger.info(f"  {note}")
        return {
            **hygiene.counts(windows),
            "source": windows.description,
            "written": self.written,
            "ppl": calibration_perplexity,
            **figures,
            "heldout": {
                "windows": len(held.ids),
                "tokens": held.tokens,
                "description": held.description,
                "ppl": perplexity,
                "token_divergence": tokens_diverge,
            },
            "notes": notes + later,
        }

    def _keep_windows(self, run: Run, windows: Windows, leading: list[int], out: Path) -> None:
        """Write the windows for the stages that read them again, and those of the model's own."""
        kept = {"ids": windows.ids, "mask": windows.mask}
        if self.written:
            kept["written"] = written.write(
                run.artifacts["dense"],
                windows,
                self.written,
                leading=leading,
                seed=run.config.data.seed,
                work=run.work,
                device=run.config.device,
                trust_remote_code=run.config.model.trust_remote_code,
            )
        save_file(kept, out / WINDOWS)

    def _sent(
        self,
        run: Run,
        model: BlockModel,
        windows: Windows,
        held: Windows,
        dtype: torch.dtype,
        out: Path,
    ) -> HiddenStates:
        """Send both texts through all blocks, whose statistics are written; what the last gave."""
        streams = (
            Stream("calibration", windows, picked_rows(windows.mask, self.rows)),
            Stream("heldout", held, picked_rows(held.mask, 1)),
        )
        states = HiddenStates(run.work)
        for stream in streams:
            if stream.name not in states:
                ids, mask = stream.windows.ids, stream.windows.mask
                states.create(stream.name, model.embedded(ids, mask, self.batch))
        processes.everywhere(self._through_blocks, run, streams, dtype, out)
        return HiddenStates(run.work)

    @torch.no_grad()
    def _through_blocks(
        self, run: Run, streams: tuple[Stream, Stream], dtype: torch.dtype, out: Path
    ) -> None:
        """Send both streams through all blocks and write the statistics of each block; of several
        processes each takes a share of the windows.
        """
        model, states = _model(run), HiddenStates(run.work)
        processes.wait()  # opening the states removes what was written ahead
        start = states.done("heldout")
        blocks = range(start, len(model))
        for index in progress(blocks, "calibrate", "block", total=len(model), done=start):
            statistics = self._measure(model, index, states, streams, dtype)
            if processes.leads():
                save_file(statistics, out / f"block_{index:03d}.safetensors")
            states.commit("calibration", "heldout")

    def _windows(self, run: Run, model: BlockModel) -> tuple[Windows, Windows, list[int]]:
        """Windows to calibrate on, others held out, and the tokens that every text begins with."""
        tokenizer = AutoTokenizer.from_pretrained(
            run.artifacts["dense"], trust_remote_code=run.config.model.trust_remote_code
        )
        settings = run.config.data
        rest, _, _ = documents.split(settings)
        length = min(settings.length, model.config.get_text_config().max_position_embeddings)
        if length < settings.length:
            logger.info(f"  windows of {length} tokens, the model's own limit")
        windows = draw(
            rest,
            tokenizer,
            count=settings.samples,
            length=length,
            seed=settings.seed,
            description=settings.source,
        )
        return windows, heldout.windows(run, model.config), leading_ids(tokenizer)

    def _measure(
        self,
        model: BlockModel,
        index: int,
        states: HiddenStates,
        streams: tuple[Stream, Stream],
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """Send both streams through block `index`.

        Returns what `Collector.tensors` gives for the first, what `compared` adds, and
        `output_absmax` [] of the block over both.
        """
        name = model.block_name(index)
        found, largest = [], torch.zeros(())
        with model.block(index) as block:
            for stream in streams:
                collector = Collector(model.block_linears(index), stream.pick)
                with collector:
                    given = self._advance(model, block, index, states, stream, collector)
                largest = torch.stack([largest, *processes.gathered(given)]).max()
                found.append(collector.tensors())
            statistics = found[0] | {f"{name}.output_absmax": largest}
            for linear in model.block_linears(index):
                hygiene.refuse_few(linear, int(statistics[f"{linear}.tokens"]), self.least_tokens)
                statistics |= compared(linear, *found)
            if dtype == torch.float16:
                local = {key.removeprefix(f"{name}."): t for key, t in statistics.items()}
                guards.refuse_overflow(model.config, name, block, local)
        return statistics

    def _advance(
        self,
        model: BlockModel,
        block: nn.Module,
        index: int,
        states: HiddenStates,
        stream: Stream,
        collector: Collector,
    ) -> Tensor:
        """Send a stream through the block; the largest value [] that it gives for a real token."""
        largest = torch.zeros(())
        size = together(self.batch, stream.windows.ids.shape[1])
        for rows, hidden in states.batches(stream.name, size):
            ids = stream.windows.ids[rows].to(model.device)
            mask = stream.windows.mask[rows].to(model.device)
            calls = model.calls(ids, mask)
            collector.start(rows.start, mask)
            given = block(hidden.to(model.device), **calls[index])
            real = given[mask.bool()]
            hygiene.refuse_not_finite(model.block_name(index), real)
            largest = torch.maximum(largest, real.abs().max().cpu())
            states.write(stream.name, rows, given)
        return largest


def _model(run: Run) -> BlockModel:
    return BlockModel(
        run.artifacts["dense"],
        device=run.config.device,
        trust_remote_code=run.config.model.trust_remote_code,
    )


def _keep_heldout(model: BlockModel, states: HiddenStates, held: Windows, out: Path) -> float:
    """Write the original's log-probabilities of the held-out windows; returns its perplexity."""
    losses = []

    def logprobs() -> Iterator[Tensor]:
        for rows, hidden in states.batches("heldout", 1):
            found = model.logits(hidden.to(model.device))[0].log_softmax(-1).cpu()
            losses.append(_losses(found, held.ids[rows][0], held.mask[rows]))
            yield found

    heldout.save(out, held.ids, held.mask, logprobs())
    return float(torch.cat(losses).mean().exp())


def _perplexity(model: BlockModel, states: HiddenStates, windows: Windows, like: Tensor) -> float:
    """The original's perplexity on as much of the calibration windows as `like` [n, T] holds."""
    losses = []
    for rows, hidden in itertools.islice(states.batches("calibration", 1), len(like)):
        part = hidden[:, : like.shape[1]].to(model.device)
        found = model.logits(part)[0].log_softmax(-1).cpu()
        losses.append(_losses(found, windows.ids[rows][0], windows.mask[rows]))
    return float(torch.cat(losses).mean().exp())


def _losses(logprobs: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Nats of every real token of `ids` that `logprobs` [T, V] foretells, padded on the right."""
    real = min(len(logprobs), int(mask.sum()))
    return nn.functional.nll_loss(logprobs[: real - 1], ids[1:real], reduction="none")
