"""The verdict in plain words: does it fit, how much smaller, faster, worse, and what is unknown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from compress.report import tasks
from compress.report.words import (
    BUSY,
    busy,
    comparison,
    count,
    kv_cache,
    listed,
    many,
    milliseconds,
    part,
    percent,
    rate,
    several,
    signed,
    significant,
    size,
    student,
    timed,
)

Figures = Mapping[str, Any]
Tone = Literal["good", "plain", "bad"]

CANNOT_SHOW = "What this cannot show"


@dataclass(frozen=True)
class Finding:
    """One sentence or two on one matter. tone: whether it is good news, bad news, or neither."""

    about: str
    text: str
    tone: Tone = "plain"


def verdict(figures: Figures) -> dict[str, Any]:
    """`headline` and `findings`, from the figures of report.json; no judgement beyond them."""
    findings = [
        finding
        for findings_of in (
            _not_numbers,
            _broken,
            _faults,
            _gate,
            _fits,
            _smaller,
            _student,
            _faster,
            _closeness,
            _tasks,
            _tuned,
        )
        for finding in findings_of(figures)
    ]
    return {"headline": _headline(figures), "findings": [asdict(f) for f in findings]}


def _headline(figures: Figures) -> str:
    name = figures["model_name"]
    title = f"{name} in {figures['scheme']}" if figures["scheme"] else name
    broken = bool(without_numbers(figures))
    facts = ["its outputs are not numbers"] if broken else []
    if figures["bytes"]["before"] and figures["bytes"]["after"]:
        facts.append(_size_change(figures["bytes"]))
    latency = figures["latency"]
    if latency:
        before, after = (latency[when]["decode_tokens_per_s"] for when in ("before", "after"))
        interval = timed(latency, "tpot")
        facts.append(f"decode {comparison(before, after, 'faster', 'slower', interval)}")
    if figures["fidelity"] and figures["fidelity"]["kl"] is not None:
        facts.append(f"KL {significant(figures['fidelity']['kl'], 2)}")
    if figures["tasks"]:
        facts += _tasks_fact(figures["tasks"], broken)
    silent = [task for task in figures["unasked"] if not task["fit"]]
    if silent:
        facts.append(f"{several(len(silent), 'task')} not asked")
    if figures["faults"]:
        facts.append(f"{several(len(figures['faults']), 'fault')} found")
    if figures["gate"] and figures["gate"]["broken"]:
        facts.append("the recipe's gate is broken")
    return f"{title}: {', '.join(facts)}." if facts else f"{title}: nothing was measured."


def _tasks_fact(scores: Sequence[Mapping[str, Any]], broken: bool) -> Iterator[str]:
    """How many tasks are worse, and how many could not tell. broken: that none is is no comfort."""
    every = {t["name"] for t in scores}
    worse = {t["name"] for t in scores if tasks.change(t) == "worse"}
    perhaps = {t["name"] for t in scores if tasks.change(t) == "perhaps worse"} - worse
    blind = every - worse - perhaps - {t["name"] for t in scores if not tasks.shows_nothing(t)}
    if broken and not worse:
        return
    if len(every) == 1:
        told = {"measurably worse": worse, "perhaps worse": perhaps, "unable to show a loss": blind}
        said = next((what for what, names in told.items() if names), "not measurably worse")
        yield f"the one task {said}"
    elif blind == every:
        yield f"none of {len(every)} tasks able to show a loss"
    else:
        others = [f"{len(perhaps)} perhaps"] if perhaps else []
        others += [f"{len(blind)} unable to show a loss"] if blind else []
        beside = f" ({', '.join(others)})" if others else ""
        yield f"{len(worse) or 'none'} of {len(every)} tasks measurably worse{beside}"


def _size_change(sizes: Mapping[str, Any]) -> str:
    share = 1 - sizes["after"] / sizes["before"]
    return f"{percent(abs(share), 0)} {'smaller' if share >= 0 else 'larger'}"


def without_numbers(figures: Figures) -> list[str]:
    """Where the compressed model's outputs are not finite numbers, in words."""
    close, found = figures["fidelity"], {}
    for task in figures["tasks"]:
        number = task.get("not_numbers", {}).get("after", 0)
        if number:
            name = task["name"].replace("_", " ")
            found[name] = f"{count(number)} of {several(task['n'], 'answer')} of {name}"
    held_out = ["the KL on held-out text"] if close and close["kl"] is None else []
    return [*held_out, *found.values()]


def _not_numbers(figures: Figures) -> Iterator[Finding]:
    where = without_numbers(figures)
    if where:
        text = (
            f"The compressed model gives outputs that are not finite numbers: {listed(where)}. "
            "Answers of such likelihoods count as wrong; no other figure says that it can be used."
        )
        yield Finding("Not numbers", text, "bad")


def _broken(figures: Figures) -> Iterator[Finding]:
    if figures["not_finite"]:
        names = listed(figures["not_finite"][:5])
        yield Finding("Not finite", f"NaN or infinity was measured: {names}.", "bad")


def _faults(figures: Figures) -> Iterator[Finding]:
    for fault in figures["faults"]:
        yield Finding(f"Fault found: {fault['name']}", fault["text"], "bad")


def _gate(figures: Figures) -> Iterator[Finding]:
    found = figures["gate"]
    if not found:
        return
    if found["broken"]:
        yield Finding("It fails the recipe's gate", f"{'; '.join(found['broken'])}.", "bad")
        return
    limits = [] if found["kl"] is None else [f"KL at most {found['kl']:g} nats a token"]
    limits += [_drop_allowed(figures, name, most) for name, most in found["tasks"].items()]
    if found["faults"] is not None:
        limits.append(f"faults at most {found['faults']}")
    if found["token_ms"] is not None:
        took = milliseconds(figures["latency"]["after"]["tpot_ms"]["p50"])
        limits.append(f"{took} a token, at most {found['token_ms']:g} ms allowed")
    blind = found["kl"] is None and not found["tasks"]
    text = f"{'; '.join(limits)}.{' No limit is set on quality.' if blind else ''}"
    yield Finding("It passes the recipe's gate", text, "plain" if blind else "good")


def _drop_allowed(figures: Figures, name: str, most: float) -> str:
    """A limit on a task, with the metric that it holds: its first."""
    row = next(row for row in figures["tasks"] if row["name"] == name)
    nothing = "" if row["before"] else " (of 0, so nothing can break this limit)"
    return f"{tasks.label(row)} at most {most:g} points lower{nothing}"


def _fits(figures: Figures) -> Iterator[Finding]:
    memory = (figures["plan"] or {}).get("memory")
    if not memory:
        return
    took = max(memory["total"], _served_bytes(figures))
    least = "at least " if took > memory["total"] else ""
    need = (
        f"Serving takes {least}{size(memory['total'])} by the plan at batch "
        f"{count(memory['batch'])} and {count(memory['tokens'])} tokens a request: "
        f"weights {size(memory['weights'])}, "
        f"KV cache {size(memory['kv_cache'])}{_cache(figures)}, "
        f"activations {size(memory['activations'])}, overhead {size(memory['overhead'])}."
        f"{_measured(figures)}"
    )
    if memory["given"] is None:
        yield Finding("Memory", f"{need} No limit was given to compare it with.")
    elif memory["given"] >= took:
        spare = memory["given"] - took
        left = f"{size(spare)} of the given {size(memory['given'])} stay free"
        yield Finding("It fits", f"{need} {left}.", "good")
    else:
        over = took - memory["given"]
        yield Finding("It does not fit", f"{need} {size(memory['given'])} were given, "
                      f"{size(over)} too few.", "bad")  # fmt: skip


def _measured(figures: Figures) -> str:
    """What serving one request at a time took, which the plan's figure is not for."""
    served = (figures["latency"] or {}).get("after")
    if not served:
        return ""
    whose = "of the GPU" if served.get("peak_device_bytes") else "of the whole process"
    return (
        f" Measured, at one request of {count(served['prompt_tokens'])} and "
        f"{count(served['new_tokens'])} tokens: {size(_served_bytes(figures))} {whose}."
    )


def _served_bytes(figures: Figures) -> int:
    """The most that serving took, of the GPU where there is one; 0 where it was not measured."""
    served = (figures["latency"] or {}).get("after") or {}
    return served.get("peak_device_bytes") or served.get("peak_rss_bytes") or 0


def _cache(figures: Figures) -> str:
    kind = figures["plan"]["kv_cache"]["kind"]
    return "" if kind == "16" else f" with {kv_cache(kind)}"


def _smaller(figures: Figures) -> Iterator[Finding]:
    sizes = figures["bytes"]
    if not sizes["before"] or not sizes["after"]:
        return
    where = "on disk" if sizes["measured"] else "by the plan"
    bits = significant(figures["bits_per_weight"])
    text = (
        f"Weights go from {size(sizes['before'])} to {size(sizes['after'])} {where}, "
        f"{_size_change(sizes)}: {bits} bits a weight over the whole model."
    )
    parts = sizes["by_part"]
    if parts:
        rest = {k: v for k, v in parts["after"].items() if k != "total"}
        largest = max(rest, key=lambda k: rest[k])
        unchanged = rest[largest] == parts["before"][largest]
        share = percent(rest[largest] / parts["after"]["total"], 0)
        text += f" The largest part now is {part(largest)}, {share}"
        text += ", which stays in 16 bit." if unchanged else "."
    yield Finding("Size", text, "good" if sizes["after"] < sizes["before"] else "bad")


def _student(figures: Figures) -> Iterator[Finding]:
    """That a smaller model took the original's place, and how close it came."""
    shrink = figures["shrink"]
    if not shrink:
        return
    counts, kl, ppl = shrink["parameters"], shrink["kl"], shrink["ppl"]
    text = (
        f"What was quantized is not the original but {student(shrink)}, "
        f"{many(counts['after'])} of {many(counts['before'])} parameters. Its held-out KL to the "
        f"original was {significant(kl['before'])} {'untrained' if shrink['student'] else 'as cut'}"
    )
    fit = shrink["fit"]
    if fit and fit["kl"] < kl["before"]:
        text += f", {significant(fit['kl'])} fitted to the original's hidden states"
    if shrink["kept"]:
        text += (
            f" and is {significant(kl['after'])} after {count(shrink['tokens'])} tokens of the "
            f"original's soft labels"
        )
    text += (
        f"; perplexity there {significant(ppl['original'], 4)} for the original, "
        f"{significant(ppl['after'], 4)} for the student, in 16 bit both."
    )
    yield Finding("A smaller model", text)


def _faster(figures: Figures) -> Iterator[Finding]:
    latency = figures["latency"]
    if not latency:
        return
    before, after = latency["before"], latency["after"]
    decode, prefill = (
        (before[k], after[k]) for k in ("decode_tokens_per_s", "prefill_tokens_per_s")
    )
    first = before["ttft_ms"]["p50"], after["ttft_ms"]["p50"]
    decoding = comparison(*decode, "faster", "slower", timed(latency, "tpot"))
    reading = comparison(*prefill, "faster", "slower", timed(latency, "ttft"))
    text = (
        f"Decode goes from {rate(decode[0])} to {rate(decode[1])} ({decoding}), prefill from "
        f"{rate(prefill[0])} to {rate(prefill[1])} ({reading}); the first token comes "
        f"after {milliseconds(first[1])} instead of {milliseconds(first[0])} (medians)."
        f"{_other_step(latency)}{_busy(latency)}"
    )
    tone: Tone = "good" if "faster" in decoding else "bad" if "slower" in decoding else "plain"
    yield Finding("Speed", text, tone)


def _busy(latency: Figures) -> str:
    """Why no difference of speed is named, where the machine is the reason."""
    slow = busy(latency)
    if slow <= BUSY or not latency.get("time_ratio"):
        return ""
    return (
        f" The machine was busy meanwhile, its slow steps (P95) {significant(slow, 2)} times as "
        "long as the median: measure on a quiet one (force=[serve])."
    )


def _other_step(latency: Figures) -> str:
    """Where the two decoded by different steps, that this is a part of what was measured."""
    steps = [latency[when].get("step") for when in ("before", "after")]
    if steps[0] == steps[1]:
        return ""
    kept = latency.get("kv_cache", "16")
    reason = "" if kept == "16" else f", since its KV cache has {kv_cache(kept)}"
    return (
        f" The original decodes {steps[0]}, the compressed model {steps[1]}{reason}: a part of the "
        "difference is that."
    )


def _closeness(figures: Figures) -> Iterator[Finding]:
    close = figures["fidelity"]
    if not close:
        if figures["quantize"]:
            kl = significant(figures["quantize"]["heldout_kl"]["after"])
            yield Finding(
                "Closeness",
                f"Held-out KL to the original was {kl} nats a token after quantization; the "
                "checkpoint itself was not scored.",
            )
        return
    before, after = close["ppl"]["before"], close["ppl"]["after"]
    known = close["kl"] is not None
    kl = f"{significant(close['kl'])} nats a token" if known else "not a finite number"
    text = f"KL to the original is {kl}"
    if known and close.get("kl_ci95"):
        text += f" (95% interval {' to '.join(map(significant, close['kl_ci95']))})"
    if close.get("kl_floor"):
        text += (
            f"; the original as served is {significant(close['kl_floor'])} from itself in float32"
        )
    text += f". Both choose the same next token in {percent(close['top1'])} of places."
    if before and after:
        text += (
            f" Perplexity goes from {significant(before, 4)} to {significant(after, 4)} "
            f"({signed(100 * (after / before - 1))}%)."
        )
    elif before:
        text += f" Perplexity was {significant(before, 4)} and is not a finite number any more."
    yield Finding("Closeness", text)


def _tasks(figures: Figures) -> Iterator[Finding]:
    scores = figures["tasks"]
    kinds: tuple[tuple[tasks.Change, str, Tone], ...] = (
        ("worse", "Measurably worse", "bad"),
        ("perhaps worse", "Perhaps worse", "bad"),
        ("better", "Measurably better", "good"),
        ("perhaps better", "Perhaps better", "plain"),
    )
    for wanted, about, tone in kinds:
        text = tasks.found(scores, wanted)
        if text:
            yield Finding(about, text, tone)
    for about, text in (("Tasks", tasks.rest(scores)), (CANNOT_SHOW, tasks.blind(scores))):
        if text:
            yield Finding(about, text)
    silent = [tasks.unasked(task) for task in figures["unasked"] if not task["fit"]]
    if silent:
        yield Finding("Not asked", " ".join(silent))


def _tuned(figures: Figures) -> Iterator[Finding]:
    """What distillation and the longer window brought, or that they brought nothing."""
    distill, extend = figures["distill"], figures["extend"]
    if distill and distill["kept"]:
        yield Finding("Distillation", f"Kept: {_moved(distill)}.", "good")
    elif distill:
        stays = significant(distill["kl"]["before"])
        yield Finding("Distillation", f"Not kept: held-out KL stays at {stays}.")
    if extend and extend["method"]:
        window, found = extend["window"], extend["ppl_by_position"]
        text = f"{count(window['before'])} to {count(window['after'])} positions; "
        if found["positions"]:
            before, after = (significant(found[when][-1]) for when in ("before", "after"))
            last = count(found["positions"][-1])
            text += (
                f"perplexity of the last part of the window, to position {last}: {before} before, "
                f"{after} after; "
            )
        further = extend["kl"]["after"] > extend["kl"]["before"]
        yield Finding("Context window", f"{text}{_moved(extend)}.", "bad" if further else "plain")


def _moved(found: Mapping[str, Any]) -> str:
    before, after = (significant(found["kl"][when]) for when in ("before", "after"))
    return f"held-out KL {before} before, {after} after"
