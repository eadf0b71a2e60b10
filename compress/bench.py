"""Put a load on a checkpoint and see how long requests wait: docs/serving.md.

python -m compress.bench checkpoint=DIR workload=chat [field=value ...]
"""

from pathlib import Path
from typing import Any

from compress import options
from compress.artifact import write_json, write_text
from compress.report import pages, words
from compress.runtime.load import charts
from compress.runtime.load.options import Options

TEMPLATES = Path(__file__).parent / "runtime" / "load"


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
