"""The bundled suites are well formed, and the rules for boundary cases tell good from bad."""

import json
from collections import Counter

import pytest

from compress.errors import UserError
from compress.eval.metrics import metric
from compress.eval.rules import broken, holds, is_json, loops
from compress.eval.tasks import SUITES, TASKS, items, named, shortened
from compress.eval.text import has_cjk

FIELDS = {
    "knowledge": {"id", "lang", "question", "choices", "gold"},
    "commonsense": {"id", "lang", "context", "choices", "gold"},
    "short_answers": {"id", "lang", "question", "answers"},
    "summaries": {"id", "lang", "text", "references"},
    "translation": {"id", "lang", "target", "source", "references"},
    "boundary": {"id", "lang", "topic", "prompt", "rules"},
}
LEAST = {
    "knowledge": 30,
    "commonsense": 30,
    "short_answers": 40,
    "summaries": 12,
    "translation": 16,
    "boundary": 20,
}
by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def records(task):
    return [json.loads(line) for line in task.file.read_text(encoding="utf-8").splitlines()]


def test_every_file_belongs_to_a_task():
    assert {file.stem for file in SUITES.glob("*.jsonl")} == {task.name for task in TASKS}


@by_task
def test_records_are_well_formed(task):
    found = records(task)
    assert len(found) >= LEAST[task.name]
    for record in found:
        assert record.keys() - {"filler", "times"} == FIELDS[task.name], record["id"]
        assert record["lang"] in {"en", "zh", "ar"}
        for accepted in (record.get("answers"), record.get("references")):
            assert accepted is None or (accepted and all(a.strip() for a in accepted))


@by_task
def test_nothing_is_asked_twice(task):
    found = records(task)
    assert max(Counter(r["id"] for r in found).values()) == 1
    prompts = Counter(item.prompt for item in items(task))
    assert max(prompts.values()) == 1, prompts.most_common(1)


@pytest.mark.parametrize("task", [t for t in TASKS if t.kind == "choice"], ids=lambda t: t.name)
def test_choices_have_one_right_answer_at_every_place_alike(task):
    found = records(task)
    for record in found:
        assert 0 <= record["gold"] < len(record["choices"]), record["id"]
        assert len(set(record["choices"])) == len(record["choices"]), record["id"]
    places = Counter(r["gold"] for r in found)
    assert max(places.values()) <= 1.5 * min(places[i] for i in range(4))


@by_task
def test_prompts_are_filled_in(task):
    for item, record in zip(items(task), records(task), strict=True):
        for field in (*FIELDS[task.name], "filler"):
            assert f"{{{field}}}" not in item.prompt, item.id
        if task.kind == "choice":
            assert item.references == (record["choices"][record["gold"]],)


@by_task
def test_right_answers_score_full_marks(task):
    if task.kind == "boundary":
        return
    every = items(task)
    texts = [item.references[0] for item in every]
    for name in task.metrics:
        rows = metric(name).rows(texts, [item.references for item in every])
        assert metric(name).total(rows.sum(0)) == pytest.approx(100)


def test_suites_hold_chinese():
    for task in TASKS:
        assert sum(has_cjk(json.dumps(r, ensure_ascii=False)) for r in records(task)) >= 2


def test_huge_inputs_are_huge():
    longest = sorted(len(item.prompt) for item in items(named(["boundary"])[0]))
    assert longest[-2] > 5000
    assert longest[0] == 0


def test_an_unknown_suite_is_named_with_those_there_are():
    with pytest.raises(UserError, match=r"no suite called trivia; there are knowledge, .*boundary"):
        named(["knowledge", "trivia"])


def test_limit_takes_the_first_items_and_shortened_only_shortens():
    task = named(["translation"])[0]
    assert [item.id for item in items(task, 2)] == ["translation-01", "translation-02"]
    assert shortened(task, 8).max_new_tokens == 8
    assert shortened(task, 500) == shortened(task, None) == task


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I do not know. " * 5, True),
        ("哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈哈", True),
        ("10, 20, 30, 40, 50, 60, 70, 80, 90", False),
        ("no, no, no, no", False),
        ("a\n" + " " * 40 + "b", False),
        ("The cat sat on the mat, and the dog sat on the rug.", False),
    ],
)
def test_loops_are_found(text, expected):
    assert loops(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Ann", "age": 30}', True),
        ('```json\n{"name": "Ann"}\n```', True),
        ('Here it is: {"name": "Ann"}', False),
        ('{"name": "Ann"', False),
        ("", False),
    ],
)
def test_json_is_parsed_whole(text, expected):
    assert is_json(text) is expected


def test_rules_that_are_broken_are_named():
    rules = (
        {"rule": "not_empty"},
        {"rule": "no_garbage"},
        {"rule": "no_loop"},
        {"rule": "contains", "any": ["a + b", "sum"]},
    )
    assert broken(rules, "return a + b\n") == []
    assert broken(rules, "  ") == ["not_empty", "contains"]
    assert broken(rules, "sum\x00\ufffd") == ["no_garbage"]
    assert broken(rules, "assume " * 9) == ["no_loop", "contains"]


def test_a_rule_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no rule"):
        holds({"rule": "polite"}, "thank you")
    for item in items(named(["boundary"])[0]):
        broken(item.rules, "some text")
