"""One voice for the whole run: plain words and a bar on the console, everything in a file."""

import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm
from tqdm.contrib.logging import _TqdmLoggingHandler as TqdmHandler

T = TypeVar("T")

logger = logging.getLogger("compress")


def start(file: Path, level: int = logging.INFO) -> None:
    """Send the log to the console (words only) and to `file` (with time and level)."""
    stop()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    console = TqdmHandler()
    console.stream = sys.stderr
    console.setLevel(level)
    console.setFormatter(logging.Formatter("%(message)s"))
    full = logging.FileHandler(file)
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
        )
    )
