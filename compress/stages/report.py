"""report: what was won and what was lost, as a page, as Markdown, as data, and for the card."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from compress.artifact import write_json, write_text
from compress.errors import ConfigError, UserError
from compress.report.card import model_card
from compress.report.figures import figures
from compress.report.ledger import Terms
from compress.report.load import read
from compress.report.pages import page, sheet, short
from compress.stage import Run

CARD = "card.md"


@dataclass(kw_only=True)
class Report:
    """report.html to decide from, .md to paste, .json to compute with, .outputs.csv to mark; and
    card.md, the card with its scores of a checkpoint that the run made.

    requests: a month, each as long as those that serve timed; with them the report weighs what
    compressing cost against what serving saves. hour_price: of an hour of the machine that
    compresses and serves the original, in `currency`; hour_price_after: of the one that will serve
    the result, null: the same. null: not known, and left out. load: folders that
    `python -m compress.bench` wrote, of the checkpoint, and of the original to set beside it.
    """

    name: ClassVar[str] = "report"
    version: ClassVar[int] = 8
    needs: ClassVar[tuple[str, ...]] = ("manifests",)
    gives: ClassVar[str | None] = None
    shares: ClassVar[tuple[str, ...]] = ("gate",)

    requests: int | None = None
    hour_price: float | None = None
    hour_price_after: float | None = None
    currency: str = ""
    load: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        problems = [
            f"report.{name} is {value}; wanted above 0, or null"
            for name in ("requests", "hour_price", "hour_price_after")
            if (value := getattr(self, name)) is not None and value <= 0
        ]
        if self.hour_price_after is not None and self.hour_price is None:
            problems.append(
                f"report.hour_price_after is {self.hour_price_after}, but hour_price is null; "
                "wanted both, or hour_price alone"
            )
        for folder in self.load:
            try:
                read(folder)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(problems)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        """Gather the figures first; all texts are drawn from them alone."""
        found = figures(run, self.terms, self.load)
        write_json(out / "report.json", found)
        write_text(out / "report.md", short(found))
        write_text(out / "report.html", page(found))
        write_text(out / "report.outputs.csv", sheet(found["outputs"]))
        if run.config.checkpoint is None:
            scores = {"score": found} if found["fidelity"] else {}
            card = model_card(found["recipe"], found["model"], {**found, **scores}, found)
            write_text(out / CARD, card)
        return {"headline": found["verdict"]["headline"]}

    @property
    def terms(self) -> Terms:
        """What the report reckons costs by."""
        return Terms(
            requests=self.requests,
            price=self.hour_price,
            price_after=self.hour_price_after,
            currency=self.currency,
        )
