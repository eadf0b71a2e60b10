"""One voice for the whole run: plain words and a bar on the console, everything in a file."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

logger = logging.getLogger("compress")
EVERY = 30.0
"""Seconds between two lines of progress."""


class _Console(logging.Handler):
    """Lines on stderr that leave a progress bar whole."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class Signed(logging.Formatter):
    """Lines that begin with the program's name, as those of a command among others do."""

    def format(self, record: logging.LogRecord) -> str:
        return f"compress: {record.getMessage().strip()}"


class _File(logging.FileHandler):
    """A log that gives up its lines on a full disk: what runs into that has its own to say."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's own name)
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def start(file: Path, level: int = logging.INFO) -> None:
    """Send the log to the console (words only) and to `file` (with time and level)."""
    to_console(level)
    full = _File(file)
    full.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(full)


def to_console(level: int = logging.INFO, words: logging.Formatter | None = None) -> None:
    """Send the log to the console alone. words: how a line reads there; None: as it is."""
    stop()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    console = _Console()
    console.setLevel(level)
    console.setFormatter(words)
    logger.addHandler(console)


def stop() -> None:
    """Close what `start` or `to_console` opened."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def progress(
    items: Iterable[T], what: str, unit: str, *, total: int | None = None, done: int = 0
) -> Iterator[T]:
    """`items`, with a bar on the console: rate, remaining time; `done` of them were done before.

    Where the console is no terminal, as in a pipe or a file, a line every EVERY seconds instead.
    """
    from compress import processes  # here, since it takes torch, and whoever logs is not to

    if not processes.leads():
        return iter(items)
    if not sys.stderr.isatty():
        return _in_lines(items, f"  {what}: {unit}", total, done)
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


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Hide the bars that transformers draws as it reads and writes models, while it is open."""
    from transformers.utils import logging as theirs  # here, as above

    before = theirs.set_tqdm_hook(lambda _, args, given: theirs.EmptyTqdm(*args, **given))
    try:
        yield
    finally:
        theirs.set_tqdm_hook(before)


def _in_lines(items: Iterable[T], what: str, total: int | None, done: int) -> Iterator[T]:
    if total is None and isinstance(items, Sized):
        total = len(items)
    begun = said = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said < EVERY:
            continue
        said, at, of = now, done + number, ""
        if total is not None:
            left = (total - at) * (now - begun) / number
            of = f" of {total}, {tqdm.format_interval(left)} left"
        logger.info(f"{what} {at}{of}")
