"""Weights side by side in memory: the same values, each in a storage of its own."""

import mmap

import pytest
import torch

from compress.runtime import pages
from compress.runtime.pages import Pages


def test_tensors_are_copied_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "CHUNK", 4096)
    place = Pages().place
    tensors = [torch.randn(3, 5), torch.randn(()), torch.randn(0, 7), torch.randn(40, 30).t()]
    placed = [place(tensor, torch.bfloat16) for tensor in [*tensors, tensors[0]]]
    for tensor, found in zip(tensors, placed, strict=False):
        assert torch.equal(found, tensor.bfloat16())
        assert found.is_contiguous()
    first, second = placed[0].data_ptr(), placed[1].data_ptr()
    assert second - first == pages.ALIGNMENT
    # The fourth is half of a chunk: what comes after it lies beside it.
    assert placed[4].data_ptr() - placed[3].data_ptr() == -(-2400 // 64) * 64
    placed[0].zero_()
    assert torch.equal(placed[4], tensors[0].bfloat16())
    assert len({tensor.untyped_storage().data_ptr() for tensor in placed}) == len(placed)
    large = place(torch.ones(10_000, dtype=torch.int8), torch.int8)
    assert large.sum() == 10_000


class WithoutHugePages(mmap.mmap):
    """As of a kernel that was built without them."""

    def madvise(self, *_: object) -> None:
        raise OSError(22, "Invalid argument")


def test_a_kernel_without_huge_pages_gives_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    assert Pages().place(torch.ones(3), torch.float32).sum() == 3
