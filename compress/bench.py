"""Put a load on a checkpoint and see how long requests wait: docs/serving.md.

python -m compress.bench checkpoint=DIR workload=chat [field=value ...]
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from compress import options
from compress.artifact import write_json, write_text
from compress.errors import ConfigError
from compress.machine import hardware, packages
from compress.report import pages, words
from compress.runtime import devices
from compress.runtime.attention import in_words
from compress.runtime.load import charts, figures
from compress.runtime.load.drive import Drive, continuous, static
from compress.runtime.load.workload import LoadRequest, arrivals, requests
from compress.runtime.loader import load_with_tokenizer
from compress.runtime.server.engine import Limits, context_of

TEMPLATES = Path(__file__).parent / "runtime" / "load"
ROOM = 0.7
"""Of the throughput that continuous batching reaches: the rate of arrivals unless one is given."""


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


def prepared(settings: Options) -> tuple[PreTrainedModel, list[LoadRequest]]:
    """The checkpoint, loaded, and the requests of the workload; tells how many had to be cut."""
    limits = settings.limits()  # which refuses what cannot be, before anything is loaded
    model, tokenizer = load_with_tokenizer(
        Path(settings.checkpoint).expanduser(),
        device=settings.device,
        backend=settings.backend,
        trust_remote_code=settings.trust_remote_code,
    )
    context = context_of(model, limits)
    asked = requests(settings.workload, settings.requests, tokenizer, context, settings.seed)
    if cut := sum(request.cut for request in asked):
        _say(f"{cut} of {len(asked)} requests are cut to the context of {context} tokens")
    return model, asked


def measured(
    settings: Options, model: PreTrainedModel, asked: Sequence[LoadRequest]
) -> dict[str, Any]:
    """Put the load on the model in each way, and return the figures."""
    limits = settings.limits()
    tokens = sum(request.new_tokens for request in asked)

    statics, drives = [], []
    for turn in range(settings.rounds):
        _say(f"static and continuous batching, {turn + 1} of {settings.rounds}")
        statics.append(static(model, asked, limits.running))
        drives.append(continuous(model, asked, limits))
    static_s, static_cpu_s = map(statistics.median, zip(*statics, strict=True))
    continuous_s = statistics.median(drive.seconds for drive in drives)
    continuous_cpu_s = statistics.median(drive.cpu_seconds for drive in drives)
    rate = settings.rate or ROOM * len(asked) / continuous_s
    _say(f"as requests arrive, {words.significant(rate)} a second")
    opened = continuous(model, asked, limits, arrivals(len(asked), rate, settings.seed))
    _say("prefill alone")
    first_tokens = [LoadRequest(request.prompt, 1) for request in asked]
    prefill = continuous(model, first_tokens, limits)
    halves = figures.apart(model, asked, prefill, drives[-1], figures.measure_peaks(model.device))
    return {
        "checkpoint": settings.checkpoint,
        "workload": settings.workload,
        "verdict": dict(zip(("headline", "reason"), figures.verdict(halves), strict=True)),
        "lengths": figures.lengths(asked),
        "cut": sum(request.cut for request in asked),
        "batching": {
            "static": {"seconds": static_s, "tokens_per_s": tokens / static_s},
            "continuous": {
                "seconds": continuous_s,
                "tokens_per_s": tokens / continuous_s,
                "kv_tokens_most": drives[-1].kv_tokens_most,
            },
            "ratio": static_s / continuous_s,
            "cpu_ratio": static_cpu_s / continuous_cpu_s,
            "rounds": [
                {
                    "static_s": seconds,
                    "static_cpu_s": cpu_seconds,
                    "continuous_s": drive.seconds,
                    "continuous_cpu_s": drive.cpu_seconds,
                }
                for (seconds, cpu_seconds), drive in zip(statics, drives, strict=True)
            ],
        },
        "open_loop": {"rate": rate} | _open_loop(opened, tokens),
        "halves": halves,
        "attention": in_words(model),
        "limits": asdict(limits),
        "seed": settings.seed,
        "rounds": settings.rounds,
        "hardware": hardware(),
        "packages": packages(),
        "moment": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _open_loop(drive: Drive, tokens: int) -> dict[str, Any]:
    return {
        "seconds": drive.seconds,
        "tokens_per_s": tokens / drive.seconds,
        "kv_tokens_most": drive.kv_tokens_most,
        **figures.latencies(drive.courses),
        "requests": [
            {"arrival_s": course.arrival, "ttft_s": course.ttft, "whole_s": course.whole}
            for course in drive.courses
        ],
        "moments": [asdict(moment) for moment in drive.moments],
    }


def page(found: dict[str, Any]) -> str:
    """The figures as one HTML file that needs nothing else."""
    environment = pages.environment(TEMPLATES)
    environment.globals.update(charts=charts, several=words.several)
    return environment.get_template("page.html.jinja").render(f=found, style=pages.style())


def _say(line: str) -> None:
    sys.stderr.write(f"compress: {line}\n")


def main(arguments: list[str]) -> None:
    """Read the options, measure, write the page and the figures."""
    settings = options.parsed(Options, arguments)
    model, asked = prepared(settings)
    out = options.folder(settings.out)  # after what fails at once, before what takes long
    found = measured(settings, model, asked) | {
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
