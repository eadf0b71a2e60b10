"""What an answer to a boundary case must keep to, checked without judgement.

A rule is a record {"rule": name, ...}: contains (`any`: one of these texts occurs), not_empty,
no_garbage (no broken or control characters), no_loop (does not end in a repetition), json (is a
JSON value, maybe in a code fence).
"""

import json
import re
import unicodedata
from typing import Any

from compress.eval.metrics import contains

REPEATS = 4  # the same piece this often in a row, over at least LOOP characters, is a loop
LOOP = 24
FENCE = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)


def loops(text: str) -> bool:
    """Whether some piece stands REPEATS times in a row or more, over LOOP characters or more."""
    pattern = rf"(.{{1,80}}?)\1{{{REPEATS - 1},}}"
    found = re.finditer(pattern, text, re.DOTALL)
    return any(len(match[0]) >= LOOP and not match[1].isspace() for match in found)


def is_json(text: str) -> bool:
    """Whether the whole answer is one JSON value, with or without a code fence around it."""
    fenced = FENCE.match(text.strip())
    try:
        json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    return True


def clean(text: str) -> bool:
    """Whether the text has no replacement character and no control character but white space."""
    return not any(
        char == "\ufffd" or (unicodedata.category(char) == "Cc" and not char.isspace())
        for char in text
    )


def _occurs(wanted: str, text: str) -> bool:
    # Words are compared as words ("4" is not in "14"); where signs count ("a + b"), to the letter.
    plain = all(char.isalnum() or char.isspace() for char in wanted)
    return contains(text, wanted) if plain else wanted in text


def holds(rule: dict[str, Any], text: str) -> bool:
    """Whether `text` keeps to `rule`; ValueError for a rule that there is not."""
    match rule:
        case {"rule": "contains", "any": wanted}:
            return any(_occurs(one, text) for one in wanted)
        case {"rule": "not_empty"}:
            return bool(text.strip())
        case {"rule": "no_garbage"}:
            return clean(text)
        case {"rule": "no_loop"}:
            return not loops(text)
        case {"rule": "json"}:
            return is_json(text)
    raise ValueError(f"no rule {rule!r}")


def broken(rules: tuple[dict[str, Any], ...], text: str) -> list[str]:
    """The names of the rules that `text` breaks."""
    return [rule["rule"] for rule in rules if not holds(rule, text)]
