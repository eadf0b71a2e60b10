"""What to do, in order: first what costs no quality (batching, cache, decoding, context), then
quantization, then distillation. Every line carries its figure, from the figures of `study`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from compress.report import words

Figures = Mapping[str, Any]
GAIN = 1.05
"""Ratio below which a change is said not to matter."""

NAMED = {
    "truncate": "truncation",
    "summaries": "a two-stage summary",
    "extend": "a longer window",
}


def advice(plan: Figures) -> list[dict[str, str]]:
    """Lines of advice in order, each `about` what and its `text`."""
    steps = (_batching, _cache, _decoding, _split, _context, _quantization, _distillation)
    return [{"about": about, "text": text} for step in steps for about, text in step(plan)]


def _batching(plan: Figures) -> Iterator[tuple[str, str]]:
    found = plan["batching"]
    before, after = found["static"], found["continuous"]
    ratio = after["tokens_per_s"] / before["tokens_per_s"]
    rates = f"{words.rate(before['tokens_per_s'])} to {words.rate(after['tokens_per_s'])}"
    waits = (
        f"TTFT at p95 {words.seconds(before['ttft_s']['p95'])} to "
        f"{words.seconds(after['ttft_s']['p95'])}"
    )
    if ratio > GAIN:
        text = f"Batch continuously, not statically: {rates}, {waits}."
    elif after["ttft_s"]["p95"] * GAIN < before["ttft_s"]["p95"]:
        text = f"Batch continuously, not statically: {waits}, though no more is served ({rates})."
    else:
        text = f"Static batching does as well on these lengths: {rates}, {waits}."
    yield "batching", text


def _cache(plan: Figures) -> Iterator[tuple[str, str]]:
    by_rule = {row["rule"]: row for row in plan["reservations"]}
    most, p80, paged = by_rule["max"], by_rule["p80"], by_rule["paged"]
    if paged["requests"] > most["requests"]:
        text = (
            f"Allocate the KV cache in pages: {words.several(paged['requests'], 'request')} at "
            f"once; with room for the longest in each, {words.count(most['requests'])}."
        )
    else:
        text = (
            "Pages of 16 tokens do not pay on these lengths: with them a request takes "
            f"{words.size(paged['bytes'])}, {words.count(paged['requests'])} at once; with room "
            f"for the longest {words.size(most['bytes'])}, {words.count(most['requests'])} at once."
        )
    if p80["requests"] > most["requests"]:
        saved = words.percent(1 - p80["bytes"] / most["bytes"])
        text += (
            f" Without pages, allocate for {words.count(p80['p80'])} tokens (p80) and more for the "
            f"fifth that is longer: {saved} saved, {words.several(p80['requests'], 'request')}."
        )
    yield "cache", text
    first = next(row for row in plan["schemes"] if row["scheme"] == plan["base"])
    batches = first["largest_batch"]
    if batches.get("kv8", 0) > batches["16"]:
        yield (
            "cache",
            f"K and V in 8 bit: {words.count(batches['kv8'])} of the longest requests fit instead "
            f"of {words.count(batches['16'])} (V alone: {words.count(batches['v8'])}).",
        )


def _decoding(plan: Figures) -> Iterator[tuple[str, str]]:
    found = plan["decoding"]
    beams = str(found["beams"])
    rate = found["beam_tokens_per_s"]
    if found["without_stop"] > GAIN:
        longest = words.count(plan["requests"]["new"]["max"])
        yield (
            "decoding",
            f"Stop at the end token: answers that run to {longest} tokens take "
            f"{words.significant(found['without_stop'])} times as many.",
        )
    if found["cut_share"]:
        yield (
            "decoding",
            f"max_new_tokens={found['cap']} (p95) cuts {words.percent(found['cut_share'])} of the "
            f"answers, saves {words.percent(found['cap_saves_tokens'])} of the tokens, and a "
            f"request then reserves {words.percent(found['cap_reserves'], 0)} of what the longest "
            "answer asks.",
        )
    many, one = (found["beam_requests"][copies] for copies in (beams, "1"))
    at_once = f"{words.several(many, 'request')} at once instead of {words.count(one)}"
    if many == one:
        at_once = f"{words.several(many, 'request')} at once either way"
        at_once += ", the most that is simulated" if many == found["most_at_once"] else ""
    yield (
        "decoding",
        f"{beams} beams, decoding as many requests as fit without a pause, leave "
        f"{words.rate(rate[beams])} of {words.rate(rate['1'])}: {at_once}.",
    )


def _split(plan: Figures) -> Iterator[tuple[str, str]]:
    alike, split = plan["batching"]["two alike"], plan["batching"]["split"]
    slower = split["seconds"] / alike["seconds"]
    steadier = alike["tpot_s"]["p95"] / split["tpot_s"]["p95"] if split["tpot_s"]["p95"] else 1.0
    pays = slower < GAIN and (steadier > GAIN or slower * GAIN < 1)
    verdict = "pays" if pays else "does not pay"
    yield (
        "splitting prefill from decode",
        f"With two machines it {verdict}: {words.seconds(alike['seconds'])} for all with two "
        f"alike, {words.seconds(split['seconds'])} split; TPOT at p95 "
        f"{words.seconds(alike['tpot_s']['p95'])} and {words.seconds(split['tpot_s']['p95'])}.",
    )


def _context(plan: Figures) -> Iterator[tuple[str, str]]:
    found = plan["long_context"]
    window, longest = words.count(found["window"]), words.count(found["longest"])
    beyond = _beyond(found, plan["positions"])
    if not found["over"]:
        yield (
            "context",
            f"No longer context is needed: the longest request has {longest} tokens, "
            f"the window {window}.{beyond}",
        )
        return
    costs = "; ".join(
        f"{NAMED[way]} {words.size(row['bytes'])} and {words.seconds(row['ttft_s'])}"
        for way, row in found["ways"].items()
    )
    yield (
        "context",
        f"{words.percent(found['share'])} of the requests are over the window of {window} tokens. "
        f"{_chosen(found, plan['base'])} KV cache and TTFT of each of them: {costs}.{beyond}",
    )


def _beyond(found: Figures, positions: int) -> str:
    """A remark on a window that the model does not have; empty where it has it."""
    if found["window"] <= positions:
        return ""
    window, factor = found["window"], math.ceil(found["window"] / positions)
    unused = ", which none of these requests needs" if found["longest"] <= positions else ""
    return (
        f" The model's own window is {words.count(positions)} tokens: {words.count(window)} take "
        f"extending it by {words.count(factor)}{unused}."
    )


def _chosen(found: Figures, base: str) -> str:
    """The way that is advised, and why. base: the scheme of the weights."""
    dropped = words.percent(found["dropped"])
    extended, summarized = found["ways"]["extend"], found["ways"]["summaries"]
    parts = words.significant(found["parts"], 2)
    summarize = f"summarize in two stages ({parts} parts of a window each, then the answer)"
    match found["choice"]:
        case "truncate":
            return f"No longer context is needed: truncation drops only {dropped} of their prompts."
        case "window":
            longer = found["windows"][-1]["tokens"]
            return (
                f"Serve with window={longer}, which the model has without training: "
                f"{words.count(extended['at_once'])} of them at once. Truncation drops {dropped} "
                "of their prompts."
            )
        case "extend":
            return (
                f"A longer one pays if they must be read whole: extend by {found['factor']}, "
                f"{words.count(extended['at_once'])} of them at once. Truncation drops {dropped} "
                "of their prompts."
            )
    if extended["at_once"] < 1:
        why = f"a longer window does not fit beside the weights in {base}"
    elif extended["ttft_s"] > summarized["ttft_s"]:
        why = "that begins to answer sooner than a longer window"
    else:
        why = "so few do not pay for a window that changes the model for all"
    return (
        f"No longer context is needed: where truncation, which drops {dropped} of their prompts, "
        f"cuts what matters, {summarize}; {why}."
    )


def _quantization(plan: Figures) -> Iterator[tuple[str, str]]:
    """The mildest scheme that comes near the best, since what is rounded less loses less."""
    plain, rows = plan["schemes"][0], [row for row in plan["schemes"] if row["fits"]]
    most = max(row["continuous"]["tokens_per_s"] for row in rows)
    taken = next(row for row in rows if row["continuous"]["tokens_per_s"] * GAIN >= most)
    smallest = min(rows, key=lambda row: row["tpot_s"]["1"])
    figures = {row["scheme"]: _figures(row) for row in (plain, taken, smallest)}
    if not plain["fits"]:
        why = (
            f"Needed: in 16 bit the weights of {words.size(plain['weights'])} leave no room for "
            "the longest request. The mildest scheme near the best"
        )
        del figures[plain["scheme"]]
    elif taken["scheme"] == smallest["scheme"] == plain["scheme"]:
        why = "Not needed, neither for throughput nor for the time of a token"
    elif taken["scheme"] == plain["scheme"]:
        why = "Not needed for throughput; for the time of a token it may be"
    else:
        why = f"{taken['scheme']} is the mildest scheme near the best"
    yield "quantization", f"{why}: {'; '.join(figures.values())}."


def _figures(row: Figures) -> str:
    rate = words.rate(row["continuous"]["tokens_per_s"]) if row["continuous"] else "none"
    return (
        f"{row['scheme']} {words.size(row['weights'])}, {rate}, "
        f"{words.seconds(row['tpot_s']['1'])} a token for one alone"
    )


def _distillation(plan: Figures) -> Iterator[tuple[str, str]]:
    student = plan["student"]
    small = student["rows"][-1]
    if student["blocks"] == plan["blocks"]:
        return
    yield (
        "distillation",
        f"Last, since it takes training and costs quality: a student with {student['blocks']} of "
        f"{plan['blocks']} blocks has {words.many(student['parameters'])} parameters; with "
        f"{small['scheme']} it takes {words.size(small['weights'])} and "
        f"{words.seconds(small['tpot_s'])} a token.",
    )
