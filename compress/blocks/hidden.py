"""Hidden states of many windows on disk, as they move through a model's blocks.

    states = HiddenStates(run.work)
    if "held" not in states:
        states.create("held", (model.embed(ids) for ids in batches))
    for index in range(states.done("held"), len(model)):
        with model.block(index) as block:
            for rows, hidden in states.batches("held", 4):
                states.write("held", rows, block(hidden))
        states.commit("held")

A stream is n windows of T tokens with H channels in float32. It takes 4 n T H bytes of disk, and
as much again from the first write towards the next block to the commit: 128 windows of 512 tokens
of a model with H = 4096 are 1.07 GB, and 2.15 GB inside a block. Memory is that of what is read
and written at a time; files are read and written, not mapped, since mapped pages count as the
process's own.

Killed at any moment, a process that opens the folder again finds the states of the last commit,
and no trace of what was written after it. Several processes can move one stream: each opens the
folder, `batches` gives each its share, and all of them `commit`.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from compress import processes
from compress.artifact import write_json
from compress.errors import UserError

STATE = "hidden.json"
FLOAT32 = 4  # bytes
TOKENS = 4096
"""Tokens that go through a block together: 180 MB of each activation of a 7B's MLP."""


def together(batch: int, length: int) -> int:
    """Windows of `length` tokens that go through a block at a time: `batch`, or as TOKENS allow."""
    return max(1, min(batch, TOKENS // length))


class HiddenStates:
    """Named streams of hidden states [n, T, H] in `folder`, each with the blocks it has passed.

    Raises OSError, with the file's name, where the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = folder / STATE
        self._streams: dict[str, tuple[int, list[int]]] = (
            {name: (done, shape) for name, (done, shape) in json.loads(state.read_text()).items()}
            if state.exists()
            else {}
        )
        self._written: dict[str, set[int]] = {}
        committed = {self._file(name, done): shape for name, (done, shape) in self._streams.items()}
        for file in folder.glob("hidden_*.bin"):
            if file not in committed:
                file.unlink()
        for file, (n, t, h) in committed.items():
            found = file.stat().st_size if file.exists() else 0
            if found != n * t * h * FLOAT32:
                raise UserError(
                    f"{file}: {found} bytes, wanted {n * t * h * FLOAT32}; the scratch of the "
                    f"interrupted run was damaged: remove {folder.parent} and run again"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def done(self, name: str) -> int:
        """How many blocks the stream has passed."""
        return self._streams[name][0]

    def shape(self, name: str) -> tuple[int, int, int]:
        """Windows n, tokens a window T, channels H."""
        n, t, h = self._streams[name][1]
        return n, t, h

    def create(self, name: str, parts: Iterable[Tensor]) -> None:
        """Begin a stream with what goes into the first block: `parts` [b, T, H], in order."""
        if name in self:
            raise ValueError(f"{name}: there already, at block {self.done(name)}")
        file = self._file(name, 0)
        shape: list[int] = []
        with file.open("wb", buffering=0) as opened:
            for part in parts:
                _write(opened, part)
                shape = [part.shape[0] + (shape[0] if shape else 0), *part.shape[1:]]
            os.fsync(opened.fileno())
        self._note({**self._streams, name: (0, shape)})

    def copy(self, name: str, new: str) -> None:
        """Begin the stream `new` with what `name` holds, at the same block."""
        done, shape = self._streams[name]
        with self._file(new, done).open("wb", buffering=0) as opened:
            for first in range(shape[0]):
                _write(opened, self.read(name, slice(first, first + 1)))
            os.fsync(opened.fileno())
        self._note({**self._streams, new: (done, shape)})

    def read(self, name: str, rows: slice | Sequence[int], *, ahead: bool = False) -> Tensor:
        """Windows [b, T, H] of a stream, float32, as they were at the last commit.

        rows: a slice without a step, or the numbers of windows in any order.
        ahead: what was written for the next block instead; those windows must have been written.
        """
        done, (n, t, h) = self._streams[name]
        numbers: Sequence[int] = range(n)[rows] if isinstance(rows, slice) else rows
        if ahead and not self._written.get(name, set()).issuperset(numbers):
            raise ValueError(f"{name}: windows {list(numbers)} are not all written yet")
        found = torch.empty(len(numbers), t, h)
        with self._file(name, done + ahead).open("rb", buffering=0) as opened:
            for number, window in zip(numbers, found, strict=True):
                opened.seek(number * t * h * FLOAT32)
                _read(opened, window)
        return found

    def batches(self, name: str, size: int) -> Iterator[tuple[slice, Tensor]]:
        """The whole stream, `size` windows at a time: their rows, and the states [b, T, H]. Of
        several processes each gets its share.
        """
        for first in processes.share(range(0, self.shape(name)[0], size)):
            rows = slice(first, first + size)
            yield rows, self.read(name, rows)

    def write(self, name: str, rows: slice, states: Tensor) -> None:
        """Put what came out of the next block for the windows `rows`; [b, T, H] on any device.

        Counts from `commit` on; written twice, the later counts.
        """
        done, (n, t, h) = self._streams[name]
        numbers = range(n)[rows]
        if states.shape != (len(numbers), t, h):
            raise ValueError(f"{name}: {list(states.shape)} for {len(numbers)} x {t} x {h}")
        file = self._file(name, done + 1)
        file.touch()
        with file.open("r+b", buffering=0) as opened:
            opened.seek(numbers.start * t * h * FLOAT32)
            _write(opened, states)
        self._written.setdefault(name, set()).update(numbers)

    def commit(self, *names: str) -> None:
        """Let every stream of `names` have passed one block more: all of them, or none.

        What they were before is removed. Raises ValueError where a window was not written, by any
        process.
        """
        written = processes.gathered(self._written)
        for name in names:
            missing = set(range(self.shape(name)[0])).difference(
                *(windows.get(name, ()) for windows in written)
            )
            if missing:
                raise ValueError(f"{name}: windows {sorted(missing)} were not written")
        old = []
        streams = dict(self._streams)
        for name in names:
            done, shape = streams[name]
            with self._file(name, done + 1).open("rb") as opened:
                os.fsync(opened.fileno())
            old.append(self._file(name, done))
            streams[name] = done + 1, shape
        self._note(streams)
        for name, file in zip(names, old, strict=True):
            self._written.pop(name, None)
            if processes.leads():
                file.unlink()

    def _note(self, streams: dict[str, tuple[int, list[int]]]) -> None:
        if processes.leads():
            write_json(self.folder / STATE, streams)
        self._streams = streams

    def _file(self, name: str, done: int) -> Path:
        return self.folder / f"hidden_{name}_{done:04d}.bin"


def _write(file: BinaryIO, states: Tensor) -> None:
    data = states.detach().to("cpu", torch.float32).contiguous().numpy().data.cast("B")
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error


def _read(file: BinaryIO, window: Tensor) -> None:
    data = window.numpy().data.cast("B")
    while data:
        count = file.readinto(data)  # type: ignore[attr-defined]
        if not count:
            raise OSError(None, "ends too early", file.name)
        data = data[count:]
