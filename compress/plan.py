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
    scheme    of the weights beside which caches and batches are planned, such as W8A8; default:
              the mildest that fits
    seed      of the arrivals at `rate`; default 0
    out       folder of plan.json and plan.html; default runs/plan/MODEL

Prints what fits and the advice, and writes both files. docs/planning.md says how to read them.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress import options
from compress.artifact import write_json, write_text
from compress.errors import ConfigError
from compress.given import ENGINES, SIZE, parse_size
from compress.model_path import Model, home
from compress.planning import advice, page, tables
from compress.planning.devices import CPU, GPUS, Device, first_with
from compress.planning.requests import read_requests

if TYPE_CHECKING:
    from compress.planning.shape import Shape


GIB = 1 << 30
"""Data sheets say GB for what may be GiB: so much of each is taken for memory that a GPU has."""


@dataclass(kw_only=True)
class Options:
    """The fields of the command line; the module's docstring says what each is."""

    model: str = "???"
    memory: str | None = None
    requests: str = "512x128"
    device: str | None = None
    rate: float | None = None
    window: int | None = None
    beams: int = 4
    engine: str = "any"
    scheme: str | None = None
    seed: int = 0
    out: str | None = None

    def __post_init__(self) -> None:
        problems = []
        if not self.model:
            problems.append("model is empty; wanted a model's folder or its config.json")
        if self.memory is not None and not SIZE.fullmatch(self.memory):
            problems.append(f"memory is {self.memory!r}; wanted a size such as 24GB or 80GiB")
        for name, choices in (("device", (*GPUS, CPU)), ("engine", ENGINES)):
            if getattr(self, name) not in (None, *choices):
                listed = ", ".join(choices)
                problems.append(f"{name} is {getattr(self, name)!r}; wanted one of {listed}")
        if not problems and (problem := self._too_much()):
            problems.append(problem)
        for name, least in (("window", 1), ("beams", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(f"{name} is {value}; wanted at least {least}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            problems.append(f"rate is {self.rate}; wanted requests a second, such as 2.5")
        if problems:
            raise ConfigError(problems)

    def _too_much(self) -> str | None:
        """Words for more memory than the GPU has, or than any of the table; of a CPU all passes."""
        if self.memory is None or self.device == CPU:
            return None
        gpus = list(GPUS.values()) if self.device is None else [GPUS[self.device]]
        largest = max(gpus, key=lambda gpu: gpu.memory)
        if parse_size(self.memory) <= largest.memory * GIB / 1e9:
            return None
        most = f"{largest.name} has {largest.memory / 1e9:g}GB"
        if self.device is None:
            return f"memory is {self.memory}; {most}, the most of the devices that are planned for"
        return f"memory is {self.memory}; {most}: wanted no more, or another device"


def _device(asked: Options, shape: "Shape") -> Device:
    if asked.device == CPU:
        from compress.planning.probe import measure_cpu  # which takes torch

        return measure_cpu(shape)
    if asked.device is not None:
        return GPUS[asked.device]
    return first_with(0 if asked.memory is None else parse_size(asked.memory))


def main(words: list[str]) -> None:
    """Plan, print, and write plan.json and plan.html."""
    asked = options.parsed(Options, words)
    requests = read_requests(asked.requests, asked.rate, asked.seed)
    # Not above: transformers takes seconds, and what is wrong until here none.
    from compress.planning.shape import read_model, shape_of
    from compress.planning.study import Question, study

    config = read_model(asked.model)
    place = home(asked.model).absolute()
    folder = place.parent if place.name == "config.json" else place
    name = folder.stem if folder.is_file() else Model(path=str(folder)).name
    shape = shape_of(config, name)
    out = options.folder(asked.out or f"runs/plan/{name}")
    device = _device(asked, shape)
    plan = study(
        Question(
            shape=shape,
            student=shape_of(config, name, blocks=max(1, shape.blocks // 2)),
            device=device,
            memory=device.memory if asked.memory is None else parse_size(asked.memory),
            requests=requests,
            window=asked.window or shape.positions,
            beams=asked.beams,
            engine=asked.engine,
            scheme=asked.scheme,
        )
    )
    plan["advice"] = advice.advice(plan)
    plan["command"] = " ".join(["python -m compress.plan", *words])
    write_json(out / "plan.json", plan)
    write_text(out / "plan.html", page.page(plan))
    sys.stdout.write(f"{tables.console(plan)}\n{out / 'plan.html'}\n")


if __name__ == "__main__":
    options.run(main, __doc__ or "")
