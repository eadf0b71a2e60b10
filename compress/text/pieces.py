"""Of a file too large to hold in memory: pieces spread evenly over it, the same ones every time."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.model_path import home

LARGEST = 16 << 20
"""Bytes of a file that are read; a larger one is read in PIECES. English gives 4 million tokens,
two thousand windows of 2048."""
PIECES = 64
CONTINUATION = bytes(range(0x80, 0xC0))  # bytes inside a UTF-8 character, never its first


def is_large(path: str | None) -> bool:
    """Whether `path` is a local file that is read in pieces."""
    file = home(path or "")
    spread = file.suffix in (".txt", ".jsonl", ".parquet")
    return spread and file.is_file() and file.stat().st_size > LARGEST


def rows(file: Path, column: str) -> Iterator[dict[str, Any]]:
    """Records of a large .txt, .jsonl or .parquet file; a text's are its pieces, as `text`.

    Raises ValueError where a piece is no UTF-8 or no JSON.
    """
    if file.suffix == ".txt":
        return ({"text": text} for text in _texts(file))
    return _json_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file, column)


def _spans(file: Path) -> Iterator[tuple[int, int]]:
    """First byte, and the one after the last, of each piece."""
    each = LARGEST // PIECES
    room = file.stat().st_size - each
    for part in range(PIECES):
        first = part * room // (PIECES - 1)
        yield first, first + each


def _texts(file: Path) -> Iterator[str]:
    """Each piece as text: whole lines, where it has any."""
    with file.open("rb") as opened:
        for first, end in _spans(file):
            opened.seek(first)
            raw = opened.read(end - first)
            start, stop = raw.find(b"\n") + 1, raw.rfind(b"\n") + 1
            raw = raw[start:stop] if start < stop else raw.lstrip(CONTINUATION)
            # Not final: a character cut off at the end is left out.
            yield codecs.getincrementaldecoder("utf-8")().decode(raw)


def _json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The records that begin in each piece."""
    with file.open("rb") as opened:
        for first, end in _spans(file):
            opened.seek(first)
            if first:
                opened.readline()  # the rest of a record that began before
            while opened.tell() < end and (line := opened.readline()):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"a record is {type(record).__name__}, wanted an object")
                    yield record


def _parquet_rows(file: Path, column: str) -> Iterator[dict[str, Any]]:
    """The first records of row groups spread evenly over the file."""
    import pyarrow.parquet  # type: ignore[import-untyped]

    # Unbuffered: a row group can be the whole file.
    table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    columns = [column] if column in table.schema_arrow.names else None
    last = table.num_row_groups - 1
    groups = sorted({part * last // (PIECES - 1) for part in range(PIECES)})
    for group in groups:
        room = LARGEST // len(groups)
        for batch in table.iter_batches(batch_size=64, row_groups=[group], columns=columns):
            yield from batch.to_pylist()
            room -= batch.nbytes
            if room <= 0:
                break
