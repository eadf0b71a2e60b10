"""`python -m compress.compare RUN RUN … [out=FOLDER]`: finished runs side by side.

Writes comparison.html, one file that needs no network, and comparison.json into `out`, which is
the folder that holds all the runs unless given. A sweep (--multirun) does this by itself.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from compress import options
from compress.artifact import write_json, write_text
from compress.errors import UserError
from compress.report.comparison import comparison
from compress.report.pages import comparison_page


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Compare the runs in `folders` and return the page. Raises UserError for what is no run."""
    found = comparison(folders)
    folder = out or Path(os.path.commonpath([f.resolve().parent for f in folders]))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", found)
    write_text(folder / "comparison.html", comparison_page(found))
    return folder / "comparison.html"


def main(words: list[str]) -> None:
    """Compare the runs that the words name, and print where the page is."""
    given = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    runs = [Path(word).expanduser() for word in words if not word.startswith("out=")]
    if len(runs) < 2 or len(given) > 1:
        raise UserError(
            "wanted two runs or more: python -m compress.compare RUN RUN … [out=FOLDER]"
        )
    page = write(runs, Path(given[0]).expanduser() if given else None)
    sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    options.run(main, __doc__ or "")
