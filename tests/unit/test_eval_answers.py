"""What answers score, and what is said of two models' answers to the same items."""

from math import isnan
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from compress.eval.answers import Answer, ask, compare
from compress.eval.items import Item
from compress.eval.tasks import Task
from compress.report.tasks import change
from compress.runtime.loader import load


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


def test_answers_of_likelihoods_that_are_not_numbers_are_wrong():
    nan = float("nan")
    items = [Item(str(i), "?", ("yes",), ("yes", "no")) for i in range(3)]
    before = [Answer(item.id, "yes", (-1.0, -2.0)) for item in items]
    after = [Answer("0", "", (nan, nan)), Answer("1", "", (-1.0, nan)), before[2]]
    task = asked("choice", "accuracy", "normalized_accuracy")
    for row in compare(task, items, before, after, seed=0):
        assert (row["before"], row["after"], row["lost"]) == (100.0, pytest.approx(100 / 3), 2)
        assert row["not_numbers"] == {"before": 0, "after": 2}

    items = [Item(str(i), "?", ("yes",)) for i in range(2)]
    before = [Answer(item.id, "yes", (-1.0,), 1, True) for item in items]
    after = [Answer("0", "!", (nan,), 1, True), before[1]]
    accuracy, likelihood = compare(
        asked("cloze", "accuracy", "likelihood"), items, before, after, seed=0
    )
    assert (accuracy["before"], accuracy["after"]) == (100.0, 50.0)
    assert (likelihood["after"], likelihood["not_numbers"]) == (0.0, {"before": 0, "after": 1})


def test_a_model_without_numbers_chooses_nothing(stories260k):
    model, tokenizer = load(stories260k), AutoTokenizer.from_pretrained(stories260k)
    items = [Item("0", "Once upon a", ("time",), ("time", "dog"))]
    task = asked("choice", "accuracy")
    (answer,) = ask(model, tokenizer, task, items, batch_size=1)
    assert answer.text in ("time", "dog")
    model.model.norm.weight.data[0] = float("nan")
    (answer,) = ask(model, tokenizer, task, items, batch_size=1)
    assert answer.text == ""
    assert all(map(isnan, answer.likelihoods))


def test_one_item_leaves_every_difference_possible():
    items, before = wrote(["x y"])
    _, after = wrote(["x z"])
    for row in compare(asked("generation", "exact_match", "f1"), items, before, after, seed=0):
        assert row["ci95"] == [-100.0, 0.0]
        assert (row["lost"], row["smallest_loss"]) == (1, None)
        assert change(row) == "unclear"
