"""Rules tell good answers from bad ones, with no right answer at hand."""

import pytest

from compress.eval.checks import is_json, is_python, loops
from compress.eval.items import items
from compress.eval.metrics import metric
from compress.eval.own import named
from compress.eval.rules import broken, holds


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
        ("[" * 100_000, False),
    ],
)
def test_json_is_parsed_whole(text, expected):
    assert is_json(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):\n    return x", True),
        ("```python\nprint(1)\n```", True),
        ("x = '\\d'", True),
        ("def f(x):\nreturn x", False),
        ("Here is the code: x = 1", False),
        ("# only a remark", False),
        ("x = \x00", False),
    ],
)
def test_python_is_parsed_and_not_run(text, expected):
    assert is_python(text) is expected


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ({"rule": "json", "keys": ["a", "b"]}, '{"b": 1, "a": 2}', '{"a": 1}'),
        ({"rule": "json", "keys": ["a"]}, '{"a": {}}', '["a"]'),
        ({"rule": "json", "length": 2}, "[1, 2]", "[1, 2, 3]"),
        ({"rule": "csv", "rows": 2, "columns": 2}, 'a,"b, c"\n1,2', "a,b,c\n1,2"),
        ({"rule": "matches", "pattern": "[Yy]es"}, " yes\n", "yes, it is"),
        ({"rule": "lines", "count": 2}, "a\n\nb\n", "a"),
        ({"rule": "most_words", "count": 3}, "one two three", "one two three four"),
    ],
)
def test_form_is_checked(rule, good, bad):
    assert holds(rule, good)
    assert not holds(rule, bad)


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


def test_metrics_without_references_read_the_answer_alone():
    answers = ['{"a": 1}', "x = 1", "la la la " * 9]
    found = {
        name: metric(name).rows(answers, [[], [], []])[:, 0].tolist()
        for name in ("json", "python", "no_loop")
    }
    assert found == {"json": [1, 0, 0], "python": [1, 1, 0], "no_loop": [1, 1, 0]}


def test_entities_are_counted_as_whole_words():
    rows = metric("entities").rows(["Ann met Bob in 1908."], [["Ann", "Bo", "1908", "Rome"]])
    assert rows.tolist() == [[0.5, 1.0]]
