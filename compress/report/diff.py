"""What differs between two texts, word by word (Chinese, Japanese, Korean: by character)."""

import difflib
import re

Piece = tuple[str, bool]
"""Some text, and whether the other text lacks it."""

UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
UNIT = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+|\s+")


def word_diff(before: str, after: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces that join to the whole, with what is only in one of them marked.

    By longest matching blocks (Ratcliff and Obershelp, as in difflib).
    """
    old, new = UNIT.findall(before), UNIT.findall(after)
    left: list[Piece] = []
    right: list[Piece] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        for side, units in ((left, old[i:j]), (right, new[k:m])):
            if units:
                side.append(("".join(units), kind != "equal"))
    return left, right
