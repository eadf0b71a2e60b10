"""From the words of a command line to what Hydra's grammar reads.

Paths are taken as they are typed, a list may be a bare word, options may stand anywhere.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import get_origin, get_type_hints

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from compress import config as schema
from compress.errors import UserError
from compress.quoting import PLAIN, is_quoted, quoted

CONF = Path(__file__).parent / "conf"
HYDRA_KEYS = ("hydra", "recipe")
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


def prepared(arguments: list[str]) -> list[str]:
    """The same arguments as Hydra reads them: fields first, their values quoted, then options.

    With --multirun commas part the values of a sweep, of paths and lists too.
    Raises UserError for a word that is neither an option of Hydra's nor field=value.
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
    sweeps = bool(set(MULTIRUN) & set(options))
    return [*(_for_hydra(word, sweeps) for word in fields), *options]


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
    for name, kind in get_type_hints(schema.Config).items():
        if get_origin(kind) is list:
            yield name
        elif dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind)
            yield from (f"{name}.{field}" for field, of in hints.items() if get_origin(of) is list)


def check(arguments: list[str], recipes: Mapping[str, str]) -> None:
    """Raise UserError, in one line, for prepared arguments that Hydra would refuse with several.

    recipes: what each recipe is for, by its name.
    """
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    values = dict(a.lstrip("+~").split("=", 1) for a in overrides)
    sweeps = bool(set(MULTIRUN) & set(arguments))
    wanted = values.get("recipe")
    if wanted is None:
        raise UserError(
            f"no recipe given; python -m compress recipe=NAME, with NAME one of\n{listed(recipes)}"
        )
    for name in wanted.split(","):
        if name not in recipes:
            raise UserError(f"recipe={name}: no such recipe; there are\n{listed(recipes)}")
    groups = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    for name, value in values.items():
        bare = name.split("@")[0]
        if bare in groups:
            _check_group(bare, value)
        elif bare.split(".")[0] not in HYDRA_KEYS:
            schema.check_field(bare)
    _compose(overrides, sweeps)


def listed(recipes: Mapping[str, str]) -> str:
    """The recipes, a line each."""
    return "\n".join(f"  {name:16} {line}" for name, line in recipes.items())


def _check_group(group: str, value: str) -> None:
    choices = sorted(file.stem for file in (CONF / group).glob("*.yaml"))
    chosen = [part.strip().strip("'\"") for part in value.split(",")]
    for name in chosen:
        if name not in (*choices, "null"):
            raise UserError(f"{group}={name}: no such choice; there are {', '.join(choices)}")


def _compose(overrides: list[str], sweeps: bool) -> None:
    """Compose each job, that what is wrong with any is said before the first runs."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        values = []
        for override, word in zip(parsed, overrides, strict=True):
            if not override.is_sweep_override():
                values.append([word])
            elif sweeps:
                name = override.get_key_element()
                values.append([f"{name}={value}" for value in override.sweep_string_iterator()])
            else:
                raise UserError(f"{word}: several values; add --multirun for a run of each")
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            for job in product(*values):
                hydra.compose("config", overrides=list(job))
    except (HydraException, OmegaConfBaseException) as error:
        parts = [error, error.__cause__] if error.__cause__ else [error]
        said = [str(part).strip().splitlines()[0] for part in parts if str(part).strip()]
        raise UserError(": ".join(dict.fromkeys(said))) from error
