"""Under load: what `python -m compress.bench` measured, as the report shows it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from compress.errors import UserError
from compress.model_path import home
from compress.report import plots, words
from compress.report.plots import Scales, Series, axis

Load = Mapping[str, Any]

FILE = "load.json"
KEPT = ("checkpoint", "workload", "lengths", "batching", "limits", "seed", "hardware", "command")
KNOWN = {"original": "before", "compressed": "after"}
OTHERS = ("aside", "fourth", "fifth")
"""Styles of their curves: of the two models that the report is of, and of others."""


def read(folder: str) -> dict[str, Any]:
    """The load.json of a folder that the bench wrote. Raises UserError where there is none."""
    file = home(folder) / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        requests = found["open_loop"]["requests"]
        if not requests or any(name not in found for name in KEPT):
            raise KeyError("figures of each request")
    except OSError as error:
        raise UserError(
            f"report.load has {folder}: no {FILE} there; wanted the folder (out=) of a "
            "python -m compress.bench"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"report.load has {folder}: its {FILE} is not one of this version of compress.bench; "
            "measure it again"
        ) from error
    return found


def loads(folders: Sequence[str], known: Mapping[str, Path]) -> list[dict[str, Any]]:
    """What the report keeps of each load. `name`: that of the model in `known` which is in the
    folder that was loaded (`original`, `compressed`), else the folder as it was called.
    """
    places = {home(place).resolve(): name for name, place in known.items()}
    kept = []
    for found in map(read, folders):
        opened = {k: v for k, v in found["open_loop"].items() if k != "moments"}
        place = home(found["checkpoint"]).resolve()
        name = places.get(place, found["checkpoint"])
        kept.append({"name": name, **{key: found[key] for key in KEPT}, "open_loop": opened})
    return kept


def differences(found: Sequence[Load]) -> list[str]:
    """What differs between loads beside the model, in words: then their figures do not compare."""
    parts = {
        "workload": lambda load: (load["workload"], load["lengths"], load["seed"]),
        "rate of arrivals": lambda load: f"{load['open_loop']['rate']:.4g}",
        "limits of the server": lambda load: load["limits"],
        "machine": lambda load: [load["hardware"].get(k) for k in ("cpu", "torch_threads", "gpu")],
    }
    return [part for part, of in parts.items() if any(of(one) != of(found[0]) for one in found)]


def curves(found: Sequence[Load]) -> Markup:
    """Share of the requests that have their first token, and their whole answer, by a time."""
    styles = [KNOWN.get(load["name"], OTHERS[i % len(OTHERS)]) for i, load in enumerate(found)]
    legend = plots.legend((load["name"], style) for load, style in zip(found, styles, strict=True))
    drawn = [
        _curve(found, styles, f"requests with {what}", key)
        for what, key in (("their first token", "ttft_s"), ("their whole answer", "whole_s"))
    ]
    return legend + Markup('<div class="panels">{}</div>').format(Markup("").join(drawn))


def _curve(found: Sequence[Load], styles: Sequence[str], title: str, key: str) -> Markup:
    series = []
    for load, style in zip(found, styles, strict=True):
        waits = sorted(request[key] for request in load["open_loop"]["requests"])
        points = [(wait, (i + 1) / len(waits)) for i, wait in enumerate(waits)]
        series.append(Series(load["name"], style, points))
    scales = Scales(
        axis([wait for one in series for wait, _ in one.points], log=True),
        plots.Axis(0.0, 1.0),
        "after so long, logarithmic",
        title,
        words.seconds,
        lambda share: words.percent(share, 0),
    )
    return plots.xy(series, scales)
