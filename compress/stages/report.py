"""report: what was won and what was lost, as a page, as Markdown, and as data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from compress.artifact import write_json, write_text
from compress.report.figures import figures
from compress.report.pages import page, sheet, short
from compress.stage import Run


@dataclass(kw_only=True)
class Report:
    """report.html to decide from, .md to paste, .json to compute with, .outputs.csv to mark."""

    name: ClassVar[str] = "report"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("manifests",)
    gives: ClassVar[str | None] = None
    shares: ClassVar[tuple[str, ...]] = ("gate",)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        """Gather the figures first; all texts are drawn from them alone."""
        found = figures(run)
        write_json(out / "report.json", found)
        write_text(out / "report.md", short(found))
        write_text(out / "report.html", page(found))
        write_text(out / "report.outputs.csv", sheet(found["outputs"]))
        return {"headline": found["verdict"]["headline"]}
