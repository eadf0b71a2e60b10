"""What of a model can go: how much it misses each block, MLP channel and KV group, by some text.

The blocks are read from disk one at a time; hidden states of the windows in front of every block
stay in memory: 4 L n T H bytes, 0.5 GB for 1024 tokens of a 7B.
"""

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from compress import source
from compress.algorithms.divergence import forward_kl
from compress.algorithms.prune import (
    Removal,
    channel_importance,
    group_importance,
    lazy_greedy,
    most_important,
)
from compress.algorithms.soft_labels import (
    student_log_probabilities,
    teacher_log_probabilities,
    top_k,
)
from compress.artifact import write_json
from compress.log import logger, progress
from compress.model import BlockModel
from compress.text.windows import Windows
from compress.training.cutting import ATTENTION_OUT, MLP_OUT, Cut, Size, size_of

VERSION = 2
"""Raised whenever the same trial would give another result."""
TOP_K = 64
"""The original's likeliest tokens by which models with blocks left out are compared to it."""


def choose(
    model: BlockModel, windows: Windows, file: Path, wanted: Size
) -> tuple[Cut, list[Removal]]:
    """What of `model` stays where it is cut to `wanted`, by what `windows` say it misses least; and
    the blocks that go, in their order. file: where trials are kept (see `Trials`).
    """
    whole = size_of(model.config)
    removed = _without(model, windows, file, whole.blocks - wanted.blocks)
    gone = {removal.block for removal in removed}
    blocks = [block for block in range(whole.blocks) if block not in gone]
    groups, channels = list(range(whole.kv_heads)), list(range(whole.mlp))
    cut = Cut(blocks, [groups] * len(blocks), [channels] * len(blocks))
    if (wanted.kv_heads, wanted.mlp) == (whole.kv_heads, whole.mlp):
        return cut, removed
    squares = mean_squares(model, windows, (ATTENTION_OUT, MLP_OUT))
    for place, block in enumerate(blocks):
        out, down = (
            model.tensors[f"{model.block_name(block)}.{name}.weight"]
            for name in (ATTENTION_OUT, MLP_OUT)
        )
        of_groups = group_importance(squares[block][ATTENTION_OUT], out, whole.kv_heads)
        of_channels = channel_importance(squares[block][MLP_OUT], down)
        cut.kv_heads[place] = most_important(of_groups, wanted.kv_heads)
        cut.mlp[place] = most_important(of_channels, wanted.mlp)
    return cut, removed


def _without(model: BlockModel, windows: Windows, file: Path, count: int) -> list[Removal]:
    if count == 0:
        return []
    trials = Trials(model, windows, file)
    bar = progress(itertools.count(), "leave out", "trial")

    def cost_of(left_out: tuple[int, ...]) -> float:
        next(bar)
        return trials.kl_without(left_out)

    found = lazy_greedy(range(len(model)), count, cost_of)
    gone = ", ".join(str(removal.block) for removal in found)
    logger.info(f"  blocks left out, by {len(trials.known)} trials: {gone}")
    return found


class Trials:
    """`model` with blocks left out, beside itself, on `windows`.

    Results are kept in `file`, for a killed process to go on from, and for other cuts of the same
    model by the same windows.
    """

    def __init__(self, model: BlockModel, windows: Windows, file: Path) -> None:
        self.model, self.rows, self.file = model, rows_of(model, windows), file
        text = hashlib.sha256(windows.ids.numpy().tobytes() + windows.mask.numpy().tobytes())
        self.key = {
            "version": VERSION,
            "model": source.fingerprint(model.folder),
            "dtype": str(model.dtype),
            "text": text.hexdigest(),
        }
        found = json.loads(file.read_text()) if file.exists() else {}
        self.known: dict[str, float] = found["kl"] if found.get("key") == self.key else {}
        self._inputs: list[list[Tensor]] = []
        self._original: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def kl_without(self, left_out: tuple[int, ...]) -> float:
        """KL(original || model without these blocks), nats a token."""
        key = " ".join(map(str, left_out))
        if key not in self.known:
            self.known[key] = self._kl_without(left_out)
            write_json(self.file, {"key": self.key, "kl": self.known})
        return self.known[key]

    def _kl_without(self, left_out: tuple[int, ...]) -> float:
        if not self._original:
            self._run_original()
        first = min(left_out)
        hidden = self._through(range(first, len(self.model)), left_out, self._inputs[first])
        found = []
        for states, (kept, teacher) in zip(hidden, self._original, strict=True):
            said = student_log_probabilities(self.model.logits(states), kept)
            found.append(forward_kl(teacher, said) * states.shape[1])
        return float(torch.stack(found).sum()) / sum(row.numel() for row in self.rows)

    def _run_original(self) -> None:
        """Keep what goes into every block of the original, and what the original says."""
        hidden = [self.model.embed(row) for row in self.rows]
        for index in range(len(self.model)):
            self._inputs.append(hidden)
            hidden = self._through([index], (), hidden)
        for states in hidden:
            kept, probabilities, rest = top_k(self.model.logits(states), TOP_K)
            self._original.append((kept, teacher_log_probabilities(probabilities, rest)))

    def _through(
        self, blocks: Sequence[int], left_out: tuple[int, ...], hidden: list[Tensor]
    ) -> list[Tensor]:
        for index in blocks:
            if index not in left_out:
                with self.model.block(index) as block:
                    hidden = [
                        block(states, **self.model.calls(row)[index])
                        for states, row in zip(hidden, self.rows, strict=True)
                    ]
        return hidden


@torch.no_grad()
def mean_squares(
    model: BlockModel, windows: Windows, linears: Sequence[str]
) -> list[dict[str, Tensor]]:
    """Of every block the mean square [K] of each channel that goes into `linears` (their names in
    the block), over the tokens of `windows`.
    """
    rows = rows_of(model, windows)
    hidden = [model.embed(row) for row in rows]
    found = []
    for index in range(len(model)):
        sums: dict[str, Tensor] = {}
        with model.block(index) as block:
            hooks = [_adds_squares(block.get_submodule(name), name, sums) for name in linears]
            hidden = [
                block(states, **model.calls(row)[index])
                for states, row in zip(hidden, rows, strict=True)
            ]
            for hook in hooks:
                hook.remove()
        found.append({name: total.cpu() / windows.tokens for name, total in sums.items()})
    return found


def _adds_squares(
    linear: nn.Module, name: str, sums: dict[str, Tensor]
) -> torch.utils.hooks.RemovableHandle:
    def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares = inputs[0].float().square().flatten(0, -2).sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

    return linear.register_forward_pre_hook(add)


def rows_of(model: BlockModel, windows: Windows) -> list[Tensor]:
    """The tokens [1, t] of each window, without its padding."""
    sizes = windows.mask.sum(1).tolist()
    return [
        row[:size].unsqueeze(0).to(model.device)
        for row, size in zip(windows.ids, sizes, strict=True)
    ]
