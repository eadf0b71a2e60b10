"""A user's own task: every kind from a few lines, and what is wrong told by file and line."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from transformers import AutoTokenizer

from compress import steps
from compress.errors import UserError
from compress.eval.answers import ask, compare
from compress.eval.items import items
from compress.eval.judge import Unasked, questions
from compress.eval.own import named, read
from compress.eval.tasks import KINDS
from compress.report import tasks as report_tasks
from compress.runtime.loader import load


def written(folder: Path, yaml: str, *records: Any, name: str = "mine") -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / f"{name}.yaml").write_text(f"data: {name}.jsonl\n{yaml}", encoding="utf-8")
    return folder / f"{name}.yaml"


def test_a_generation_task_in_a_few_lines(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "kind: generation\nprompt: 'Invoice: {text} Who sent it?'\nmetrics: [exact_match, f1]\n",
        {"text": "ACME, 30 March", "references": "ACME"},
        "",
        {"text": "{text}\u2028", "references": ["Borg", "Borg Ltd"], "id": "second"},
    )
    (task,) = named([str(file)])
    assert (task.name, task.metrics, task.max_new_tokens) == ("mine", ("exact_match", "f1"), 32)
    first, second = items(task)
    assert (first.id, first.prompt) == ("mine-1", "Invoice: ACME, 30 March Who sent it?")
    assert first.references == ("ACME",)
    assert (second.id, second.prompt) == ("second", "Invoice: {text}\u2028 Who sent it?")
    assert second.references == ("Borg", "Borg Ltd")


def test_the_task_of_the_docs_is_ten_lines_and_runs_as_it_stands(
    tmp_path: Path, stories260k: Path
) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs/eval.md"
    section = docs.read_text(encoding="utf-8").split("## A task of your own\n")[1]
    data, yaml, command, *_ = map(dedent, re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", section, re.M))
    assert len(yaml.splitlines()) <= 10
    assert "score.tasks=[knowledge,invoices.yaml]" in command
    (tmp_path / "invoices.jsonl").write_text(data.lstrip())
    (tmp_path / "invoices.yaml").write_text(yaml.lstrip())
    (task,) = named([str(tmp_path / "invoices.yaml")])
    first, second = items(task)
    assert first.prompt.startswith("ACME Ltd, 30 March. 3 chairs, 240 euros.\n\nWhich company")
    assert second.references == ("Borg & Sons",)
    model, tokenizer = load(stories260k), AutoTokenizer.from_pretrained(stories260k)
    answers = ask(model, tokenizer, task, [first, second], batch_size=2)
    right = [replace(answers[0], text="acme"), replace(answers[1], text="Borg & Sons.")]
    (exact, f1) = compare(task, [first, second], right, answers, seed=0)
    assert (exact["metric"], exact["before"], exact["lost"]) == ("exact_match", 100.0, 2)
    assert (f1["metric"], f1["before"]) == ("f1", 100.0)


def test_a_number_is_written_into_a_prompt(tmp_path: Path) -> None:
    file = written(tmp_path, "kind: cloze\nprompt: '{a} + {b} ='\n",
                   {"a": 2, "b": 1.5, "references": "3.5"})  # fmt: skip
    assert items(read(file))[0].prompt == "2 + 1.5 ="


def test_a_file_with_other_names_is_read_as_it_is(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "kind: choice\nprompt: '{ctx}'\nfields: {choices: endings, gold: label}\n",
        {"ctx": "He ate", "endings": ["bread", "stone"], "label": 1},
    )
    (item,) = items(read(file))
    assert (item.choices, item.references) == (("bread", "stone"), ("stone",))


def test_a_file_without_the_names_that_fields_gives_is_refused(tmp_path: Path) -> None:
    record = {"text": "a", "references": "b"}
    yaml = "kind: generation\nprompt: '{text}'\nfields: {references: target}\n"
    for records in ([record, record], [{"text": "a"}]):
        with pytest.raises(UserError) as error:
            read(written(tmp_path, yaml, *records))
        assert str(error.value) == (
            f"{tmp_path}/mine.jsonl:1: no field 'target', which `fields` reads as references; "
            f"there are {', '.join(records[0])}"
        )
    yaml = "kind: generation\nprompt: '{text}'\nfields: {lang: language}\n"
    with pytest.raises(UserError) as error:
        read(written(tmp_path, yaml, record, record))
    said = f"{tmp_path}/mine.jsonl: no line has 'language', which `fields` reads as lang"
    assert str(error.value) == said
    task = read(written(tmp_path, yaml, record, {**record, "language": "zh"}))
    assert [item.prompt for item in items(task)] == ["a", "a"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_metric_where_none_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "hay.txt").write_text("It rains. The sun shines. " * 20)
    record = {"text": "a", "question": "b", "choices": ["c", "d"], "gold": 0, "references": "e"}
    record |= {"needle": "f", "rules": [{"rule": "not_empty"}]}
    file = written(tmp_path, f"kind: {kind}\nprompt: '{{text}}'\nhaystack: hay.txt\n", record)
    assert read(file).metrics == KINDS[kind][:1]


def test_a_needle_is_hidden_at_each_length_and_depth(tmp_path: Path, stories260k: Path) -> None:
    (tmp_path / "hay.txt").write_text("The sun shines. The dog sleeps. " * 30)
    file = written(
        tmp_path,
        "kind: retrieval\nhaystack: hay.txt\nlengths: [50, 200]\ndepths: [0, 0.5, 1]\n"
        "metrics: [contained, entities]\n",
        {
            "needle": "The code is 77.",
            "question": "What is the code?",
            "references": "77",
            "entities": ["77", "code"],
        },
    )
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    found = items(read(file), None, tokenizer)
    assert [i.place for i in found] == [(n, d) for n in (50, 200) for d in (0, 0.5, 1)]
    for item in found:
        assert item.entities == ("77", "code")
        assert item.prompt.count("The code is 77.") == 1
        assert item.prompt.endswith("\n\nWhat is the code?")
    texts = [item.prompt.removesuffix("\n\nWhat is the code?") for item in found]
    assert texts[0].startswith("The code is 77.")
    assert texts[2].endswith("The code is 77.")
    assert texts[4].split("The code is 77.")[0].endswith(". ")
    assert len(tokenizer(texts[5]).input_ids) == pytest.approx(215, abs=8)


def test_a_text_longer_than_the_window_is_not_made(tmp_path: Path, stories260k: Path) -> None:
    (tmp_path / "hay.txt").write_text("The sun shines. The dog sleeps. " * 30)
    needle = {"needle": "The code is 77.", "question": "What is the code?", "references": "77"}
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    for lengths, fit, of in (("[50, 1000000000]", 4, 8), ("[1000000000]", 0, 4)):
        yaml = f"kind: retrieval\nhaystack: hay.txt\nlengths: {lengths}\ndepths: [0, 1]\n"
        task = read(written(tmp_path, yaml, *[needle] * 3))
        asked, unasked = questions([task], 2, tokenizer, 512)
        assert [len(its) for _, its in asked] == [fit] * bool(fit)
        assert unasked == [Unasked("mine", fit, of, 512)]
    assert report_tasks.unasked(asdict(unasked[0])) == (
        "mine was not asked: none of the 4 items taken fits the window of 512 tokens, prompt and "
        "answer together."
    )


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("{'text': 1}", "not JSON: Expecting property name"),
        ("[" * 100_000, "not JSON: "),
        ('{"text": "a", "text": "b"}', 'not JSON: "text" is given twice'),
        ([1], "list found; wanted a JSON object"),
        (
            r'{"text": "a\ud800", "references": "x"}',
            "half of a surrogate pair, '\\ud800', which is",
        ),
        ({"references": "x"}, "no field 'text', which the prompt has as {text}; there are"),
        ({"text": None, "references": "x"}, "text is null; wanted a text"),
        ('{"text": NaN, "references": "x"}', "text is NaN; wanted a text"),
        ('{"text": -Infinity, "references": "x"}', "text is -Infinity; wanted a text"),
        ({"text": True, "references": "x"}, "text is true; wanted a text"),
        ({"text": ["a"], "references": "x"}, 'text is ["a"]; wanted a text'),
        ({"text": "a"}, "references is missing; wanted a text, or a list of texts, not empty"),
        ({"text": "a", "references": [" "]}, 'references is [" "]; wanted'),
        ({"text": "a", "references": 7}, "references is 7; wanted"),
        ({"text": "a", "references": "x", "id": "mine-1"}, "id 'mine-1' is that of line 1 too"),
    ],
)
def test_wrong_data_is_told_by_file_line_and_reason(tmp_path: Path, record: Any, said: str) -> None:
    good = {"text": "a", "references": "b"}
    file = written(tmp_path, "kind: generation\nprompt: '{text}'\n", good, record)
    with pytest.raises(UserError) as error:
        named([str(file)])
    assert str(error.value).startswith(f"{tmp_path}/mine.jsonl:2: {said}")


@pytest.mark.parametrize(
    ("kind", "record", "said"),
    [
        ("choice", {"choices": ["a"], "gold": 0}, 'choices is ["a"]; wanted a list of two texts'),
        ("choice", {"choices": ["a", "a"], "gold": 0}, "all different"),
        ("choice", {"choices": ["a", "b"], "gold": 2}, "gold is 2; wanted the index of the right"),
        ("choice", {"choices": ["a", "b"]}, "gold is missing; wanted"),
        ("choice", {"choices": ["a", "b"], "gold": True}, "gold is true; wanted the index"),
        ("cloze", {"references": ["a", "b"]}, "wanted one text"),
        ("cloze", {"references": "a", "lang": ["en"]}, 'lang is ["en"]; wanted a language'),
        ("perplexity", {"place": ""}, "place is empty; wanted a text to read"),
        ("perplexity", {"place": " \n"}, "place is empty; wanted a text to read"),
        ("rules", {"rules": []}, "wanted a list of rules"),
        ("rules", {"rules": [{"rule": "polite"}]}, "no rule {'rule': 'polite'}"),
        ("rules", {"rules": ["not_empty"]}, "rule 'not_empty'; wanted an object"),
        ("rules", {"rules": [{"rule": "contains", "any": "yes"}]}, "any is 'yes'; wanted a list"),
        ("rules", {"rules": [{"rule": "matches", "pattern": "("}]}, "wanted a regular expression"),
        ("rules", {"rules": [{"rule": "lines", "count": "3"}]}, "count is '3'; wanted a whole"),
        ("rules", {"rules": [{"rule": "json", "key": ["a"]}]}, "has no place for key"),
        ("rules", {"rules": [{"rule": "not_empty"}], "filler": "x"}, "times is missing"),
    ],
)
def test_each_kind_checks_what_it_needs(tmp_path: Path, kind: str, record: Any, said: str) -> None:
    file = written(tmp_path, f"kind: {kind}\nprompt: '{{place}}'\n", {"place": "Well?", **record})
    with pytest.raises(UserError, match=r"mine\.jsonl:1: ") as error:
        read(file)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("kind: essay", "kind is 'essay'; wanted one of choice, cloze"),
        ("kind: generation", "prompt is missing"),
        ("kind: retrieval", "haystack is missing"),
        ("kind: cloze\nprompt: x\nmetric: f1", "no key 'metric'; there are data, kind, prompt"),
        ("kind: cloze\nprompt: x\nmetrics: [f1]", "wanted a list of, for cloze, accuracy"),
        ("kind: generation\nprompt: x\nmax_new_tokens: 0", "max_new_tokens is 0; wanted a whole"),
        ("kind: generation\nprompt: {zh: x}", "wanted a text, or one by language with 'en'"),
        ("kind: generation\nprompt: [x]", "prompt is ['x']; wanted a text"),
        ("kind: [cloze]\nprompt: x", "kind is ['cloze']; wanted one of"),
        ("kind: cloze\nprompt: x\nmetrics: 3", "metrics is 3; wanted a list of, for cloze"),
        ("kind: cloze\nprompt: x\nmetrics:", "metrics is None; wanted a list of, for cloze"),
        ("kind: cloze\nprompt: x\nfields: {text: [a]}", "wanted ours: theirs"),
        ("kind: cloze\nprompt: x\nchat: 'no'", "chat is 'no'; wanted true or false"),
        ("kind: cloze\nprompt: x\na: 1\nb: 2", "no key 'a' or 'b'; there are data, kind, prompt"),
        (
            "kind: cloze\nprompt: x\nkind: generation",
            "mine.yaml:4: cannot be read as YAML: the key kind is",
        ),
        (
            "kind: cloze\nprompt: x\nfields: {a: b, a: c}",
            ":4: cannot be read as YAML: the key a is",
        ),
        ("kind: cloze\nprompt: x\nmetrics: [accuracy, accuracy]", "; wanted each once"),
        ("kind: cloze\nprompt: x\ndate: 2024-99-99", "cannot be read as YAML: month must be"),
        ("kind: perplexity\nwindow: 1", "window is 1; wanted a whole number, at least 2"),
        ("kind: perplexity\nwindow: true", "window is True; wanted"),
        ("kind: retrieval\nhaystack: x\nlengths: []", "lengths is []; wanted a list of numbers"),
        ("kind: retrieval\nhaystack: x\ndepths: [50]", "depths is [50]; wanted a list of numbers"),
        ("kind: retrieval\nhaystack: x\nlengths: 9", "lengths is 9; wanted a list of numbers"),
        (
            "kind: generation\nprompt: [",
            "mine.yaml:3: cannot be read as YAML: expected the node content, but found '<stream",
        ),
        (
            "prompt: Who: who?",
            "mine.yaml:2: cannot be read as YAML: mapping values are not allowed",
        ),
        ("prompt: \0", "mine.yaml: cannot be read as YAML: unacceptable character #x0000: special"),
        (
            "kind: generation\nprompt: Why?",
            "mine.yaml: prompt is 'Why?', the same for every line; wanted fields of a line in it, "
            "such as {text}",
        ),
        ("kind: generation\nprompt: ''", "prompt is '', the same for every line"),
        ("kind: generation\nprompt: '{\"a\": 1}'", "1}', the same for every line"),
        ("kind: cloze\nprompt: {en: '{text}', zh: x}", "prompt is 'x', the same for every line"),
        (
            "kind: generation\nprompt: '{text} {text.__class__}'",
            "prompt has {text.__class__}; wanted a field of a line alone, such as {text}",
        ),
        ("kind: generation\nprompt: '{text[0]}'", "prompt has {text[0]}; wanted a field"),
        (
            "kind: generation\nprompt: '{text}'\nfields: {foo: text}",
            "mine.yaml: fields has foo, which nothing reads; there are references, entities, text",
        ),
        ("kind: perplexity\nfields: {references: text}", "fields has references, which nothing"),
        ("kind: retrieval\nhaystack: no.txt", "no.txt: cannot be read as text"),
        ("kind: retrieval\nhaystack: blank.txt", "blank.txt is empty; wanted a text"),
    ],
)
def test_a_wrong_description_is_told_by_its_key(tmp_path: Path, yaml: str, said: str) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    file = written(tmp_path, yaml, {"text": "a"})
    with pytest.raises(UserError, match=rf"^{tmp_path}/mine\.yaml(:\d)?: ") as error:
        read(file)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_field_that_the_task_does_not_use_may_hold_anything(tmp_path: Path) -> None:
    record = {"text": "a", "references": "b", "entities": 3, "rules": None}
    file = written(tmp_path, "kind: generation\nprompt: '{text}'\n", record)
    (item,) = items(read(file))
    assert (item.references, item.entities, item.rules) == (("b",), (), ())


def test_a_prompt_in_block_style_ends_with_its_last_line(tmp_path: Path) -> None:
    yaml = "kind: cloze\nprompt: |\n  {text}\n\n  Answer:\n"
    file = written(tmp_path, yaml, {"text": "Well?", "references": "yes"})
    assert items(read(file))[0].prompt == "Well?\n\nAnswer:"


def test_braces_that_name_no_field_stay_in_a_prompt(tmp_path: Path) -> None:
    yaml = """kind: generation\nprompt: '{text} Answer as {"name": …}, not {3.5}.'\n"""
    file = written(tmp_path, yaml, {"text": "Who?", "references": "Ann"})
    assert items(read(file))[0].prompt == 'Who? Answer as {"name": …}, not {3.5}.'


def test_a_task_that_is_named_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"score\.tasks names cloze twice; wanted each once"):
        named(["cloze", "knowledge", "cloze"])


def test_files_that_are_missing_or_have_a_taken_name_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^none\.yaml: no such file$"):
        named(["none.yaml"])
    file = written(tmp_path, "kind: perplexity\n", {"text": "a"}, name="knowledge")
    with pytest.raises(UserError, match="has a name that is taken, knowledge"):
        named(["knowledge", str(file)])
    (tmp_path / "knowledge.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no lines; wanted one JSON object a line"):
        named([str(file)])


def test_an_empty_prompt_leaves_the_choices_alone(tmp_path: Path) -> None:
    pair = {"choices": ["Two cats sleep.", "Two cats sleeps."], "gold": 0}
    (item,) = items(read(written(tmp_path, 'kind: choice\nprompt: ""', pair)))
    assert (item.prompt, item.references) == ("", ("Two cats sleep.",))


def test_a_run_knows_a_task_by_what_it_asks(tmp_path: Path) -> None:
    """Changed data or settings are another task; a copy elsewhere is the same."""
    text = "data: wines.jsonl\nkind: cloze\nprompt: '{text}'\n"

    def known(folder: str, settings: str = text, word: str = "white") -> dict[str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        data = json.dumps({"text": "Red or", "references": word}) + "\n"
        (tmp_path / folder / "wines.jsonl").write_text(data)
        (tmp_path / folder / "wines.yaml").write_text(settings)
        return steps._questions([read(tmp_path / folder / "wines.yaml")])

    first = known("first")
    assert list(first) == ["wines"]
    assert known("second") == first
    assert known("first", word="green") != first
    assert known("first", settings=text.replace("{text}", "{text}?")) != first
