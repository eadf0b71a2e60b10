"""The tensors of a folder's safetensors files, read when asked for and no earlier.

The files are mapped: what is not touched is not read, and what was touched stays resident until
the tensor and the file are let go, which is why a file is opened anew for each tensor.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compress.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PIECE = 1 << 24
"""Values of a tensor that are in memory at a time while it is written."""


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = {name: file for file in self.files(folder) for name in tensor_names(file)}
        index = folder / INDEX
        if index.exists():
            wanted = json.loads(index.read_text())["weight_map"]
            for name in wanted.keys() - self.file_of.keys():
                raise UserError(
                    f"{folder}: {INDEX} lists {name} in {wanted[name]}, which does not hold it; "
                    "the download is incomplete"
                )

    @staticmethod
    def files(folder: Path) -> list[Path]:
        """The safetensors files that make up the model."""
        index = folder / INDEX
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [folder / name for name in names]
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        raise UserError(f"{folder}: no {SINGLE} and no {INDEX}; wanted weights in safetensors")

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Some rows [len(numbers), ...] of a tensor; the others are not read."""
        return self[name][numbers]

    def chunks(self, name: str, elements: int) -> Iterator[tuple[int, Tensor]]:
        """A tensor in runs of rows of about `elements` values, each with its first row's number."""
        return _chunks(self.file_of[name], name, self.shape(name), elements)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from its file's header alone."""
        with safe_open(self.file_of[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor, from the headers alone."""
        found = {}
        for path in sorted(set(self.file_of.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    part = file.get_slice(name)
                    if (stored := part.get_dtype()) not in DTYPES:
                        raise UserError(
                            f"{path}: {name} is stored as {stored}; wanted a dtype of "
                            f"{', '.join(DTYPES)}"
                        )
                    found[name] = tuple(part.get_shape()), DTYPES[stored]
        return found


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class ToWrite:
    """A tensor of which dtype and shape are known, and the values read when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], Iterable[Tensor]]

    @classmethod
    def of(cls, tensor: Tensor) -> "ToWrite":
        """One that is in memory."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: [tensor])

    @classmethod
    def stored(cls, file: Path, name: str, dtype: torch.dtype | None = None) -> "ToWrite":
        """One of a safetensors file; cast to `dtype`, if given, where it is floating-point."""
        with safe_open(file, framework="pt") as opened:
            part = opened.get_slice(name)
            shape, now = tuple(part.get_shape()), DTYPES[part.get_dtype()]
        then = dtype if dtype is not None and now.is_floating_point else now
        return cls(then, shape, lambda: (v.to(then) for _, v in _chunks(file, name, shape, PIECE)))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _chunks(
    file: Path, name: str, shape: Sequence[int], elements: int
) -> Iterator[tuple[int, Tensor]]:
    rows, *row = shape or (1,)
    step = max(1, elements // max(1, math.prod(row)))
    for first in range(0, rows, step):
        with safe_open(file, framework="pt") as opened:
            if shape:
                yield first, opened.get_slice(name)[first : first + step]
            else:
                yield first, opened.get_tensor(name)


def write_stream(
    file: Path,
    sizes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    parts: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file whose tensors need not fit in memory.

    sizes: dtype and shape of each tensor by name. parts: their values in the same order, whole or
    in pieces along the first dimension. Raises OSError, with the file's name, on a full disk.
    """
    stored_as = {dtype: stored for stored, dtype in DTYPES.items()}
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in sizes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": stored_as[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    try:
        with file.open("wb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            for part in parts:
                opened.write(
                    part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                )
            found = opened.tell() - len(header) - 8
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    if found != end:
        raise ValueError(f"{file}: {found} bytes of tensors for {end}")


def tensor_names(file: Path) -> list[str]:
    """The names in a safetensors file. Raises UserError where it is missing or damaged."""
    if not file.exists():
        raise UserError(f"{file}: missing; the folder's index names it, download it again")
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        size = file.stat().st_size
        raise UserError(
            f"{file}: damaged or cut short at {size} bytes ({error}); fetch it again"
        ) from error
