"""One voice for the whole run: plain words and a bar on the console, everything in a file."""

import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from compress import processes

T = TypeVar("T")

logger = logging.getLogger("compress")


class _Console(logging.Handler):
    """Lines on stderr that leave a progress bar whole."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class _File(logging.FileHandler):
    """A log that gives up its lines on a full disk: what runs into that has its own to say."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def start(file: Path, level: int = logging.INFO) -> None:
    """Send the log to the console (words only) and to `file` (with time and level)."""
    stop()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    console = _Console()
    console.setLevel(level)
    console.setFormatter(logging.Formatter("%(message)s"))
    full = _File(file)
    full.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(console)
    logger.addHandler(full)


def stop() -> None:
    """Close what `start` opened."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def progress(
    items: Iterable[T], what: str, unit: str, *, total: int | None = None, done: int = 0
) -> Iterator[T]:
    """`items`, with a bar on the console: rate, remaining time; `done` of them were done before."""
    return iter(
        tqdm(
            items,
            desc=f"  {what}",
            unit=f" {unit}",
            total=total,
            initial=done,
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=0.5,
            leave=False,
            disable=not processes.leads(),
        )
    )
