"""Memory for weights on CPU: side by side, in huge pages where the system gives them.

Decoding reads every weight once a token, and in pages of 4 KiB, each matrix somewhere on the heap,
looking up pages adds to that: docs/kernels.md has what these here were measured to save.
"""

import contextlib
import mmap

import torch
from torch import Tensor

CHUNK = 1 << 26
"""Bytes asked of the system at once; what is not written to takes no memory."""
ALIGNMENT = 64


class Pages:
    """Places tensors one after the other."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def place(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous copy of `tensor` as `dtype`, with a storage of its own."""
        if not tensor.numel():
            return tensor.to(dtype, copy=True)
        size = tensor.numel() * dtype.itemsize
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _reserve(max(CHUNK, size)), 0
        flat = torch.frombuffer(self._chunk, dtype=dtype, count=tensor.numel(), offset=self._used)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return flat.view(tensor.shape).copy_(tensor)


def _reserve(size: int) -> mmap.mmap:
    # Private: shared memory, Python's default, gets no huge pages.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
