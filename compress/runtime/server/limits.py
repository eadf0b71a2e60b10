"""What the engine takes at once."""

from dataclasses import dataclass

from compress.errors import ConfigError

PAGE = 32
"""Tokens of a page of the KV cache: a request leaves half a page unused on average."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """running: requests in the batch at once. waiting: requests that may wait for a place, more
    are refused. kv_tokens: tokens that the KV cache has room for, of all requests. batch_tokens:
    tokens of one forward: what goes beyond waits, and the prompt at the edge is cut in two.
    """

    running: int = 16
    waiting: int = 64
    kv_tokens: int = 16384
    batch_tokens: int = 4096

    @property
    def pages(self) -> int:
        """Of the KV cache, whole ones."""
        return -(-self.kv_tokens // PAGE)

    def __post_init__(self) -> None:
        least = {"running": 1, "waiting": 0, "kv_tokens": 2 * PAGE, "batch_tokens": self.running}
        problems = [
            f"{name} is {getattr(self, name)}; wanted at least {minimum}"
            for name, minimum in least.items()
            if getattr(self, name) < minimum
        ]
        if problems:
            raise ConfigError(problems)
