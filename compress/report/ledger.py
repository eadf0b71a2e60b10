"""What compressing cost, beside what serving the result saves in a month."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.judged import JUDGING


@dataclass(frozen=True, kw_only=True)
class Terms:
    """requests: a month, each as long as those that `serve` timed. price: of an hour of the machine
    that compresses, and serves the original; price_after: of the one that serves the result; both
    in `currency`. None where it is not known.
    """

    requests: int | None = None
    price: float | None = None
    price_after: float | None = None
    currency: str = ""


UNKNOWN = Terms()


def ledger(
    stages: Sequence[Mapping[str, Any]],
    distill: Mapping[str, Any] | None,
    latency: Mapping[str, Any] | None,
    terms: Terms,
) -> dict[str, Any]:
    """Hours of machine, and money where a price is known.

    stages: name and `seconds` of each. distill, latency: the figures of these stages, if they ran.
    `serving` is None where no traffic is given or nothing was timed; requests are reckoned one
    after the other, at the median times. `months_to_repay`: how long serving takes to save what
    making and judging cost; None where it saves nothing, a price is not known, or no stage made
    anything: the checkpoint was there, and what it cost is not known.
    """
    spent = {
        "making": sum(s["seconds"] for s in stages if s["name"] not in JUDGING),
        "judging": sum(s["seconds"] for s in stages if s["name"] in JUDGING),
    }
    distilling = sum(s["seconds"] for s in stages if s["name"] == "distill")
    found: dict[str, Any] = {
        "requests": terms.requests,
        "currency": terms.currency,
        "spent": {name: _cost(seconds, terms.price) for name, seconds in spent.items()},
        "distill": None,
        "serving": None,
        "months_to_repay": None,
    }
    if distill:
        labels = distill["labels"]
        found["distill"] = {
            **_cost(distilling, terms.price),
            "teacher_tokens": labels["tokens"],
            "teacher_hours": labels["seconds"] / 3600,
            "student_tokens": distill["tokens"],
        }
    if latency and terms.requests:
        prices = {"before": terms.price, "after": terms.price_after or terms.price}
        serving = {
            name: _cost(terms.requests * seconds_of_request(latency[name]), price)
            for name, price in prices.items()
        }
        found["serving"] = serving
        before, after = (serving[name]["money"] for name in prices)
        if spent["making"] and before is not None and after is not None and after < before:
            whole = sum(cost["money"] for cost in found["spent"].values())
            found["months_to_repay"] = whole / (before - after)
    return found


def seconds_of_request(timed: Mapping[str, Any]) -> float:
    """One request from prompt to last token, at the medians of what `serve` timed."""
    steps = timed["new_tokens"] - 1
    return (timed["ttft_ms"]["p50"] + steps * timed["tpot_ms"]["p50"]) / 1000


def _cost(seconds: float, price: float | None) -> dict[str, float | None]:
    hours = seconds / 3600
    return {"hours": hours, "money": None if price is None else hours * price}
