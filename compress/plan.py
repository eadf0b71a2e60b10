"""`python -m compress.plan model=PATH memory=24GB requests=lengths.jsonl`: before anything is run.

    model     a model's folder, or its config.json: no weights are needed
    memory    of the device, such as 24GB or 80GiB; default: the device's own
    requests  a JSONL of lengths, {"prompt": tokens, "new": tokens, "at": seconds} (at is optional),
              or PROMPTxNEW; default 512x128
    device    a10g, l4, rtx4090, a100, h100, h200, or cpu: this machine's, measured in ten seconds;
              default: the first of these that has the memory
    rate      requests a second, where the file has no "at"; default: all are there at the start
    window    tokens that the model is served with; default: its own
    beams     of the beam search that is weighed; default 4
    engine    any, vllm, sglang, transformers or native: decides which linears are quantized
    seed      of the arrivals at `rate`; default 0
    out       folder of plan.json and plan.html; default runs/plan/MODEL

Prints what fits and the advice, and writes both files. docs/planning.md says how to read them.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.__main__ import told_plainly
from compress.artifact import write_json, write_text
from compress.engines import ENGINES
from compress.errors import ConfigError, UserError
from compress.planning import advice, page, tables
from compress.planning.devices import CPU, GPUS, Device, first_with
from compress.planning.probe import measure_cpu
from compress.planning.requests import read_requests
from compress.planning.shape import Shape, read_model, shape_of
from compress.planning.study import Question, study
from compress.sizes import SIZE, parse_size


@dataclass(kw_only=True)
class Options:
    """The command line's fields, as text; the module's docstring says what each is."""

    model: str = ""
    memory: str = ""
    requests: str = "512x128"
    device: str = ""
    rate: str = ""
    window: str = ""
    beams: str = "4"
    engine: str = "any"
    seed: str = "0"
    out: str = ""

    def __post_init__(self) -> None:
        problems = []
        if not self.model:
            problems.append("model is missing; wanted model=FOLDER or model=CONFIG.json")
        if self.memory and not SIZE.fullmatch(self.memory):
            problems.append(f"memory is {self.memory!r}; wanted a size such as 24GB or 80GiB")
        for name, choices in (("device", ("", *GPUS, CPU)), ("engine", ENGINES)):
            if getattr(self, name) not in choices:
                listed = ", ".join(filter(None, choices))
                problems.append(f"{name} is {getattr(self, name)!r}; wanted one of {listed}")
        for name, least in (("window", 1), ("beams", 2), ("seed", 0)):
            value = getattr(self, name)
            if value and not (value.isdecimal() and int(value) >= least):
                problems.append(f"{name} is {value!r}; wanted a whole number, at least {least}")
        if self.rate and not _positive(self.rate):
            problems.append(f"rate is {self.rate!r}; wanted requests a second, such as 2.5")
        if problems:
            raise ConfigError(problems)


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def parsed(words: Sequence[str]) -> Options:
    """Options from `key=value` words. Raises UserError for what is none."""
    names = [field.name for field in dataclasses.fields(Options)]
    given = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in names or not equals or not value:
            raise UserError(f"{word}: no option; wanted key=value with {', '.join(names)}")
        given[name] = value
    return Options(**given)


def _device(options: Options, shape: Shape) -> Device:
    if options.device == CPU:
        return measure_cpu(shape)
    if options.device:
        return GPUS[options.device]
    return first_with(parse_size(options.memory) if options.memory else 0)


def main(words: Sequence[str]) -> None:
    """Plan, print, and write plan.json and plan.html."""
    if set(words) & {"--help", "-h"}:
        sys.stdout.write(f"{__doc__}")
        return
    options = parsed(words)
    config = read_model(options.model)
    place = Path(options.model).expanduser().absolute()
    name = place.stem if place.is_file() else place.name
    requests = read_requests(
        options.requests, float(options.rate) if options.rate else None, int(options.seed)
    )
    shape = shape_of(config, name)
    device = _device(options, shape)
    plan = study(
        Question(
            shape=shape,
            student=shape_of(config, name, blocks=max(1, shape.blocks // 2)),
            device=device,
            memory=parse_size(options.memory) if options.memory else device.memory,
            requests=requests,
            window=int(options.window) if options.window else shape.positions,
            beams=int(options.beams),
            engine=options.engine,
        )
    )
    plan["advice"] = advice.advice(plan)
    plan["command"] = ["python", "-m", "compress.plan", *words]
    out = Path(options.out or f"runs/plan/{name}")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "plan.json", plan)
    write_text(out / "plan.html", page.page(plan))
    sys.stdout.write(f"{tables.console(plan)}\n{out / 'plan.html'}\n")


if __name__ == "__main__":
    with told_plainly():
        main(sys.argv[1:])
