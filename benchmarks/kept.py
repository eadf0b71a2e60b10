"""What benchmarks keep: results that a later run adds to, and the tables in docs made of them."""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.artifact import differences, write_text


def settings(options: argparse.Namespace, *apart: str) -> dict[str, Any]:
    """What all results of a file depend on: the options, files by their names, but those `apart`,
    which say where the work is done or which results are wanted.
    """
    given = {k: v for k, v in vars(options).items() if k not in apart}
    return {k: v.name if isinstance(v, Path) else v for k, v in given.items()}


def results_before(
    file: Path, asked: dict[str, Any], later: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The results in `file`. Ends the program where they are of other settings than `asked`.

    later: options that older files lack, with what was done without them.
    """
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    known = {**(later or {}), **found}
    changed = differences({k: known[k] for k in asked if k in known}, asked)
    if changed:
        sys.exit(f"{file}: made with other settings: {'; '.join(changed)}. Give another --name")
    return found["results"]


def write_between(page: Path, name: str, text: str) -> None:
    """Put `text` into the page, between <!-- name: begin --> and <!-- name: end -->."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    whole = page.read_text(encoding="utf-8")
    written, count = pattern.subn(lambda _: f"{begin}\n\n{text}\n\n{end}", whole)
    if count != 1:
        raise SystemExit(f"{page}: wanted {begin} and {end} in it once")
    write_text(page, written)
