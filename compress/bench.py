"""Put a load on a checkpoint and see how long requests wait: docs/serving.md.

python -m compress.bench checkpoint=DIR workload=chat [field=value ...]
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress import options
from compress.artifact import write_json, write_text
from compress.errors import ConfigError
from compress.report import pages, words
from compress.runtime import devices
from compress.runtime.load import charts
from compress.runtime.server.limits import Limits

TEMPLATES = Path(__file__).parent / "runtime" / "load"


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


def page(found: dict[str, Any]) -> str:
    """The figures as one HTML file that needs nothing else."""
    environment = pages.environment(TEMPLATES)
    environment.globals.update(charts=charts, several=words.several)
    return environment.get_template("page.html.jinja").render(f=found, style=pages.style())


def main(arguments: list[str]) -> None:
    """Read the options, measure, write the page and the figures."""
    settings = options.parsed(Options, arguments)
    settings.limits()  # which refuses what cannot be
    # Not above: torch and transformers take seconds, and what is wrong until here none.
    from compress.runtime.load import measure

    model, asked = measure.prepared(settings)
    out = options.folder(settings.out)  # after what fails at once, before what takes long
    found = measure.measured(settings, model, asked) | {
        "command": " ".join(["python -m compress.bench", *arguments])
    }
    write_json(out / "load.json", found)
    write_text(out / "load.html", page(found))
    print(f"{summary(found)}\n{out / 'load.html'}")


def summary(found: dict[str, Any]) -> str:
    """What came out, in a few lines."""
    opened, batching = found["open_loop"], found["batching"]
    lines = [
        f"{found['verdict']['headline']}. {found['verdict']['reason']}",
        f"continuous batching {words.rate(batching['continuous']['tokens_per_s'])}, "
        f"{words.significant(batching['ratio'])} times static "
        f"({words.significant(batching['cpu_ratio'])} times in CPU seconds)",
        "as requests arrive, P50, P95 and P99:",
    ]
    for name, key in (
        ("first token", "ttft_ms"),
        ("each further token", "tpot_ms"),
        ("whole answer", "whole_ms"),
    ):
        three = ", ".join(words.milliseconds(opened[key][p]) for p in ("p50", "p95", "p99"))
        lines.append(f"  {name}: {three}")
    return "\n".join(lines)


if __name__ == "__main__":
    options.run(main, f"{__doc__}\n{Options.__doc__}\n")
