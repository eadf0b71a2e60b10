"""A task's questions: lines of a JSONL file, checked, as items that a model can be asked.

Every line is an object; its texts fill the `{name}` of the task's prompt. Beside these,

    choice      `choices` (continuations of the prompt) and `gold` (index of the right one)
    cloze       `references`: the one continuation of the prompt
    generation  `references`: a text, or a list of accepted ones; `entities`: the names and numbers
                that an answer has to keep, for the metric of that name
    perplexity  nothing
    retrieval   `needle`, `references`
    rules       `rules` (see eval/rules.py)

`id` (of its own in the file) and `lang` may be left out; `filler` in a prompt is repeated `times`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from transformers import PreTrainedTokenizerBase

from compress.errors import UserError
from compress.eval import rules
from compress.eval.tasks import Task
from compress.given import once
from compress.text.windows import leading_ids

PLACE = re.compile(r"\{(\w+)\}")
SENTENCE_END = re.compile(r"[.!?]\s|[。！？\n]")
OPTIONAL = ("id", "lang", "filler", "times")
"""Fields that a line of any kind can have or not."""
OF_KIND = {
    "choice": ("choices", "gold"),
    "cloze": ("references",),
    "generation": ("references", "entities"),
    "perplexity": (),
    "retrieval": ("needle", "references", "entities"),
    "rules": ("rules",),
}
"""Fields that a line has beside what the prompt names."""
FREE = ("json", "python", "no_loop")
"""Metrics that need no reference."""


@dataclass(frozen=True)
class Item:
    """One question: the prompt in words, and what is accepted as its answer.

    references: accepted answers; of a choice, the right one alone. choices: the continuations to
    pick from. rules: what an answer must keep to. entities: what it has to name. place: of a
    needle, the tokens of the text that hides it and its depth in it, 0 to 1.
    """

    id: str
    prompt: str
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    rules: tuple[dict[str, Any], ...] = ()
    entities: tuple[str, ...] = ()
    place: tuple[int, float] | None = None


def items(
    task: Task, limit: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Item]:
    """The items of a task's file, the first `limit` lines of it.

    Retrieval needs the tokenizer: each needle is hidden at every length and depth of the task.
    Raises UserError, with file and line, for what is wrong with the data.
    """
    found = []
    for record in records(task)[:limit]:
        if task.kind != "retrieval":
            found.append(_item(task, record))
            continue
        if tokenizer is None:
            raise ValueError(f"{task.name}: wanted a tokenizer to measure the text with")
        found += _hidden(task, record, tokenizer)
    return found


def records(task: Task) -> list[dict[str, Any]]:
    """The lines of a task's file by our names, each with an `id`. Raises UserError as `items`."""
    try:
        # Not `splitlines`, which parts at characters that JSON leaves as they are.
        lines = task.file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path
        raise UserError(f"{task.file}: cannot be read as text: {error}") from error
    found: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record, problem = _parsed(line)
        if not problem:
            missing = [f for f in task.fields if f[1] not in record]
            record |= {ours: record[theirs] for ours, theirs in task.fields if theirs in record}
            record["id"] = str(record.get("id", f"{task.name}-{number}"))
            problem = next(_unnamed(missing, record), "") or next(_problems(task, record), "")
            if record["id"] in seen:
                problem = f"id {record['id']!r} is that of line {seen[record['id']]} too"
        if problem:
            raise UserError(f"{task.file}:{number}: {problem}")
        seen[record["id"]] = number
        found.append(record)
    if not found:
        raise UserError(f"{task.file}: no lines; wanted one JSON object a line")
    never = [f for f in task.fields if not any(f[1] in record for record in found)]
    if never:  # what a line may leave out
        ours, theirs = never[0]
        raise UserError(f"{task.file}: no line has {theirs!r}, which `fields` reads as {ours}")
    return found


def _unnamed(missing: list[tuple[str, str]], record: dict[str, Any]) -> Iterator[str]:
    """That a record lacks a field by the name that the task's `fields` gives it, in words."""
    for ours, theirs in missing:
        if ours not in OPTIONAL:
            there = ", ".join(name for name in record if name != "id") or "none"
            yield f"no field {theirs!r}, which `fields` reads as {ours}; there are {there}"


def _parsed(line: str) -> tuple[dict[str, Any], str]:
    """The record on a line, or what is wrong with the line."""
    try:
        record = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:  # the latter: nested a thousand deep
        return {}, f"not JSON: {error}"
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell what no text holds, and no tokenizer takes
        return {}, f"half of a surrogate pair, {error.object[error.start]!a}, which is no character"
    if not isinstance(record, dict):
        return {}, f"{type(record).__name__} found; wanted a JSON object"
    return record, ""


def _problems(task: Task, record: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a record, in words."""
    if not isinstance(record.get("lang", "en"), str):
        yield f"lang is {_short(record['lang'])}; wanted a language, such as en"
        return
    given = {"text"} if task.kind == "retrieval" else set()
    for name in PLACE.findall(_prompt(task, record)):
        if name not in record and name not in given:
            yield f"no field {name!r}, which the prompt has as {{{name}}}; there are " + (
                ", ".join(n for n in record if n != "id") or "none"
            )
        elif name not in given and not _is_text(record[name]):
            found = "null" if record[name] is None else _short(record[name])
            yield f"{name} is {found}; wanted a text"
    if task.kind == "choice":
        choices: Any = record.get("choices")
        gold = record.get("gold")
        if not _texts(choices) or len(choices) < 2 or len(set(choices)) < len(choices):
            yield f"choices is {_short(choices)}; wanted a list of two texts or more, all different"
        elif type(gold) is not int or not 0 <= gold < len(choices):  # true and false are no index
            last = len(choices) - 1
            yield f"gold is {_short(gold)}; wanted the index of the right choice, 0 to {last}"
    elif _has_references(task):
        accepted = _listed(record.get("references"))
        if not _texts(accepted) or (task.kind == "cloze" and len(accepted) != 1):
            wanted = "one text" if task.kind == "cloze" else "a text, or a list of texts"
            yield f"references is {_short(record.get('references'))}; wanted {wanted}, not empty"
    if "entities" in task.metrics and not _texts(record.get("entities")):
        yield f"entities is {_short(record.get('entities'))}; wanted a list of texts, not empty"
    if task.kind == "retrieval" and not _texts([record.get("needle")]):
        yield f"needle is {_short(record.get('needle'))}; wanted the sentence to hide"
    if "filler" in record:
        if not isinstance(record["filler"], str):
            yield f"filler is {_short(record['filler'])}; wanted a text"
        if type(record.get("times")) is not int:
            yield f"times is {_short(record.get('times'))}; wanted how often to repeat the filler"
    if task.kind == "rules":
        yield from _rule_problems(record.get("rules"))
    if task.kind == "perplexity" and not _item(task, record).prompt.strip():
        yield f"{', '.join(PLACE.findall(_prompt(task, record)))} is empty; wanted a text to read"


def _has_references(task: Task) -> bool:
    written = task.kind == "generation" and not set(task.metrics) <= {*FREE, "entities"}
    return written or task.kind in ("cloze", "retrieval")


def _rule_problems(found: Any) -> Iterator[str]:
    if not isinstance(found, list) or not found:
        yield f"rules is {_short(found)}; wanted a list of rules, not empty"
        return
    for rule in found:
        problem = rules.problem(rule)
        if problem:
            yield problem


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_text(value: Any) -> bool:
    """Whether `value` can stand in a prompt: a text, or a number, which is written out."""
    return isinstance(value, str) or (type(value) in (int, float) and isfinite(value))


def _texts(value: Any) -> bool:
    """Whether `value` is a list of texts, none of them blank, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(text, str) and text.strip() for text in value)
    )


def _short(value: Any) -> str:
    if value is None:
        return "missing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _prompt(task: Task, record: dict[str, Any]) -> str:
    return task.prompts.get(record.get("lang", "en"), task.prompts["en"])


def _item(task: Task, record: dict[str, Any]) -> Item:
    prompt = PLACE.sub(lambda place: str(record[place[1]]), _prompt(task, record))
    if "filler" in record:  # a boundary case's own prompt holds a place for it
        prompt = prompt.replace("{filler}", record["filler"] * record["times"])
    if task.kind == "choice":
        choices = tuple(record["choices"])
        return Item(record["id"], prompt, (choices[record["gold"]],), choices)
    # A field that the task does not use may hold anything.
    return Item(
        record["id"],
        prompt,
        references=tuple(_listed(record["references"])) if _has_references(task) else (),
        rules=tuple(record["rules"]) if task.kind == "rules" else (),
        entities=tuple(record["entities"]) if "entities" in task.metrics else (),
    )


def _hidden(
    task: Task, record: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Item]:
    """The needle at every length and depth: at the end of a sentence of the text."""
    assert task.haystack is not None
    text = task.haystack.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    for length in task.lengths:
        around = str(tokenizer.decode((ids * (length // len(ids) + 1))[:length]))
        ends = [0, *(match.end() for match in SENTENCE_END.finditer(around)), len(around)]
        for depth in task.depths:
            cut = min(ends, key=lambda end: abs(end - depth * len(around)))
            hiding = f"{around[:cut].rstrip()} {record['needle']} {around[cut:].lstrip()}".strip()
            item = _item(task, {**record, "text": hiding})
            name = f"{item.id}, {length} tokens, depth {depth:g}"
            yield replace(item, id=name, place=(length, depth))


def as_asked(task: Task, item: Item, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the model is given for `item`: through the chat template, or as it is."""
    if task.chat and tokenizer.chat_template:
        # A template may write the BOS token that a tokenizer adds: `generate` keeps it single.
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": item.prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # read by Qwen 3's template alone: no room to think in here
        )
    # A model cannot start from no token at all.
    return item.prompt or ("" if leading_ids(tokenizer) else tokenizer.eos_token)
