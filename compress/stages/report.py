"""report: what was won and what was lost, as a page, as Markdown, as data, and for the card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from compress.artifact import write_json, write_text
from compress.report.card import model_card
from compress.report.figures import figures
from compress.report.pages import page, sheet, short
from compress.stage import Run

CARD = "card.md"


@dataclass(kw_only=True)
class Report:
    """report.html to decide from, .md to paste, .json to compute with, .outputs.csv to mark; and
    card.md, the checkpoint's card with its scores.
    """

    name: ClassVar[str] = "report"
    version: ClassVar[int] = 2
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
        scores = {"score": found} if found["fidelity"] else {}
        write_text(out / CARD, model_card(found["recipe"], found["model"], {**found, **scores}))
        return {"headline": found["verdict"]["headline"]}
