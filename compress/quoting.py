"""Texts in Hydra's grammar, and back as a person types them."""

PLAIN = (
    *("out", "checkpoint"),
    *("model.path", "model.revision"),
    *("data.path", "data.field", "data.messages", "data.heldout"),
    *("data.split", "data.subset", "data.revision"),
    *("shrink.student", "distill.teacher", "distill.endpoint"),
    *("serve.question", "score.text", "report.currency"),
)
"""Fields whose value is text as it stands, whatever Hydra's grammar makes of its characters."""


def quoted(text: str) -> str:
    """`text` as a quoted value of Hydra's grammar, in which a backslash matters before a quote."""
    head = text.rstrip("\\")
    tail = text[len(head) :] * 2  # before the closing quote
    pieces = head.split("'")
    kept = [p + "\\" * (len(p) - len(p.rstrip("\\"))) for p in pieces[:-1]]
    return "'" + "\\'".join([*kept, pieces[-1]]) + tail + "'"


def typed(word: str) -> str:
    """A word that `arguments.prepared` gave, as it was typed: a text without Hydra's quotes, and a
    list of one such as the text.
    """
    name, _, value = word.partition("=")
    listed = value.startswith("[") and "," not in value
    value = value[1:-1] if listed else value
    if not is_quoted(value) or not (listed or name.lstrip("+") in PLAIN):
        return word
    text = value[1:-1].replace("\\'", "'")
    as_it_is = text in ("", "null") or is_quoted(text)  # these mean something without the quotes
    return word if as_it_is or quoted(text) != value else f"{name}={text}"


def is_quoted(value: str) -> bool:
    """Whether quotes of Hydra's are around it."""
    return len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
