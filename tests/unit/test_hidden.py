"""Hidden states on disk: what goes in comes out, and a kill at any byte changes nothing."""

import contextlib
import errno
import io
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.blocks import hidden
from compress.blocks.hidden import HiddenStates
from compress.errors import UserError

BLOCKS = 3


def windows(n: int = 5, t: int = 3, h: int = 4) -> Tensor:
    return torch.randn(n, t, h, generator=torch.Generator().manual_seed(1))


def through(block: int, states: Tensor) -> Tensor:
    """A stand-in for a block: no two do the same."""
    return states * (block + 2) + torch.arange(states.shape[-1])


def test_streams_move_together_or_apart(tmp_path: Path) -> None:
    start = windows()
    states = HiddenStates(tmp_path)
    states.create("full", start.split(2))
    states.copy("full", "quantized")
    assert states.shape("quantized") == (5, 3, 4)
    for rows, x in states.batches("full", 2):
        states.write("full", rows, through(0, x))
        states.write("quantized", rows, through(1, x))
    assert torch.equal(states.read("full", [4, 1]), start[[4, 1]])
    assert torch.equal(states.read("full", [4, 1], ahead=True), through(0, start)[[4, 1]])
    states.commit("full")
    assert (states.done("full"), states.done("quantized")) == (1, 0)
    assert torch.equal(states.read("full", slice(0, 9)), through(0, start))
    assert torch.equal(states.read("quantized", slice(3, 5)), start[3:5])
    states.commit("quantized")
    assert torch.equal(states.read("quantized", [2]), through(1, start)[[2]])

    again = HiddenStates(tmp_path)
    assert torch.equal(again.read("full", slice(0, 5)), through(0, start))
    assert "full" in again
    assert {f.name for f in tmp_path.glob("*.bin")} == {
        f"hidden_{name}_0001.bin" for name in ("full", "quantized")
    }


def test_disk_holds_one_copy_and_a_second_inside_a_block(tmp_path: Path) -> None:
    def used() -> int:
        return sum(f.stat().st_size for f in tmp_path.glob("*.bin"))

    states = HiddenStates(tmp_path)
    states.create("held", [windows()])
    one = 5 * 3 * 4 * 4
    assert used() == one
    states.write("held", slice(0, 5), windows())
    assert used() == 2 * one
    states.commit("held")
    assert used() == one


def test_what_was_not_written_cannot_be_committed_or_read(tmp_path: Path) -> None:
    states = HiddenStates(tmp_path)
    states.create("held", [windows()])
    states.write("held", slice(0, 4), windows()[:4])
    with pytest.raises(ValueError, match=r"windows \[4\] were not written"):
        states.commit("held")
    with pytest.raises(ValueError, match="not all written"):
        states.read("held", [0, 4], ahead=True)
    with pytest.raises(ValueError, match="2 x 3 x 4"):
        states.write("held", slice(0, 2), windows())
    with pytest.raises(ValueError, match="there already"):
        states.create("held", [windows()])


def test_damaged_scratch_is_named(tmp_path: Path) -> None:
    HiddenStates(tmp_path).create("held", [windows()])
    os.truncate(tmp_path / "hidden_held_0000.bin", 100)
    with pytest.raises(UserError, match=r"hidden_held_0000\.bin: 100 bytes, wanted 240"):
        HiddenStates(tmp_path)


def test_full_disk_is_an_error_with_the_files_name() -> None:
    class Full(io.BytesIO):
        name = "hidden_held_0001.bin"

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: 'hidden_held_0001\.bin'") as error:
        hidden._write(Full(), windows())
    assert error.value.errno == errno.ENOSPC


class Killed(Exception):
    pass


class Fuse:
    """Burns by a byte for each byte written and each change to the folder; kills at its end."""

    def __init__(self, length: int) -> None:
        self.left = length

    def burn(self, wanted: int = 1) -> int:
        """How much of `wanted` is done before the end."""
        done = min(wanted, self.left)
        self.left -= done
        return done

    def write(self, file: BinaryIO, states: Tensor) -> None:
        data = states.contiguous().numpy().tobytes()
        done = self.burn(len(data))
        file.write(data[:done])
        if done < len(data):
            raise Killed

    def around(self, change: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            for step in (lambda: None, lambda: change(*args, **kwargs)):
                if not self.burn():
                    raise Killed
                step()

        return call


def run_all(folder: Path) -> Path:
    """Both streams through all blocks, from wherever the folder stands; `quantized` goes ahead."""
    states = HiddenStates(folder)
    for name in ("full", "quantized", "held"):
        if name not in states:
            states.create(name, windows().split(2))
    for _ in range(states.done("quantized"), BLOCKS):
        for rows, x in states.batches("quantized", 2):
            states.write("quantized", rows, through(7, x))
        states.commit("quantized")
    for index in range(states.done("full"), BLOCKS):
        for name in ("full", "held"):
            for rows, x in states.batches(name, 3):
                states.write(name, rows, through(index, x))
        states.commit("full", "held")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@settings(max_examples=40, deadline=None)
@given(fuses=st.lists(st.integers(0, 3000), min_size=1, max_size=6))
def test_killed_anywhere_and_again_the_bytes_are_the_same(fuses: list[int]) -> None:
    with (
        tempfile.TemporaryDirectory() as alone,
        tempfile.TemporaryDirectory() as often,
        pytest.MonkeyPatch.context() as quick,
    ):
        quick.setattr(os, "fsync", lambda descriptor: None)
        for length in fuses:
            fuse = Fuse(length)
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
                patch.setattr(hidden, "_write", fuse.write)
                patch.setattr(hidden, "write_json", fuse.around(hidden.write_json))
                patch.setattr(Path, "unlink", fuse.around(Path.unlink))
                run_all(Path(often))
        assert content(run_all(Path(often))) == content(run_all(Path(alone)))
