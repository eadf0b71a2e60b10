"""How text is cut for scoring: English by words, Chinese by characters."""

import re
import unicodedata
from collections import Counter

CJK = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
UNIT = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
COMMA_IN_NUMBER = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
ARTICLES = {"a", "an", "the"}


def has_cjk(text: str) -> bool:
    """Whether `text` holds a Chinese character."""
    return re.search(f"[{CJK}]", text) is not None


def units(text: str) -> list[str]:
    """The units that are compared: a Chinese character, or a run of letters or digits, lower case.

    On ASCII text these are the tokens of rouge-score's own tokenizer, which drops all else. NFKC
    makes full-width letters and digits equal to the plain ones.
    """
    return UNIT.findall(unicodedata.normalize("NFKC", text).lower())


def normalized(text: str) -> list[str]:
    """`units` without articles and without commas in numbers: what exact match compares.

    The normalization of SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250), extended to Chinese. An
    article that stands alone stays: the letter A can be an answer.
    """
    found = units(COMMA_IN_NUMBER.sub("", text))
    return [unit for unit in found if unit not in ARTICLES] or found


def contains(text: str, wanted: str) -> bool:
    """Whether `wanted` occurs in `text` as whole words (Chinese: characters), normalized."""
    needle = normalized(wanted)
    hay = units(text) if ARTICLES.issuperset(needle) else normalized(text)
    return bool(needle) and any(
        hay[i : i + len(needle)] == needle for i in range(len(hay) - len(needle) + 1)
    )


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over normalized units (SQuAD), 0 to 1."""
    found, wanted = normalized(prediction), normalized(reference)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else float(found == wanted)
