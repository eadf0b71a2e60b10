"""A plan on the console: plain words and tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compress.planning.advice import NAMED
from compress.report import words

WAYS = {
    "static": "static",
    "continuous": "continuous",
    "two alike": "two machines, alike",
    "split": "two machines, prefill and decode split",
}
RULES = {
    "window": "the model's window",
    "max": "the longest request",
    "p80": "p80, the longest for a fifth",
    "paged": "pages of 16 tokens",
}


def console(plan: Mapping[str, Any]) -> str:
    """The whole plan as text."""
    return "\n".join(_lines(plan)).replace(words.SPACE, " ") + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in rest)])

    return [line(head), line(["-" * width for width in widths]), *map(line, rows)]


def scheme_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    """A row a scheme: weights, one request of the longest, what fits, times."""
    return [
        [
            row["scheme"],
            words.size(row["weights"]),
            words.significant(row["bits_per_weight"]),
            words.size(sum(row["one_request"].values())),
            *(words.count(batch) for batch in row["largest_batch"].values()),
            words.count(row["largest_length"]["16"]),
            words.seconds(row["ttft_s"]),
            *(words.seconds(seconds) for seconds in row["tpot_s"].values()),
            words.rate((row["continuous"] or {}).get("tokens_per_s")),
        ]
        for row in plan["schemes"]
    ]


def scheme_head(plan: Mapping[str, Any]) -> list[str]:
    """The columns of `scheme_rows`."""
    first = plan["schemes"][0]
    batches = ["batch", *(f"with {kind}" for kind in list(first["largest_batch"])[1:])]
    steps = [f"TPOT x{batch}" for batch in first["tpot_s"]]
    return ["scheme", "weights", "bits", "1 request", *batches, "length", "TTFT", *steps, "served"]


def simulated(plan: Mapping[str, Any]) -> Iterator[str]:
    """That batching was simulated on some of the requests alone, where it was."""
    some, every = plan["batching"]["requests"], plan["requests"]["count"]
    if some < every:
        yield f"Simulated on the first {words.count(some)} of {words.count(every)} requests."


def batching_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    """A row a way of batching."""
    return [
        [
            name,
            words.seconds(found["seconds"]),
            words.rate(found["tokens_per_s"]),
            *(words.seconds(found["ttft_s"][p]) for p in ("p50", "p95")),
            *(words.seconds(found["tpot_s"][p]) for p in ("p50", "p95")),
        ]
        for way, name in WAYS.items()
        for found in [plan["batching"][way]]
    ]


def left_out(plan: Mapping[str, Any]) -> list[str]:
    """The schemes that cannot be, a line a reason."""
    by_reason: dict[str, list[str]] = {}
    for scheme, reason in plan["refused"].items():
        by_reason.setdefault(reason, []).append(scheme)
    return [f"Left out: {words.listed(names)}: {why}" for why, names in by_reason.items()]


BATCHING_HEAD = ["batching", "all", "served", "TTFT p50", "p95", "TPOT p50", "p95"]


def length_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    """Percentiles of prompts, answers and both, in tokens."""
    names = {"prompt": "prompt", "new": "answer", "total": "together"}
    return [
        [name, *(words.count(value) for value in plan["requests"][key].values())]
        for key, name in names.items()
    ]


LENGTH_HEAD = ["tokens", "p50", "p80", "p95", "p99", "max", "mean"]


def reservation_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    """What each rule of allocating the KV cache takes, and lets in."""
    return [
        [RULES[row["rule"]], words.size(row["bytes"]), words.count(row["requests"])]
        for row in plan["reservations"]
    ]


RESERVATION_HEAD = ["KV cache allocated for", "a request", "at once"]


def which_longest(plan: Mapping[str, Any]) -> str:
    """What the longest request is that is planned for."""
    return "the longest, cut to the window" if plan["long_context"]["over"] else "the longest"


def window_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    """What windows up to the longest request leave out, and take."""
    return [
        [
            words.count(row["tokens"]),
            words.percent(row["over"]),
            words.percent(row["cut"]),
            words.size(row["bytes"]),
            words.count(row["at_once"]),
        ]
        for row in plan["long_context"]["windows"]
    ]


WINDOW_HEAD = ["window", "requests over it", "of prompts cut", "KV cache, full", "at once"]


def context_rows(plan: Mapping[str, Any]) -> list[list[str]]:
    """Each way to serve the requests that are over the window; none where there are none."""
    found = plan["long_context"]
    if not found["over"]:
        return []
    read = {
        "truncate": words.percent(1 - found["dropped"]),
        "summaries": "as summaries",
        "extend": "whole",
    }
    return [
        [
            NAMED[way],
            read[way],
            words.size(row["bytes"]),
            words.count(row["at_once"]),
            words.seconds(row["ttft_s"]),
            words.seconds(row["seconds"]),
            words.count(round(row["tokens"])),
        ]
        for way, row in found["ways"].items()
    ]


CONTEXT_HEAD = ["way", "prompt read", "KV cache", "at once", "TTFT", "answered", "tokens"]


def _lines(plan: Mapping[str, Any]) -> Iterator[str]:
    memory, longest = words.size(plan["memory"]), words.count(plan["longest"])
    device = plan["device"]
    yield f"{plan['model']}: {words.many(plan['parameters'])} parameters, on {device['name']}"
    yield f"with {memory}, of which {words.size(plan['overhead'])} are left to driver and engine."
    yield f"Times are predictions: {device['source']}."
    kinds = ", ".join(f"{kind}: {words.size(size)}" for kind, size in plan["kv_cache"].items())
    if any(plan["kv_cache"].values()):
        yield f"KV cache a token, by serve.kv_cache: {kinds}"
    for layers in plan["kv_sliding"]:
        yield (
            f"KV cache of {words.several(layers['layers'], 'layer')} with a sliding window, always "
            f"in 16 bit: {words.size(layers['bytes'])} for each of the last "
            f"{words.count(layers['window'])} tokens"
        )
    yield ""
    yield f"What fits: requests of {longest} tokens ({which_longest(plan)}); TPOT by batch size"
    yield from table(scheme_head(plan), scheme_rows(plan))
    yield from left_out(plan)
    yield ""
    asked = words.several(plan["requests"]["count"], "request")
    yield from table([f"{asked}, {LENGTH_HEAD[0]}", *LENGTH_HEAD[1:]], length_rows(plan))
    yield ""
    yield f"Beside the weights in {plan['base']}:"
    yield from table(RESERVATION_HEAD, reservation_rows(plan))
    yield ""
    yield from table(BATCHING_HEAD, batching_rows(plan))
    yield from simulated(plan)
    yield ""
    yield "Is a longer context needed?"
    yield from table(WINDOW_HEAD, window_rows(plan))
    if plan["long_context"]["over"]:
        yield ""
        over, window = plan["long_context"]["over"], plan["long_context"]["window"]
        which = "The one" if over == 1 else f"Each of the {words.count(over)}"
        mean = "" if over == 1 else ", in the mean"
        yield f"{which} over {words.count(window)} tokens{mean}:"
        yield from table(CONTEXT_HEAD, context_rows(plan))
    yield ""
    yield "Advice, in order:"
    for number, one in enumerate(plan["advice"], 1):
        yield f"{number:2}. {one['about'].capitalize()}. {one['text']}"
