"""What answers score, and what is said of two models' answers to the same items."""

from pathlib import Path

from compress.eval.answers import Answer, compare
from compress.eval.items import Item
from compress.eval.tasks import Task


def asked(kind, *metrics):
    return Task("mine", kind, {"en": "{text}"}, metrics, Path("mine.jsonl"))


def wrote(texts):
    items = [Item(str(i), "?", references=("x y",)) for i in range(len(texts))]
    return items, [Answer(item.id, text) for item, text in zip(items, texts, strict=True)]


def test_no_loss_is_called_one_that_could_show_beyond_what_the_original_scores():
    items, before = wrote(["x y"] * 7 + ["c"] * 3)
    _, after = wrote(["c"] + ["x y"] * 6 + ["c"] * 3)
    exact, f1 = compare(asked("generation", "exact_match", "f1"), items, before, after, seed=0)
    assert (exact["before"], exact["smallest_loss"]) == (70.0, 60.0)
    assert (f1["before"], f1["smallest_loss"]) == (70.0, 10.0)  # the interval is −30 to 0

    _, poor = wrote(["x c"] + ["c"] * 9)
    _, better = wrote(["c"] + ["x y"] * 5 + ["c"] * 4)
    for old, new, score in ((poor, better, 5.0), (poor, poor, 5.0), (poor[1:], better[1:], 0.0)):
        of = items[len(items) - len(old) :]
        rows = compare(asked("generation", "exact_match", "f1"), of, old, new, seed=0)
        assert rows[1]["before"] == score
        assert [row["smallest_loss"] for row in rows] == [None, None]
