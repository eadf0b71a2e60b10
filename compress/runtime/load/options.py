"""What `python -m compress.bench` is told."""

import math
from dataclasses import dataclass

from compress.errors import ConfigError
from compress.runtime import devices
from compress.runtime.server.limits import Limits


@dataclass(kw_only=True)
class Options:
    """checkpoint: the folder. workload: chat, summarize or write (made-up mixes of lengths), or a
    JSONL file of real requests: on each line prompt (text) or prompt_tokens, and answer (text) or
    new_tokens; or messages that end with the answer.

    requests: how many. rate: of arrivals, a second; null: 0.7 of what continuous batching manages.
    rounds: of static and continuous batching, by turns. out: a folder for load.html and load.json.
    device: cpu, cuda, or auto. backend: of the kernels. running, kv_tokens, batch_tokens: as for
    compress.serve. seed: of lengths, prompts and arrivals.
    """

    checkpoint: str = "???"
    workload: str = "chat"
    requests: int = 64
    rate: float | None = None
    rounds: int = 1
    out: str = "runs/load"
    device: str = "auto"
    backend: str | None = None
    running: int = Limits.running
    kv_tokens: int = Limits.kv_tokens
    batch_tokens: int = Limits.batch_tokens
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = devices.problems(self.device) + [
            f"{name} is {getattr(self, name)}; wanted at least {least}"
            for name, least in (("requests", 2), ("rounds", 1))
            if getattr(self, name) < least
        ]
        if self.rate is not None and not 0 < self.rate < math.inf:
            problems.append(f"rate is {self.rate}; wanted above 0, or null")
        if problems:
            raise ConfigError(problems)
        self.device = devices.picked(self.device)

    def limits(self) -> Limits:
        """Those of the engine; all requests may wait."""
        return Limits(
            running=self.running,
            waiting=self.requests,
            kv_tokens=self.kv_tokens,
            batch_tokens=self.batch_tokens,
        )
