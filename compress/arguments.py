"""From the words of a command line to what Hydra's grammar reads.

Paths are taken as they are typed, a list may be a bare word, options may stand anywhere. The schema
takes seconds to import: what is wrong without it, `check_early` says.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TypeVar, get_origin, get_type_hints

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from compress.errors import ConfigError, UserError
from compress.given import STAGES
from compress.model_path import TINY, local, unfit
from compress.quoting import PLAIN, is_quoted, quoted, typed

T = TypeVar("T")

CONF = Path(__file__).parent / "conf"
MULTIRUN = ("-m", "--multirun")
WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun", "--info", "-i"),
)
"""Hydra's options that take the next word."""
ALONE = (
    *MULTIRUN,
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r"),
    *("--shell-completion", "-sc"),
)
"""Its other options."""
MODES = (*MULTIRUN, "--cfg", "-c", "--info", "-i", "--run", "-r", "--shell-completion", "-sc")
"""Those of which it takes one."""


def parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The words that set fields, and Hydra's options with their values.

    Raises UserError for a word that is neither, and for a field that is given twice.
    """
    options: list[str] = []
    fields: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in WITH_VALUE:
            options += [word, *([value] if (value := next(words, None)) is not None else [])]
        elif word.startswith("-"):
            if word.split("=")[0] not in (*WITH_VALUE, *ALONE):
                raise UserError(f"{word}: no such option; fields are given as field=value")
            options.append(word)
        elif "=" in word or word.startswith("~"):
            fields.append(word)
        else:
            raise UserError(
                f"{word}: neither an option nor field=value; a value with blanks wants quotes "
                f"around it all: '{fields[-1] if fields else 'model.path=A'} {word}'"
            )
    given: dict[str, str] = {}
    for name, _, value in (field.lstrip("+~").partition("=") for field in fields):
        if name in given:
            raise UserError(f"{name} is given twice, as {given[name]} and {value}; wanted one")
        given[name] = value
    return fields, options


def prepared(arguments: list[str]) -> list[str]:
    """The same arguments as Hydra reads them: fields first, their values quoted, then options.

    With --multirun commas part the values of a sweep, of paths and lists too.
    Raises UserError as `parted` does.
    """
    fields, options = parted(arguments)
    return [*(_for_hydra(word, _sweeps(options)) for word in fields), *options]


def _sweeps(options: list[str]) -> bool:
    return bool(set(MULTIRUN) & set(options))


def _for_hydra(word: str, sweeps: bool) -> str:
    name, _, value = word.partition("=")
    bare = name.lstrip("+")
    if not value or value == "null" or is_quoted(value):
        return word
    if bare in PLAIN:
        parts = value.split(",") if sweeps else [value]
        return f"{name}={','.join('null' if p == 'null' else quoted(p) for p in parts)}"
    if bare in _list_fields() and not value.startswith("["):
        items = [quoted(item) for item in value.split(",")]
        lists = [f"[{item}]" for item in items] if sweeps else [f"[{','.join(items)}]"]
        return f"{name}={','.join(lists)}"
    return word


def _list_fields() -> Iterator[str]:
    from compress import config as schema

    for name, kind in get_type_hints(schema.Config).items():
        if get_origin(kind) is list:
            yield name
        elif dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind)
            yield from (f"{name}.{field}" for field, of in hints.items() if get_origin(of) is list)


def check_early(arguments: list[str], recipes: Mapping[str, str]) -> None:
    """Raise UserError, in one line, for what is wrong whatever the schema says: a word, a recipe, a
    choice, a model that is not there.

    recipes: what each recipe is for, by its name.
    """
    fields, options = parted(arguments)
    modes = [word for word in options if word.split("=")[0] in MODES]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)}: wanted one of them; --cfg job shows a single run")
    if "--resolve" in options and not {"--cfg", "-c"} & {word.split("=")[0] for word in options}:
        raise UserError("--resolve: wanted with --cfg job, whose ${…} it fills in")
    values = {
        name: [part.strip().strip("'\"") for part in value.split(",")]
        for name, _, value in (field.lstrip("+~").partition("=") for field in fields)
    }
    groups = _groups()
    for word in fields:
        group = word.lstrip("~").partition("=")[0]
        if word.startswith("~") and group in groups:
            raise UserError(f"{word}: cannot be taken off; {_wanted(group)}")
    if "recipe" not in values:
        raise UserError(
            f"no recipe given; python -m compress recipe=NAME, with NAME one of\n{listed(recipes)}"
        )
    for name in values["recipe"]:
        if name not in recipes:
            raise UserError(f"recipe={name}: no such recipe; there are\n{listed(recipes)}")
    for group in sorted(groups & values.keys()):
        for name in values[group]:
            if name not in _choices(group):
                raise UserError(f"{group}={name}: no such choice; {_wanted(group)}")
    for path in _paths("model.path", fields, _sweeps(options)):
        if path not in (TINY, "null"):
            local(path)
    for path in _paths("checkpoint", fields, _sweeps(options)):
        if path != "null" and (problem := unfit(path)):
            raise UserError(problem)


def _choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def _wanted(group: str) -> str:
    """What a group may be, and how a stage that it sets is left out."""
    there = f"there are {', '.join(_choices(group))}"
    if group not in STAGES:
        return there
    return f"{there}; to leave the stage out, name those that run: stages=[plan,calibrate,…]"


def _paths(field: str, fields: list[str], sweeps: bool) -> list[str]:
    """The paths that `field` is given as."""
    typed = [value for name, _, value in (f.partition("=") for f in fields) if name == field]
    paths = [path for value in typed for path in (value.split(",") if sweeps else [value])]
    return [path[1:-1] if is_quoted(path) else path for path in paths]


@dataclass(frozen=True)
class Job:
    """One of the `count` jobs of a command line, from 1 on, with its words as Hydra reads them.

    swept: those of its words that are not of every job, as they were typed.
    """

    number: int
    count: int
    words: list[str]
    swept: list[str]

    def __str__(self) -> str:
        return f"job {self.number} of {self.count} ({' '.join(self.swept)})"


def each(jobs: Sequence[Job], work: Callable[[Job], T]) -> list[T]:
    """What `work` gives of each job.

    Raises its first UserError: in one line that names the job, unless it is the same in all.
    """
    found = []
    for job in jobs:
        try:
            found.append(work(job))
        except UserError as error:
            if job.number == 1 and all(_refusal(work, other) == str(error) for other in jobs[1:]):
                raise
            raise UserError(f"{job}: {'; '.join(str(error).splitlines())}") from error
    return found


def _refusal(work: Callable[[Job], object], job: Job) -> str | None:
    try:
        work(job)
    except UserError as error:
        return str(error)
    return None


def check(arguments: list[str]) -> list[tuple[Job, DictConfig]]:
    """The jobs of prepared arguments, each with its configuration, Hydra's own among it.

    Raises UserError, as `each` does, for what Hydra would refuse with several lines; all jobs are
    composed, that what is wrong with any is said before the first runs.
    """
    fields, options = parted(arguments)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        jobs = _jobs(fields, _sweeps(options))
        return list(zip(jobs, each(jobs, _composed), strict=True))


def _composed(job: Job) -> DictConfig:
    from compress import config as schema

    problems = [
        problem
        for override in map(_parsed, job.words)
        if not override.is_delete()
        for name, value in [(override.key_or_group, override.value())]
        if name not in _groups() and name.replace("/", ".").split(".")[0] != "hydra"
        if (problem := schema.type_problem(name, value))
    ]
    if problems:
        raise ConfigError(problems)
    try:
        return hydra.compose("config", overrides=job.words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        parts = [error, error.__cause__] if error.__cause__ else [error]
        said = [str(part).strip().splitlines()[0] for part in parts if str(part).strip()]
        told = ": ".join(dict.fromkeys(said))
        if "is not in struct" in told:  # and in the schema: one of a dict's, such as a limit
            new = (word for word in job.words if f"'{word.partition('=')[0]}'" in told)
            told += "".join(f"; the recipe has none yet: +{word} adds it" for word in new)
        if "already at" in told:
            old = (word[1:] for word in job.words if word.startswith("+"))
            told = "; ".join(
                f"+{word}: the recipe has one: {word} changes it"
                for word in old
                if f"'{word.partition('=')[0]}'" in told
            )
        raise UserError(told) from error


def _jobs(fields: list[str], sweeps: bool) -> list[Job]:
    """The jobs that these fields ask for, one value each, in the order and words of Hydra."""
    values = []
    for word in fields:
        override = _parsed(word)
        name = override.get_key_element()
        if not override.is_sweep_override():
            values.append([f"{name}={override.get_value_element_as_str()}"])
        elif sweeps:
            values.append([f"{name}={value}" for value in override.sweep_string_iterator()])
        else:
            raise UserError(f"{word}: several values; add --multirun for a run of each")
    fixed = {given[0] for given in values if len(given) == 1}
    jobs = [list(words) for words in product(*values)]
    return [
        Job(number, len(jobs), words, [typed(w) for w in words if w not in fixed])
        for number, words in enumerate(jobs, 1)
    ]


def _parsed(word: str) -> Override:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise UserError(f"{word}: cannot be read ({str(error).splitlines()[0]})") from error


def _groups() -> set[str]:
    return {folder.name for folder in CONF.iterdir() if folder.is_dir()}


def listed(recipes: Mapping[str, str]) -> str:
    """The recipes, a line each."""
    return "\n".join(f"  {name:16} {line}" for name, line in recipes.items())
