"""Gradients of what a model predicts, at what goes into each of its blocks, kept on disk.

Tokens are drawn from the model's own predictions, so that the mean of g g^T over them, g being the
gradient of their log-probability, is the Fisher information (Amari 1998, Natural Gradient Works
Efficiently in Learning). Two passes read the blocks from disk, one at a time: forward, keeping what
goes into each, and backward. Killed at any moment, they go on from the last block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.blocks.hidden import HiddenStates, together
from compress.log import progress
from compress.model import BlockModel
from compress.text.windows import Windows

LOGITS = 1 << 26
"""Logits that are drawn from at a time: 268 MB in float32, of which a few copies are held. The head
is read from disk once for each such part."""


@dataclass(frozen=True)
class Passage:
    """How windows go through the blocks of `model`: `batch` of them together, kept in `states`."""

    model: BlockModel
    states: HiddenStates
    windows: Windows
    batch: int

    def begin(self, name: str) -> None:
        """Make the stream `name` of what goes into the first block, if it is not there."""
        if name not in self.states:
            windows = self.windows
            self.states.create(name, self.model.embedded(windows.ids, windows.mask, self.batch))

    def batches(
        self, name: str, index: int
    ) -> Iterator[tuple[slice, Tensor, Mapping[str, object]]]:
        """A stream a batch at a time: rows, hidden states, and the other arguments of a block."""
        device, windows = self.model.device, self.windows
        for rows, hidden in self.states.batches(name, together(self.batch, windows.ids.shape[1])):
            ids, mask = windows.ids[rows].to(device), windows.mask[rows].to(device)
            yield rows, hidden.to(device), self.model.calls(ids, mask)[index]


@dataclass(frozen=True)
class Gradients:
    """Gradients on the windows of `passage`. seed: of the tokens drawn."""

    passage: Passage
    seed: int

    def make(self) -> None:
        """Keep what goes into each block, and the gradients there, but for the first block."""
        self._forward()
        self._backward()

    def through(self, block: nn.Module, index: int) -> Iterator[Tensor]:
        """Pass the block there and back, a batch at a time; gives the gradients of what goes in."""
        for rows, hidden, call in self.passage.batches(_inputs(index), index):
            leaf = hidden.requires_grad_()
            with torch.enable_grad():
                given = block(leaf, **call)
            after = self.passage.states.read(_gradients(index + 1), rows)
            given.backward(after.to(given.device))
            assert leaf.grad is not None
            yield leaf.grad

    def _forward(self) -> None:
        model, states = self.passage.model, self.passage.states
        self.passage.begin(_inputs(0))
        done = sum(_inputs(index + 1) in states for index in range(len(model)))
        for index in blocks(range(done, len(model)), "forward", len(model)):
            with model.block(index) as block:
                batches = self.passage.batches(_inputs(index), index)
                given = (block(hidden, **call) for _, hidden, call in batches)
                states.create(_inputs(index + 1), given)

    def _backward(self) -> None:
        model, states = self.passage.model, self.passage.states
        if _gradients(len(model)) not in states:
            last = states.batches(_inputs(len(model)), 1)
            drawn = (self._drawn(rows, hidden) for rows, hidden in last)
            states.create(_gradients(len(model)), drawn)
        done = sum(_gradients(index) in states for index in range(1, len(model)))
        for index in blocks(range(len(model) - 1 - done, 0, -1), "backward", len(model)):
            with model.block(index) as block:
                states.create(_gradients(index), self.through(block, index))

    def _drawn(self, rows: slice, hidden: Tensor) -> Tensor:
        """The gradients [1, T, H], at what the last block gives for a window, of the
        log-probabilities of tokens drawn from the model's predictions; 0 for padding.
        """
        model = self.passage.model
        real = int(self.passage.windows.mask[rows].sum())
        generator = torch.Generator(model.device).manual_seed(self.seed + rows.start)
        step = max(1, LOGITS // model.config.get_text_config().vocab_size)
        found = torch.zeros_like(hidden)
        for first in range(0, real, step):
            part = slice(first, min(first + step, real))
            leaf = hidden[:, part].to(model.device).requires_grad_()
            with torch.enable_grad():
                logprobs = model.logits(leaf)[0].float().log_softmax(-1)
                drawn = torch.multinomial(logprobs.detach().exp(), 1, generator=generator)
                logprobs.gather(1, drawn).sum().backward()
            assert leaf.grad is not None
            found[:, part] = leaf.grad.cpu()
        return found


def blocks(numbers: range, what: str, total: int) -> Iterator[int]:
    """The numbers of blocks still to be passed, with a bar on the console."""
    return progress(numbers, f"allocate, {what}", "block", total=total, done=total - len(numbers))


def _inputs(index: int) -> str:
    """The stream of what goes into a block."""
    return f"inputs{index:03d}"


def _gradients(index: int) -> str:
    """The stream of the gradients of what goes into a block."""
    return f"gradients{index:03d}"
