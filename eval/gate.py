"""The limits that a recipe sets on loss and speed, and which of them a run breaks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any


@dataclass(kw_only=True)
class Gate:
    """What a compressed model may lose at most, and how long it may take.

    kl: KL to the original, in nats a token; null: any. tasks: by task, the largest drop of its
    first metric, in points of 100. token_ms: milliseconds that each further token of one request
    takes, by the median that the stage serve measured; null: any. faults: how many of the faults
    that are looked for may be found; null: any. The measured figures count, not their intervals.
    """

    kl: float | None = None
    tasks: dict[str, float] = field(default_factory=dict)
    token_ms: float | None = None
    faults: int | None = None

    def problems(self, scored: list[str]) -> list[str]:
        """What is wrong with the limits, a line each; scored: the tasks that are judged."""
        limits = {f"tasks.{name}": limit for name, limit in self.tasks.items()}
        if self.kl is not None:
            limits["kl"] = self.kl
        if self.faults is not None:
            limits["faults"] = self.faults
        wrong = [
            f"score.gate.{name} is {limit}; wanted 0 or more"
            for name, limit in limits.items()
            if not limit >= 0  # NaN too
        ]
        if self.token_ms is not None and not 0 < self.token_ms < inf:
            wrong.append(
                f"score.gate.token_ms is {self.token_ms}; wanted a finite number above 0, or null"
            )
        return wrong + [
            f"score.gate.tasks names {name}, which score.tasks leaves out; ask it too, or give no "
            f"limit on it: ~score.gate.tasks.{name} takes off the recipe's"
            for name in self.tasks
            if name not in scored
        ]

    @property
    def limits(self) -> int:
        """How many limits there are."""
        single = (self.kl, self.token_ms, self.faults)
        return len(self.tasks) + sum(limit is not None for limit in single)

    def checked(self, *, scored: bool, served: bool) -> "Gate":
        """The limits that a run checks: all where it scored, that of speed where it only served."""
        return self if scored else Gate(token_ms=self.token_ms if served else None)


def broken(
    gate: Gate, scores: Mapping[str, Any] | None, latency: Mapping[str, Any] | None
) -> list[str]:
    """The limits that are broken, each in words; `scores` and `latency` as the stages score and
    serve return them, None of a stage that did not run.

    A figure that is not finite, a task of which no item was asked, and scores without the time of
    a token break their limits. Without scores that of speed alone is checked.
    """
    gate = gate.checked(scored=scores is not None, served=latency is not None)
    found = _lost(gate, scores) if scores is not None else []
    if gate.token_ms is not None:
        took = latency["after"]["tpot_ms"]["p50"] if latency is not None else None
        if took is None:
            found.append(f"no token was timed, at most {gate.token_ms:g} ms allowed")
        elif not took <= gate.token_ms:
            digits = _telling(took, gate.token_ms)
            found.append(f"{took:{digits}} ms a token, at most {gate.token_ms:g} allowed")
    return found


def _telling(value: float, limit: float) -> str:
    """The format with the fewest decimals, 1 to 4, that tells `value` from the limit below it; one
    with all its digits where these do not.
    """
    return next((f",.{n}f" for n in range(1, 5) if round(value, n) > limit), "")


def _lost(gate: Gate, scores: Mapping[str, Any]) -> list[str]:
    found = []
    kl = scores["fidelity"]["kl"]
    if gate.kl is not None and not (kl is not None and kl <= gate.kl):
        found.append(f"KL {_nats(kl, gate.kl)}, at most {gate.kl:g} allowed")
    faults = [fault["name"] for fault in scores["faults"]]
    if gate.faults is not None and len(faults) > gate.faults:
        how_many = f"{len(faults)} fault{'s' if len(faults) > 1 else ''}"
        found.append(f"{how_many} ({', '.join(faults)}), at most {gate.faults} allowed")
    first: dict[str, Mapping[str, Any]] = {}
    for row in scores["tasks"]:
        first.setdefault(row["name"], row)
    for name, most in gate.tasks.items():
        if name not in first:
            found.append(f"{name} was not asked, a drop of at most {most:g} points is allowed")
            continue
        row = first[name]
        drop = row["before"] - row["after"]
        if not drop <= most:
            digits = _telling(drop, most)
            found.append(
                f"{name}, {row['metric']} fell {drop:{digits}} points "
                f"({row['before']:{digits}} to {row['after']:{digits}}), at most {most:g} allowed"
            )
    return found


def _nats(kl: float | None, limit: float) -> str:
    if kl is None or not isfinite(kl):
        return "that is not a finite number"
    digits = ".4f" if round(kl, 4) > limit else ""  # all of them, where fewer do not tell
    return f"{kl:{digits}} nats a token"
