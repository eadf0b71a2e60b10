"""Text that the model writes itself: what it begins with, and that a kill changes nothing."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import UserError
from compress.text import written
from compress.text.windows import Windows
from compress.text.written import PIECE, PROMPT, write

T = 96


def windows_of(lengths: list[int]) -> Windows:
    """Windows of T tokens that count up from window to window, padded with 0 after `lengths`."""
    mask = (torch.arange(T) < torch.tensor(lengths).unsqueeze(1)).long()
    return Windows((10 + torch.arange(mask.numel()).view_as(mask)) * mask, mask, 0, "some text")


@given(
    lengths=st.lists(st.integers(0, T), min_size=1, max_size=5).filter(lambda n: max(n) >= PROMPT),
    leading=st.sampled_from([[], [1], [1, 2]]),
    seed=st.integers(0, 99),
)
def test_a_text_begins_with_a_piece_of_a_window(
    lengths: list[int], leading: list[int], seed: int
) -> None:
    windows = windows_of(lengths)
    prompts = written._prompts(windows, 7, leading, seed)
    assert prompts.shape == (7, PROMPT)
    assert prompts[:, : len(leading)].tolist() == [leading] * 7
    body = prompts[:, len(leading) :]
    assert (body.diff() == 1).all()  # one piece, and no padding in it
    assert torch.isin(body, windows.ids[windows.mask.bool()]).all()
    assert ((body[:, 0] - 10) // T == (body[:, -1] - 10) // T).all()  # of one window


def test_every_place_of_a_window_may_begin_a_text() -> None:
    windows = windows_of([T, PROMPT + 1, PROMPT - 1])
    first = written._prompts(windows, 4000, [], 0)[:, 0] - 10
    assert set(first.tolist()) == {*range(T - PROMPT + 1), T, T + 1}
    behind_bos = written._prompts(windows, 4000, [1], 0)[:, 1] - 10
    assert set(behind_bos.tolist()) == {*range(1, T - PROMPT + 2), T + 1, T + 2}


def test_no_window_is_long_enough() -> None:
    with pytest.raises(UserError, match="some text: no window of 32 tokens"):
        written._prompts(windows_of([30, 4]), 1, [1], 0)


def test_killed_between_two_batches_it_writes_the_same(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "BATCH", 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 250, (2, T), generator=generator)
    windows = Windows(ids, torch.ones_like(ids), 0, "some text")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()

    def run(work: Path) -> torch.Tensor:
        return write(tiny_model, windows, 5, leading=[1], seed=3, work=work, device="cpu")

    state = torch.get_rng_state()
    found = run(whole)
    assert torch.equal(state, torch.get_rng_state())
    assert found.shape == (5, T)
    pieces = found.flatten()[: 3 * PIECE].view(3, PIECE)
    prompts = written._prompts(windows, 4, [1], 3)
    assert torch.equal(pieces[:, :PROMPT], prompts[:3])
    assert len(pieces[:, PROMPT:].unique()) > 20  # drawn, not the likeliest again and again

    continued = written._continued
    calls = []

    def once(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return continued(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(written, "_continued", once)
    with pytest.raises(KeyboardInterrupt):
        run(cut)
    assert torch.equal(run(cut), found)
    assert len(calls) == 3  # two batches in all, one of them begun twice
