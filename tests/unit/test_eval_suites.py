"""The bundled suites are well formed and large enough, and nothing in them is asked twice."""

import json
import re
from collections import Counter

import pytest

from compress.errors import UserError
from compress.eval.items import items, records
from compress.eval.metrics import metric
from compress.eval.own import named
from compress.eval.rules import broken, holds
from compress.eval.tasks import SUITES, TASKS, shortened
from compress.eval.text import contains, has_cjk

FIELDS = {
    "knowledge": {"id", "lang", "question", "choices", "gold"},
    "commonsense": {"id", "lang", "context", "choices", "gold"},
    "cloze": {"id", "lang", "text", "references"},
    "short_answers": {"id", "lang", "question", "references"},
    "summaries": {"id", "lang", "text", "references", "entities"},
    "translation": {"id", "lang", "target", "source", "references"},
    "structured": {"id", "lang", "prompt", "rules"},
    "boundary": {"id", "lang", "topic", "prompt", "rules"},
}
LEAST = {
    "knowledge": 90,  # with commonsense 150 of multiple choice
    "commonsense": 60,
    "cloze": 80,
    "short_answers": 60,
    "summaries": 30,
    "translation": 40,
    "structured": 30,
    "boundary": 60,
}
by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def test_every_file_belongs_to_a_task():
    assert {file.stem for file in SUITES.glob("*.jsonl")} == {task.name for task in TASKS}


@by_task
def test_records_are_well_formed(task):
    found = records(task)
    assert len(found) >= LEAST[task.name]
    for record in found:
        assert record.keys() - {"filler", "times"} == FIELDS[task.name], record["id"]
        assert record["lang"] in {"en", "zh", "ar", "ja"}


@by_task
def test_nothing_is_asked_twice(task):
    prompts = Counter(item.prompt.strip(" ").lower() for item in items(task))
    assert max(prompts.values()) == 1, prompts.most_common(1)


def test_no_question_is_in_two_suites():
    short = {r["question"].lower() for r in records(named(["short_answers"])[0])}
    assert not short & {r["question"].lower() for r in records(named(["knowledge"])[0])}


@pytest.mark.parametrize("task", [t for t in TASKS if t.kind == "choice"], ids=lambda t: t.name)
def test_the_right_choice_is_at_every_place_alike(task):
    places = Counter(r["gold"] for r in records(task))
    assert max(places.values()) - min(places[i] for i in range(4)) <= 2


@pytest.mark.parametrize("task", [t for t in TASKS if t.kind == "choice"], ids=lambda t: t.name)
def test_the_right_choice_is_not_given_away_by_its_length(task):
    longest = [max(r["choices"], key=len) == r["choices"][r["gold"]] for r in records(task)]
    assert sum(longest) < 0.4 * len(longest)


@by_task
def test_prompts_are_filled_in(task):
    for item, record in zip(items(task), records(task), strict=True):
        for field in (*FIELDS[task.name], "filler"):
            assert f"{{{field}}}" not in item.prompt, item.id
        if task.kind == "choice":
            assert item.references == (record["choices"][record["gold"]],)


@by_task
def test_right_answers_score_full_marks(task):
    if task.kind != "generation":
        return
    every = items(task)
    texts = [item.references[0] for item in every]
    for name in task.metrics:
        accepted = [item.entities if name == "entities" else item.references for item in every]
        rows = metric(name).rows(texts, accepted)
        assert metric(name).total(rows.sum(0)) == pytest.approx(100)


def test_entities_of_a_summary_are_in_its_text():
    for record in records(named(["summaries"])[0]):
        for name in record["entities"]:
            assert contains(record["text"], name), record["id"]


GOOD = {
    "structured-01": '{"title": "Titanic", "year": 1997}',
    "structured-02": "```json\n[2, 4, 6, 8, 10]\n```",
    "structured-08": "2024-03-05",
    "structured-13": "red,green,blue",
    "structured-15": "print('hello')",
    "structured-16": "numbers = [1, 2, 3]",
    "structured-11": "1. apple\n2. pear\n3. plum\n4. fig",
    "structured-12": "name,age\nAnn,30\nBob,25",
    "structured-14": "def double(x):\n    return 2 * x",
    "structured-22": "# Report",
    "structured-23": "- tea\n- coffee",
    "structured-26": '["苹果", "香蕉", "葡萄"]',
    "structured-30": "print(7)",
}


def test_every_rule_can_be_kept_and_broken():
    by_id = {item.id: item for item in items(named(["structured"])[0])}
    for name, answer in GOOD.items():
        for rule in by_id[name].rules:
            assert holds(rule, answer), (name, rule)
            assert not holds(rule, ""), (name, rule)


BAD = {
    "structured-02": "[1, 2, 3, 4, 5]",
    "structured-13": "Here it is: red, green, blue",
    "structured-15": "print('bye')",
    "structured-24": "",
    "boundary-30": "二十四节气",
    "boundary-48": "select every row of the table users in SQL.",
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_of_the_right_form_alone_is_not_enough(name):
    by_id = {item.id: item for item in items(named([name.split("-")[0]])[0])}
    assert broken(by_id[name].rules, BAD[name])


def test_suites_hold_chinese():
    for task in TASKS:
        chinese = sum(has_cjk(json.dumps(r, ensure_ascii=False)) for r in records(task))
        assert chinese >= 0.1 * len(records(task)), task.name


def test_huge_inputs_are_huge():
    longest = sorted(len(item.prompt) for item in items(named(["boundary"])[0]))
    assert longest[-4] > 3000
    assert longest[0] == 0


TOPICS = {
    "very long sentences": "long sentence|nested clauses|long list",
    "rare terms": "rare|invented word",
    "numbers": "number|decimal|numeral|percentage",
    "mixed scripts": "mixed scripts|Arabic|Japanese|right to left",
    "code": "code|SQL|regular expression|JSON",
    "empty inputs": "empty|blank|one character|only",
    "huge inputs": "huge input",
    "unusual formatting": "case|spac|capitals|misspelled|table|markup|bullet",
}


@pytest.mark.parametrize("kind", TOPICS)
def test_boundary_cases_are_of_every_kind(kind):
    found = [r for r in records(named(["boundary"])[0]) if re.search(TOPICS[kind], r["topic"])]
    assert len(found) >= 4, [r["topic"] for r in found]


def test_an_unknown_suite_is_named_with_those_there_are():
    with pytest.raises(UserError, match=r"no suite called trivia; there are knowledge, .*boundary"):
        named(["knowledge", "trivia"])


def test_limit_takes_the_first_items_and_shortened_only_shortens():
    task = named(["translation"])[0]
    assert [item.id for item in items(task, 2)] == ["translation-01", "translation-02"]
    assert shortened(task, 8).max_new_tokens == 8
    assert shortened(task, 500) == shortened(task, None) == task
