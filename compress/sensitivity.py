"""What each layer costs the whole model in each format, alone: KL(original || variant).

A variant is the original with some linears of one block in another format. All variants go through
the model together: a block is read from disk once, the variants of the blocks before it pass it as
it is, and its own branch off there. Their hidden states lie on disk, those of one block in a
stream, so memory is that of a block and of a batch of windows; with B blocks, v variants a block
and windows of T tokens in all, B v T H float32 values of disk, and time of B v / 2 passes of the
model. Killed at any moment, it goes on from the last stream that passed a block.

The method is that of a one-at-a-time sensitivity on the model's own output, as in HAWQ (Dong et
al. 2019, arXiv:1905.03696) and ZeroQ (Cai et al. 2020, arXiv:2001.00281), measured, not estimated.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.algorithms.blockwise import clip_of, weight_of
from compress.algorithms.rtn import rtn
from compress.artifact import write_json
from compress.collector import load_block_statistics
from compress.hidden import HiddenStates, together
from compress.log import progress
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.streams import swapped
from compress.trainable import ScaleLinear

ORIGINAL = "original"
LOGITS = 1 << 26
"""Logits that are compared at a time: 268 MB in float32, of which a few copies are held. The head
is read from disk once for each such part."""


@dataclass(frozen=True)
class Variant:
    """Some linears of a block, by their names in it, in another format."""

    names: tuple[str, ...]
    spec: QuantSpec


@dataclass(frozen=True)
class Sensitivity:
    """KL of variants of `model` on windows `ids`, `mask` [n, T], padded on the right.

    variants: those of each block. statistics: of the blocks' linears, for the clips. dtype: of
    scales. work: where hidden states are kept. batch: windows that pass a block together.

    A variant is rounded to nearest with searched clips (`clip_of`, `rtn`), and with INT8 inputs
    where its spec says so. This is a proxy: the quantizer may smooth, and round by GPTQ or by
    learning, which cost less, and not everywhere by the same factor.
    """

    model: BlockModel
    ids: Tensor
    mask: Tensor
    variants: Sequence[Sequence[Variant]]
    statistics: Path
    dtype: torch.dtype
    work: Path
    batch: int

    @torch.no_grad()
    def measure(self) -> list[list[float]]:
        """The KL of every variant, in nats a token, mean over the tokens that are no padding."""
        model, states = self.model, HiddenStates(self.work)
        size = together(self.batch, self.ids.shape[1])
        parts = [slice(i, i + size) for i in range(0, len(self.ids), size)]
        batches = [(self.ids[p].to(model.device), self.mask[p].to(model.device)) for p in parts]
        if ORIGINAL not in states:
            states.create(ORIGINAL, (model.embed(*batch) for batch in batches))
        calls = [model.calls(*batch) for batch in batches]
        first = states.done(ORIGINAL)
        for index in progress(
            range(first, len(model)), "allocate", "block", total=len(model), done=first
        ):
            with model.block(index) as block:
                pass_on = _Passage(states, block, [call[index] for call in calls], parts, model)
                for earlier in range(index):
                    # A stream begins with what its block gave, so it has passed one block less.
                    name = _stream(earlier)
                    if name in states and states.done(name) == index - earlier - 1:
                        pass_on.all_windows(name)
                if self.variants[index] and _stream(index) not in states:
                    states.create(_stream(index), self._branch_off(pass_on, index))
                pass_on.all_windows(ORIGINAL)
        found = []
        for index, variants in enumerate(self.variants):
            file = self.work / f"kl_{index:03d}.json"
            if not file.exists():
                write_json(file, self._distances(states, index) if variants else [])
            found.append(json.loads(file.read_text()))
        return found

    def _branch_off(self, pass_on: "_Passage", index: int) -> Iterator[Tensor]:
        """What the block gives for the original's windows, in each of its variants."""
        statistics = load_block_statistics(self.statistics, index)
        prefix = f"{self.model.block_name(index)}."
        local = {n.removeprefix(prefix): t.to(self.model.device) for n, t in statistics.items()}
        for variant in self.variants[index]:
            with swapped(pass_on.block, self._served(pass_on.block, variant, local)):
                for part in range(len(pass_on.parts)):
                    yield pass_on.one(ORIGINAL, 0, part)[1]

    def _served(
        self, block: nn.Module, variant: Variant, statistics: Mapping[str, Tensor]
    ) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {}
        for name in variant.names:
            weight, spec = weight_of(block, name), variant.spec
            clip = clip_of(weight, statistics[f"{name}.rows"], None, spec, self.dtype)
            bias = block.get_submodule(name).bias
            rounded = rtn(weight, spec, self.dtype, clip)
            modules[name] = ScaleLinear(rounded, bias if isinstance(bias, Tensor) else None)
        return modules

    def _distances(self, states: HiddenStates, index: int) -> list[float]:
        """KL of the variants of a block, from what the last block gave."""
        count, windows = len(self.variants[index]), len(self.ids)
        vocabulary = self.model.config.get_text_config().vocab_size
        step = max(1, LOGITS // (vocabulary * (1 + count)))
        sums, device = torch.zeros(count, dtype=torch.float64), self.model.device
        for window in range(windows):
            real = int(self.mask[window].sum())
            of_variants = [window + number * windows for number in range(count)]
            rows = [
                states.read(ORIGINAL, [window])[:, :real],
                states.read(_stream(index), of_variants)[:, :real],
            ]
            for hidden in torch.cat(rows).split(step, dim=1):
                logprobs = self.model.logits(hidden.to(device)).float().log_softmax(-1)
                wanted = logprobs[0]
                for number, found in enumerate(logprobs[1:]):
                    sums[number] += float((wanted.exp() * (wanted - found)).sum())
        return (sums / int(self.mask.sum())).tolist()


@dataclass(frozen=True)
class _Passage:
    """A block, and how windows are sent through it: `parts` of the windows with their calls."""

    states: HiddenStates
    block: nn.Module
    calls: Sequence[Mapping[str, object]]
    parts: Sequence[slice]
    model: BlockModel

    def one(self, name: str, first: int, part: int) -> tuple[slice, Tensor]:
        """Rows of a part of the windows, which begin at row `first`, and what becomes of them."""
        windows = self.states.shape(ORIGINAL)[0]
        start, stop = self.parts[part].start, min(self.parts[part].stop, windows)
        rows = slice(first + start, first + stop)
        hidden = self.states.read(name, rows).to(self.model.device)
        return rows, self.block(hidden, **self.calls[part])

    def all_windows(self, name: str) -> None:
        """Let a stream pass the block."""
        rows, windows = self.states.shape(name)[0], self.states.shape(ORIGINAL)[0]
        for first in range(0, rows, windows):
            for part in range(len(self.parts)):
                self.states.write(name, *self.one(name, first, part))
        self.states.commit(name)


def _stream(index: int) -> str:
    """The variants of a block: the windows of the first, then those of the second, ..."""
    return f"block{index:03d}"
