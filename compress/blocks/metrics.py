"""Which errors of what a block gives matter to what the model says.

Of a change d of a block's output [H] the KL to the original is, to second order, half of the mean
of (g d)^2, where g is the gradient, there, of the log-probability of a token that is drawn from the
model's own predictions. So d^T F d with F = E[g g^T], the Fisher information, averaged over tokens,
stands for it; |d|^2 alone takes all directions for alike. A share of the identity beside it holds
what few gradients say nothing of.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.blocks.gradients import Gradients, Passage
from compress.blocks.hidden import HiddenStates
from compress.model import BlockModel
from compress.text.windows import Windows

TOKENS = 512
"""Of a window that gradients are taken on: what is on disk meanwhile grows with them."""
ALIKE = 0.2
"""Share of the identity in a metric."""
KEY = "fisher"


@dataclass(frozen=True)
class Metrics:
    """The metrics of all blocks, in `folder`, once they are made."""

    folder: Path

    def make(self, model: BlockModel, file: Path, count: int, batch: int, seed: int) -> None:
        """Take gradients on the first `count` of the calibration windows in `file`, unless it was
        done: what goes into each block, and the gradients there, are on disk meanwhile.

        batch: windows that go through a block together. seed: of the tokens drawn.
        """
        if all(self._file(index).exists() for index in range(len(model))):
            return
        found, part = load_file(file), (slice(count), slice(TOKENS))
        windows = Windows(found["ids"][part], found["mask"][part])
        streams = self.folder / "streams"
        streams.mkdir(parents=True, exist_ok=True)
        passage = Passage(model, HiddenStates(streams), windows, batch)
        gradients = Gradients(passage, seed, "quantize")
        gradients.make()
        for index in range(len(model)):
            total: Tensor | float = 0.0
            for given in gradients.given(index):
                rows = given.flatten(0, 1).to(model.device)
                total = total + rows.T @ rows
            assert isinstance(total, Tensor)
            fisher = total / total.diagonal().mean()
            fisher = (1 - ALIKE) * fisher + ALIKE * torch.eye(len(fisher), device=fisher.device)
            whole = self._file(index).with_suffix(".partial")
            save_file({KEY: fisher.cpu()}, whole)
            whole.replace(self._file(index))
        shutil.rmtree(streams)

    def of(self, index: int, device: str) -> Tensor | None:
        """The metric [H, H] of a block, its diagonal 1 in the mean; None where none was made."""
        file = self._file(index)
        return load_file(file)[KEY].to(device) if file.exists() else None

    def _file(self, index: int) -> Path:
        return self.folder / f"block_{index:03d}.safetensors"
