"""What can be said of a text without knowing the right answer: does it parse, does it loop?"""

import ast
import json
import re
import unicodedata
import warnings

REPEATS = 4  # the same piece this often in a row, over at least LOOP characters, is a loop
LOOP = 24
FENCE = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)
BLOCK = re.compile(r"^```\w*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def loops(text: str) -> bool:
    """Whether some piece stands REPEATS times in a row or more, over LOOP characters or more."""
    pattern = rf"(.{{1,80}}?)\1{{{REPEATS - 1},}}"
    found = re.finditer(pattern, text, re.DOTALL)
    return any(len(match[0]) >= LOOP and not match[1].isspace() for match in found)


def clean(text: str) -> bool:
    """Whether the text has no replacement character and no control character but white space."""
    return not any(
        char == "\ufffd" or (unicodedata.category(char) == "Cc" and not char.isspace())
        for char in text
    )


def unfenced(text: str) -> str:
    """The text without white space around it, or what a code fence around it all holds."""
    text = text.strip()
    fenced = FENCE.match(text)
    return fenced[1] if fenced else text


def code(text: str) -> str:
    """The first fenced block of an answer, or all of it where nothing is fenced."""
    fenced = BLOCK.search(text)
    return fenced[1] if fenced else text


def is_json(text: str) -> bool:
    """Whether the whole answer is one JSON value, with or without a code fence around it."""
    try:
        json.loads(unfenced(text))
    except (ValueError, RecursionError):
        return False
    return True


def is_python(text: str) -> bool:
    """Whether the whole answer parses as Python, at least one statement; it is never run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an invalid escape: it still parses
            return bool(ast.parse(unfenced(text)).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
