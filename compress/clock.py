"""Seconds by part of a stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of each part. On a GPU a part ends when its work is queued, so that what
    waits for it (a copy to disk, a decision) counts for the work before it too.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is inside for `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
