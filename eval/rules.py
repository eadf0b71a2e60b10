"""What an answer to a boundary case must keep to, checked without judgement.

A rule is a record {"rule": name, ...}: contains (`any`: one of these texts occurs), not_empty,
no_garbage (no broken or control characters), no_loop (does not end in a repetition), lines (so many
that are not blank: `count`), most_words (`count`), and of form, a code fence allowed: json (a JSON
value; an object of exactly these `keys`, or an array of `length`), python (parses), csv (`rows` of
`columns`), matches (the whole answer is of this regular expression, `pattern`). runs: the answer's
Python (its first fenced block, or all of it), after `before` if that is given, passes the
statements of `tests`; it is run in a sandbox (eval/sandbox.py).
"""

import csv
import json
import re
from collections.abc import Callable
from typing import Any

from compress.eval import checks, sandbox
from compress.eval.text import contains, units


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return True


def _is_python(value: Any) -> bool:
    return isinstance(value, str) and checks.is_python(value)


FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("a list of texts", _is_texts),
    "keys": ("a list of texts", _is_texts),
    "length": ("a whole number", _is_count),
    "rows": ("a whole number", _is_count),
    "columns": ("a whole number", _is_count),
    "count": ("a whole number", _is_count),
    "pattern": ("a regular expression", _is_pattern),
    "tests": ("Python that parses", _is_python),
    "before": ("a text", lambda value: isinstance(value, str)),
}
"""What a rule says beside its name: in words, and whether a value is that."""


def problem(rule: Any) -> str | None:
    """What is wrong with a rule, in words, or None."""
    if not isinstance(rule, dict):
        return f"rule {rule!r}; wanted an object with the name of a rule"
    for name, value in rule.items():
        if name != "rule" and name not in FIELDS:
            return f"rule {rule!r} has no place for {name}"
        if name != "rule" and not FIELDS[name][1](value):
            return f"rule {rule!r}: {name} is {value!r}; wanted {FIELDS[name][0]}"
    try:
        holds(rule, "")
    except ValueError as error:
        return str(error)
    return sandbox.missing() if rule["rule"] == "runs" else None


def _occurs(wanted: str, text: str) -> bool:
    # Words are compared as words ("4" is not in "14"); where signs count ("a + b"), to the letter.
    plain = all(char.isalnum() or char.isspace() for char in wanted)
    return contains(text, wanted) if plain else wanted in text


def _is_like(value: Any, rule: dict[str, Any]) -> bool:
    """Whether a JSON value has exactly the keys, or the length, that the rule asks for."""
    if "keys" in rule:
        return isinstance(value, dict) and sorted(value) == sorted(rule["keys"])
    if "length" in rule:
        return isinstance(value, list) and len(value) == rule["length"]
    return True


def holds(rule: dict[str, Any], text: str) -> bool:
    """Whether `text` keeps to `rule`; ValueError for a rule that there is not."""
    match rule:
        case {"rule": "contains", "any": wanted}:
            return any(_occurs(one, text) for one in wanted)
        case {"rule": "not_empty"}:
            return bool(text.strip())
        case {"rule": "no_garbage"}:
            return checks.clean(text)
        case {"rule": "no_loop"}:
            return not checks.loops(text)
        case {"rule": "json"}:
            return checks.is_json(text) and _is_like(json.loads(checks.unfenced(text)), rule)
        case {"rule": "python"}:
            return checks.is_python(text)
        case {"rule": "runs", "tests": tests}:
            return bool(text.strip()) and sandbox.passes(
                f"{rule.get('before', '')}{checks.code(text)}\n{tests}"
            )
        case {"rule": "csv", "rows": rows, "columns": columns}:
            table = [row for row in csv.reader(checks.unfenced(text).splitlines()) if row]
            return len(table) == rows and all(len(row) == columns for row in table)
        case {"rule": "matches", "pattern": pattern}:
            return re.fullmatch(pattern, checks.unfenced(text)) is not None
        case {"rule": "lines", "count": count}:
            return sum(bool(line.strip()) for line in text.splitlines()) == count
        case {"rule": "most_words", "count": count}:
            return len(units(text)) <= count
    raise ValueError(f"no rule {rule!r}")


def broken(rules: tuple[dict[str, Any], ...], text: str) -> list[str]:
    """The names of the rules that `text` breaks."""
    return [rule["rule"] for rule in rules if not holds(rule, text)]
