"""What was chosen under a budget, and what it was chosen by, as the report draws it."""

from collections.abc import Mapping, Sequence
from typing import Any

from compress.budget.choices import SIXTEEN_BIT, Group, scheme_name
from compress.qtensor import QuantSpec
from compress.report.words import SPACE, significant, size


def figures(
    groups: Sequence[Group],
    costs: Sequence[Mapping[QuantSpec | None, float]],
    taken: Sequence[QuantSpec | None],
    room: int,
) -> dict[str, Any]:
    """What was measured and chosen, as the report draws it."""
    weights = sum(group.weights for group in groups)
    used = sum(group.sizes[spec] for group, spec in zip(groups, taken, strict=True))
    layers: list[dict[str, Any]] = []
    kept: dict[str, str] = {}
    for group, cost, spec in zip(groups, costs, taken, strict=True):
        layers.append(
            {
                "name": group.name,
                "linears": list(group.names),
                "kl": {scheme_name(s): kl for s, kl in cost.items() if s is not None},
                "bytes": {scheme_name(s): count for s, count in group.sizes.items()},
                "taken": scheme_name(spec),
            }
        )
        if spec is None:
            kept |= dict.fromkeys(group.names, _why_kept(group, cost))
    schemes = dict.fromkeys(scheme_name(spec) for group in groups for spec in group.sizes)
    names = [layer["taken"] for layer in layers for _ in layer["linears"]]
    return {
        "room": room,
        "room_bits": 8 * room / weights,
        "bytes": used,
        "bits_per_weight": 8 * used / weights,
        "weights": weights,
        "kl": sum(cost[spec] for cost, spec in zip(costs, taken, strict=True)),
        "counts": {scheme: names.count(scheme) for scheme in schemes if scheme in names},
        "quantized": sum(scheme != SIXTEEN_BIT for scheme in names),
        "uniform": _uniform(groups, costs),
        "layers": layers,
        "kept": kept,
    }


def _why_kept(group: Group, cost: Mapping[QuantSpec | None, float]) -> str:
    """The reason for 16 bit: what the cheapest other format would have cost and saved."""
    other = min((spec for spec in cost if spec is not None), key=lambda spec: cost[spec])
    saved = size(group.sizes[None] - group.sizes[other]).replace(SPACE, " ")
    return (
        f"the budget has room for it: {other.scheme} would cost a KL of "
        f"{significant(cost[other])} and save {saved}"
    )


def _uniform(
    groups: Sequence[Group], costs: Sequence[Mapping[QuantSpec | None, float]]
) -> list[dict[str, Any]]:
    """Every format that all groups can have: its bits a weight, and its sum of KL."""
    weights = sum(group.weights for group in groups)
    common = [s for s in costs[0] if s is not None and all(s in cost for cost in costs)]
    return [
        {
            "scheme": spec.scheme,
            "bits_per_weight": 8 * sum(group.sizes[spec] for group in groups) / weights,
            "kl": sum(cost[spec] for cost in costs),
        }
        for spec in common
    ]
