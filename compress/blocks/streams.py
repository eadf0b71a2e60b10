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
            parts = zip(self.ids.split(batch), self.mask.split(batch), strict=True)
            embedded = (model.embed(i.to(model.device), m.to(model.device)) for i, m in parts)
            self.states.create(QUANTIZED, embedded)
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
        sums: dict[str, Tensor] = {}
        owners: dict[str, str] = {}
        seen: list[tuple[Tensor, str]] = []
        real = torch.empty(0)

        def see(name: str, inputs: Tensor) -> None:
            owner = next((owner for tensor, owner in seen if tensor is inputs), name)
            owners[name] = owner
            if owner != name:
                return
            seen.append((inputs, name))
            rows = inputs[real].float()
            if name not in sums:
                sums[name] = torch.zeros(rows.shape[1], rows.shape[1], device=rows.device)
            sums[name].addmm_(rows.T, rows)

        hooks = [
            block.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: see(name, args[0])
            )
            for name in names
        ]
        try:
            for rows, hidden in self.states.batches(QUANTIZED, self._together):
                seen.clear()
                real = self.mask[rows].bool().to(self.model.device)
                call = self._call(rows, index)
                block(hidden.to(self.model.device), **call)
        finally:
            for hook in hooks:
                hook.remove()
        tokens = int(self.mask.sum())
        return [
            ([name for name in owners if owners[name] == owner], total.div_(tokens))
            for owner, total in sums.items()
        ]

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
