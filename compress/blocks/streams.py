"""Hidden states of the calibration windows on their way through the blocks: as the blocks
quantized so far give them and, where these are to learn from it, as the original does.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.algorithms.learned import Window
from compress.blocks.hessians import Hessians
from compress.blocks.hidden import HiddenStates, together
from compress.model import BlockModel

FULL, QUANTIZED = "full", "quantized"


class CalibrationStreams:
    """Streams of the windows in `file` through `model`, kept in `work`.

    file: ids and mask [n, T], and ids that the model wrote itself, `written` [m, T], if any.
    batch: windows that go through a block together (see `hidden.together`). targets: whether the
    original's stream is wanted, to learn from it, and with it what was written. For every block:
    with targets, `advance(FULL)` while it is as it was; then what needs inputs and targets;
    `advance(QUANTIZED)` when it is quantized; and `commit`, from which an interrupted run goes on.
    """

    def __init__(
        self, model: BlockModel, file: Path, work: Path, batch: int, *, targets: bool
    ) -> None:
        self.model, self.batch, self.targets = model, batch, targets
        windows = load_file(file)
        self.ids, self.mask = windows["ids"], windows["mask"]
        if targets and "written" in windows:
            self.ids = torch.cat([self.ids, windows["written"]])
            self.mask = torch.cat([self.mask, torch.ones_like(windows["written"])])
        self.states = HiddenStates(work)
        self._together = together(batch, self.ids.shape[1])
        if QUANTIZED not in self.states:
            self.states.create(QUANTIZED, model.embedded(self.ids, self.mask, batch))
        if targets and FULL not in self.states:
            self.states.copy(QUANTIZED, FULL)

    @property
    def done(self) -> int:
        """Blocks that have been passed."""
        return self.states.done(QUANTIZED)

    def advance(self, name: str, block: nn.Module, index: int) -> None:
        """Send a stream through the block, to be kept at the next `commit`."""
        for rows, hidden in self.states.batches(name, self._together):
            call = self._call(rows, index)
            self.states.write(name, rows, block(hidden.to(self.model.device), **call))

    def commit(self) -> None:
        """Let the block be passed."""
        self.states.commit(*([FULL] if self.targets else []), QUANTIZED)

    def window(self, number: int, index: int) -> Window:
        """A window: what block `index` gets from the quantized ones before it, and what the
        original gave.
        """
        device = self.model.device
        return Window(
            self.states.read(QUANTIZED, [number]).to(device),
            self.states.read(FULL, [number], ahead=True).to(device),
            self.mask[[number]].to(device, torch.float32),
            self._call([number], index),
        )

    def first(self, index: int) -> Iterator[Window]:
        """The first windows, for comparing before and after."""
        return (self.window(number, index) for number in range(min(self.batch, len(self.ids))))

    def drawn(self, index: int, seed: int) -> Iterator[Iterator[Window]]:
        """`batch` different windows after the other, in random order, without end; each window
        once before any twice. They are read one at a time.
        """
        generator = torch.Generator().manual_seed(seed)
        waiting: list[int] = []
        size = min(self.batch, len(self.ids))
        while True:
            if len(waiting) < size:
                again = torch.randperm(len(self.ids), generator=generator).tolist()
                waiting += sorted(again, key=waiting.__contains__)  # none twice in one step
            numbers, waiting = waiting[:size], waiting[size:]
            yield (self.window(number, index) for number in numbers)

    def hessians(
        self, block: nn.Module, index: int, names: Iterable[str]
    ) -> list[tuple[list[str], Tensor]]:
        """X^T X [K, K], a token's mean, of what the linears `names` of the block get from the
        quantized ones before it, each after the names of all that read the same tensor.
        """
        with Hessians(block, names) as found:
            for rows, hidden in self.states.batches(QUANTIZED, self._together):
                found.start(self.mask[rows].to(self.model.device))
                block(hidden.to(self.model.device), **self._call(rows, index))
        return found.means()

    def _call(self, rows: slice | list[int], index: int) -> Mapping[str, object]:
        device = self.model.device
        ids, mask = self.ids[rows].to(device), self.mask[rows].to(device)
        return self.model.calls(ids, mask)[index]


@contextmanager
def swapped(block: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """The block with other modules in the places of some, which are put back at the end."""
    before = {name: block.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            block.set_submodule(name, module)
        yield
    finally:
        for name, module in before.items():
            block.set_submodule(name, module)
