"""`python -m compress.compare RUN RUN … [out=FOLDER]`: finished runs side by side.

Writes comparison.html, one file that needs no network, and comparison.json into `out`, and prints
where. Without it, that is the folder that the runs lie in, or which holds them all where that is
the current folder or below it; else it is the current folder. A sweep (--multirun) does this by
itself.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress import options
from compress.artifact import write_json, write_text
from compress.errors import UserError
from compress.model_path import home
from compress.report.comparison import comparison
from compress.report.pages import comparison_page


@dataclass(kw_only=True)
class Settings:
    """out: the folder to write into; null: beside the runs, or the current folder."""

    out: str | None = None


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Compare the runs in `folders` and return the page.

    Raises UserError for what is no run, and for an `out` that cannot be made.
    """
    place = out or _place(folders)
    found = comparison(folders, place)
    folder = options.folder(place)
    write_json(folder / "comparison.json", found)
    write_text(folder / "comparison.html", comparison_page(found))
    return folder / "comparison.html"


def _place(folders: Sequence[Path]) -> Path:
    """The folder for the page of these runs: beside them, never far above them."""
    parents = {folder.resolve().parent for folder in folders}
    shared, here = Path(os.path.commonpath(parents)), Path.cwd()
    beside = len(parents) == 1 and shared != Path(shared.anchor)
    return shared if beside or shared.is_relative_to(here) else here


def _is_option(word: str) -> bool:
    """Whether `word` is name=value and no run: a run's folder may have a `=` in its name, as those
    of a sweep do.
    """
    name, equals, _ = word.partition("=")
    run = "/" in name or home(word).is_dir()
    return bool(equals) and (name == "out" or not run)


def main(words: list[str]) -> None:
    """Compare the runs that the words name, and print where the page is."""
    given = [word for word in words if _is_option(word)]
    settings = options.parsed(Settings, given)
    runs = [home(word) for word in words if word not in given]
    if len(runs) < 2:
        raise UserError(
            "wanted two runs or more: python -m compress.compare RUN RUN … [out=FOLDER]"
        )
    page = write(runs, home(settings.out) if settings.out else None)
    sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    options.run(main, __doc__ or "")
