"""The limits that a recipe sets on what may be lost, and which of them a run breaks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Gate:
    """What a compressed model may lose at most.

    kl: KL to the original, in nats a token; null: any. tasks: by task, the largest drop of its
    first metric, in points of 100. The measured figures count, not their intervals.
    """

    kl: float | None = None
    tasks: dict[str, float] = field(default_factory=dict)

    def problems(self, scored: list[str]) -> list[str]:
        """What is wrong with the limits, a line each; scored: the tasks that are judged."""
        limits = {f"tasks.{name}": limit for name, limit in self.tasks.items()}
        if self.kl is not None:
            limits["kl"] = self.kl
        negative = [
            f"score.gate.{name} is {limit}; wanted 0 or more"
            for name, limit in limits.items()
            if limit < 0
        ]
        return negative + [
            f"score.gate.tasks names {name}, which score.tasks leaves out; ask it too, or drop it: "
            f"~score.gate.tasks.{name}"
            for name in self.tasks
            if name not in scored
        ]

    @property
    def limits(self) -> int:
        """How many limits there are."""
        return len(self.tasks) + (self.kl is not None)


def broken(gate: Gate, scores: Mapping[str, Any]) -> list[str]:
    """The limits that these scores break, each in words; `scores` as the stage score returns them.

    A figure that is not finite, or a task of which no item was asked, breaks its limit.
    """
    found = []
    kl = scores["fidelity"]["kl"]
    if gate.kl is not None and not (kl is not None and kl <= gate.kl):
        found.append(f"KL {_number(kl)} nats a token, at most {gate.kl:g} allowed")
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
            found.append(
                f"{name}, {row['metric']} fell {drop:.1f} points ({row['before']:.1f} to "
                f"{row['after']:.1f}), at most {most:g} allowed"
            )
    return found


def _number(value: float | None) -> str:
    return "that is not finite," if value is None else f"{value:.4f}"
