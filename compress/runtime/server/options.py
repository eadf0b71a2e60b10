"""What `python -m compress.serve` is told."""

import math
from dataclasses import dataclass

from compress.errors import ConfigError
from compress.runtime import devices
from compress.runtime.server.limits import Limits
from compress.runtime.server.overlong import REFUSE, RULES


@dataclass(kw_only=True)
class Options:
    """checkpoint: the folder. name: of the model, for clients; null: the folder's, or
    that of the folder above `checkpoint`.

    host, port: where to listen; port 0: any that is free. device: cpu, cuda, or auto. backend: of
    the kernels; null: the device's own. running, waiting, kv_tokens, batch_tokens: see Limits.
    prompt_tokens, new_tokens: the most that a request may bring, and ask for; null: what the
    model's context holds. overlong: what becomes of a prompt that is longer: refuse, or what is
    cut of it, start, middle or end. grace: seconds that requests have to finish after SIGTERM. The
    API key, if there is to be one, is in the environment as COMPRESS_API_KEY.
    """

    checkpoint: str = "???"
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    backend: str | None = None
    running: int = Limits.running
    waiting: int = Limits.waiting
    kv_tokens: int = Limits.kv_tokens
    batch_tokens: int = Limits.batch_tokens
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    overlong: str = REFUSE
    grace: float = 30.0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = devices.problems(self.device)
        if not 0 <= self.port < 1 << 16:
            problems.append(f"port is {self.port}; wanted 0 to 65535")
        if not 0 <= self.grace < math.inf:
            problems.append(f"grace is {self.grace}; wanted seconds, 0 or more")
        for name in ("prompt_tokens", "new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value}; wanted at least 1, or null")
        if self.overlong not in RULES:
            problems.append(f"overlong is {self.overlong!r}; wanted one of {', '.join(RULES)}")
        if problems:
            raise ConfigError(problems)
        self.device = devices.picked(self.device)

    def limits(self) -> Limits:
        """Those of the engine."""
        return Limits(
            running=self.running,
            waiting=self.waiting,
            kv_tokens=self.kv_tokens,
            batch_tokens=self.batch_tokens,
        )
