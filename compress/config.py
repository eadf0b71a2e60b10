"""The whole configuration: one dataclass a section, listed here by hand and nowhere else."""

import dataclasses
import difflib
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from compress import judged
from compress.budget.choices import budget_problem
from compress.errors import ConfigError, UserError
from compress.given import ENGINES, STAGES
from compress.model_path import Model, home
from compress.stage import Stage
from compress.stages.allocate import Allocate
from compress.stages.calibrate import Calibrate
from compress.stages.distill import Distill
from compress.stages.export import Export
from compress.stages.extend import Extend
from compress.stages.plan import Plan
from compress.stages.quantize import ROUNDINGS, Quantize
from compress.stages.report import Report
from compress.stages.score import Score
from compress.stages.serve import Serve
from compress.stages.shrink import Shrink
from compress.text.documents import Data

TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    NoneType: "null",
}
"""Words for the types that fields have."""


@dataclass(kw_only=True)
class Config:
    """A recipe, resolved.

    recipe: its name. out: the run's folder, runs/<recipe>/<model> unless given; a run goes on
        where it stopped. seed: of everything that draws at random. device: cpu, cuda, or auto.
    engine: what will serve the checkpoint: any, vllm, sglang, transformers, or native (our own
        runtime, which serves v_proj quantized too).
    budget: for mixed precision: 4.5 (bits a weight, mean over the linears that may be quantized,
        scales counted) or 4.2GB (of the checkpoint's weights); null: one scheme for all. With a
        budget the stage allocate runs before quantize, without one it does not.
    checkpoint: a folder that is compressed already, here or by another tool, to be served and
        scored beside model.path (recipe=judge); null: the one that the run makes.
    stages: which stages run, in the order of the pipeline. only: this one stage, from what is on
        disk. force: rebuild from the first of these stages on; `source` is what comes before
        them where the model is no folder yet.
    """

    recipe: str = "???"
    out: str | None = None
    seed: int = 0
    device: str = "auto"
    engine: str = "any"
    budget: str | None = None
    checkpoint: str | None = None
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    only: str | None = None
    force: list[str] = field(default_factory=list)

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    plan: Plan = field(default_factory=Plan)
    shrink: Shrink = field(default_factory=Shrink)
    calibrate: Calibrate = field(default_factory=Calibrate)
    allocate: Allocate = field(default_factory=Allocate)
    quantize: Quantize = field(default_factory=Quantize)
    distill: Distill = field(default_factory=Distill)
    extend: Extend = field(default_factory=Extend)
    export: Export = field(default_factory=Export)
    serve: Serve = field(default_factory=Serve)
    score: Score = field(default_factory=Score)
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        problems, given = [], self.stages
        if self.budget is not None and (problem := budget_problem(self.budget)):
            problems.append(problem)
        if self.budget is None:
            self.stages = [name for name in given if name != "allocate"]
            if given == ["allocate"] or "allocate" in (self.only, *self.force):
                problems.append("allocate runs with a budget alone; add budget=4.5, for example")
        elif "quantize" in self.stages:
            self.stages = [*self.stages, "allocate"]
        if self.shrink.asked and "calibrate" in self.stages:
            self.stages = [*self.stages, "shrink"]
        if not self.shrink.asked:
            self.stages = [name for name in self.stages if name != "shrink"]
            if given == ["shrink"] or "shrink" in (self.only, *self.force):
                problems.append(
                    "shrink runs only where asked to cut; add shrink.blocks=20, for example"
                )
        for name, value, choices in (
            ("device", [self.device], ("auto", "cpu", "cuda")),
            ("engine", [self.engine], ENGINES),
            ("stages", self.stages, STAGES),
            ("only", [self.only] if self.only else [], STAGES),
            ("force", self.force, ("source", *STAGES)),
            ("allocate.rounding", [self.allocate.rounding], ROUNDINGS),  # quantize's, unless given
        ):
            for found in value:
                if found not in choices:
                    problems.append(f"{name} is {found!r}; wanted one of {', '.join(choices)}")
        for name, named in (("only", [self.only] if self.only else []), ("force", self.force)):
            problems += [
                f"{name} is {found!r}, which stages=[{','.join(self.stages)}] leaves out; add it"
                for found in named
                if found in STAGES and found not in self.stages
            ]
        if self.only and any(name != self.only for name in self.force):
            problems.append(
                f"force is [{','.join(self.force)}] with only={self.only}, which runs that stage "
                f"alone; wanted force=[{self.only}], or no only="
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            problems.append("device is cuda, but torch sees no GPU here; use device=cpu")
        if self.checkpoint is not None:
            unfit = judged.problem(self.checkpoint, self.stages)
            problems += [unfit] if unfit else []
        limited = self.score.gate.token_ms is not None
        if limited and "score" in self.stages and "serve" not in self.stages:
            problems.append(
                f"score.gate.token_ms limits what serve measures, which "
                f"stages=[{','.join(self.stages)}] leaves out; add it, or drop the limit: "
                "score.gate.token_ms=null"
            )
        if not given:
            problems.append("stages is empty; wanted at least one")
        if problems:
            raise ConfigError(problems)
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.stages = [name for name in STAGES if name in self.stages]
        if not self.out:
            name = judged.name_of(self.checkpoint) if self.checkpoint else self.model.name
            self.out = f"runs/{self.recipe}/{name}"
        self.out = str(home(self.out))

    def stage(self, name: str) -> Stage:
        """The stage of this name, with its configuration."""
        return getattr(self, name)

    def section(self, name: str) -> Any:
        """A section as plain data, for fingerprints and the report."""
        value = getattr(self, name)
        is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
        return dataclasses.asdict(value) if is_section else value


def register() -> None:
    """Give Hydra the schema, against which every field of every recipe is checked."""
    ConfigStore.instance().store(name="schema", node=Config)


def typed(config: DictConfig) -> Config:
    """The composed configuration as objects. All that is wrong is collected and raised at once."""
    sections: dict[str, Any] = {}
    problems: list[str] = []
    for name in map(str, config):
        try:
            value = config[name]
            sections[name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        except ConfigError as error:
            problems += error.problems
        except MissingMandatoryValue:
            problems.append("model.path is not given; wanted model.path=PATH_OR_HUB_ID")
        except OmegaConfBaseException as error:
            problems.append(f"{name}: {str(error).splitlines()[0]}")
    if problems:
        raise ConfigError(problems)
    return Config(**sections)


def type_problem(path: str, value: Any) -> str | None:
    """What is wrong with the type of a value for the field of this dotted name, or None.

    Raises UserError where there is no such field.
    """
    kind = _type_of(path)
    try:
        OmegaConf.update(OmegaConf.structured(Config), path, value)
    except OmegaConfBaseException:
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        wanted = ", or ".join(TYPES.get(get_origin(one) or one, "its fields") for one in kinds)
        return f"{path} is {'null' if value is None else repr(value)}; wanted {wanted}"
    return None


def _type_of(path: str) -> Any:
    """The type of the field of this dotted name. Raises UserError where the schema has none, with
    those near it.
    """
    kind: Any = Config
    for depth, part in enumerate(path.split(".")):
        if get_origin(kind) is dict:
            return get_args(kind)[1]
        names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        if part not in names:
            where = ".".join(path.split(".")[:depth])
            near = difflib.get_close_matches(part, names, n=3) or names
            raise UserError(
                f"{path}: no such field; {where or 'the configuration'} has {', '.join(near)}"
            )
        kind = get_type_hints(kind)[part]
    return kind
