"""Options of the small commands: `key=value` words into a dataclass, with its types."""

import dataclasses
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from compress import log
from compress.errors import UserError
from compress.model_path import home

T = TypeVar("T")

WANTED = {
    int: "wanted a whole number",
    int | None: "wanted a whole number",
    float: "wanted a number",
    float | None: "wanted a number",
    bool: "wanted true or false",
}
"""What a word should have been, by the type of its field."""


def parsed(kind: type[T], words: Sequence[str]) -> T:
    """An instance of the dataclass `kind`, its fields set by `words`; text is taken as typed.

    Raises UserError for a word that is no field=value, an unknown field, one that is given twice, a
    value of another type, and a field without a default that is not given; what `kind` itself
    refuses passes through.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    settings = OmegaConf.structured(kind)
    hints = get_type_hints(kind)
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{word}: no option; wanted field=value, of {', '.join(names)}")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            way = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names)}"
            raise UserError(f"{name}: no such option; {way}")
        if name in given:
            raise UserError(f"{name} is given twice, as {given[name]} and {value}; wanted one")
        given[name] = value
        try:
            settings[name] = None if value == "null" else value
        except OmegaConfBaseException as error:
            reason = WANTED.get(hints[name], str(error).splitlines()[0])
            raise UserError(f"{name}={value}: {reason}") from error
    try:
        missing = sorted(OmegaConf.missing_keys(settings))
        if missing:
            wanted = " ".join(f"{name}=…" for name in missing)
            raise UserError(f"{missing[0]} is not given; wanted {wanted}")
        built = OmegaConf.to_object(settings)
    except OmegaConfBaseException as error:
        raise UserError(f"{str(error).splitlines()[0]}; ${{…}} is not filled in here") from error
    assert isinstance(built, kind)
    return built


def folder(out: str | Path) -> Path:
    """The folder `out`, made where there is none. Raises UserError where it cannot be written."""
    place = home(out)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={out}: cannot be written ({error.strerror}); give another folder"
        ) from error
    return place


def run(main: Callable[[list[str]], None], usage: str) -> None:
    """`main` of the command line's words; a user's mistake is one line on stderr and status 2.

    So is Ctrl-C, with status 130, as of any command.
    """
    words = sys.argv[1:]
    if any(word in ("-h", "--help") for word in words):
        sys.stdout.write(usage)
        return
    try:
        log.to_console(words=log.Signed())
        main(words)
    except UserError as error:
        sys.stderr.write(f"compress: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("compress: stopped\n")
        sys.exit(130)
    finally:
        log.stop()
