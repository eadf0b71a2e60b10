"""Metrics agree with the libraries they stand on and with values worked out by hand."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

from compress.eval.metrics import metric
from compress.eval.text import contains, f1, normalized, units

HYPOTHESES = [
    "The cat sat on the mat.",
    "There is a dog in the garden, I think.",
    "",
    "It is raining cats and dogs today in London.",
]
REFERENCES = [
    ["The cat sat on a mat.", "A cat was on the mat."],
    ["A dog is in the garden.", "I think a dog is in the garden."],
    ["Nothing was said.", "Silence."],
    ["It rains heavily in London today.", "It is raining hard in London."],
]
NAMES = ["accuracy", "exact_match", "contained", "f1", "rouge1", "rouge2", "rougeL", "bleu", "chrf"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't panic, it's 3.5%!", ["don", "t", "panic", "it", "s", "3", "5"]),
        ("我爱 Python３", ["我", "爱", "python3"]),
        ("snake_case", ["snake", "case"]),
        ("Straße", ["straße"]),
    ],
)
def test_text_is_cut_into_words_and_chinese_characters(text, expected):
    assert units(text) == expected


def test_normalized_text_has_no_articles_and_no_commas_in_numbers():
    assert normalized("The answer is 1,234,567.") == ["answer", "is", "1234567"]
    assert normalized("1,2,3") == ["1", "2", "3"]


def test_a_letter_that_is_an_article_can_be_an_answer():
    found = metric("exact_match").rows(["A.", "", "the", "B"], [["A"]] * 4)[:, 0]
    assert found.tolist() == [1, 0, 0, 0]
    assert contains("It is A.", "A")
    assert not contains("It is B.", "A")
    assert not contains("It is B.", "?")


def test_bleu_is_that_of_sacrebleu():
    streams = [list(stream) for stream in zip(*REFERENCES, strict=True)]
    expected = BLEU().corpus_score(HYPOTHESES, streams).score
    found = metric("bleu").compute(predictions=HYPOTHESES, references=REFERENCES)
    assert found == {"bleu": pytest.approx(expected, abs=1e-9)}
    assert expected > 10


def test_chrf_is_that_of_sacrebleu():
    streams = [list(stream) for stream in zip(*REFERENCES, strict=True)]
    expected = CHRF().corpus_score(HYPOTHESES, streams).score
    found = metric("chrf").compute(predictions=HYPOTHESES, references=REFERENCES)
    assert found == {"chrf": pytest.approx(expected, abs=1e-9)}
    assert expected > 10


def test_bleu_of_chinese_is_by_characters():
    hypothesis, reference = "我非常喜欢看书。", "我喜欢看书。"
    expected = BLEU(tokenize="zh").corpus_score([hypothesis], [[reference]]).score
    found = metric("bleu").compute(predictions=[hypothesis], references=[[reference]])
    assert found["bleu"] == pytest.approx(expected)
    assert expected > 40


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_rouge_of_english_is_that_of_rouge_score(kind):
    scorer = RougeScorer([kind])
    each = [
        max(scorer.score(r, h)[kind].fmeasure for r in rs)
        for h, rs in zip(HYPOTHESES, REFERENCES, strict=True)
    ]
    found = metric(kind).compute(predictions=HYPOTHESES, references=REFERENCES)
    assert found == {kind: pytest.approx(100 * np.mean(each))}
    assert np.mean(each) > 0.2


def test_rouge_of_chinese_is_by_characters():
    # Longest common subsequence 4 of 5 and 6 characters: F = 2 * 4 / (5 + 6).
    found = metric("rougeL").compute(predictions=["我喜欢看书"], references=[["我很喜欢看报"]])
    assert found["rougeL"] == pytest.approx(100 * 8 / 11)


def test_exact_match_ignores_case_punctuation_and_articles():
    found = metric("exact_match").compute(
        predictions=["The Pound.", "1,000", "Paris, France"],
        references=[["pound"], ["1000"], ["Paris"]],
    )
    assert found["exact_match"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("text", "wanted", "expected"),
    [
        ("The answer is Paris.", "paris", True),
        ("Parisian food", "Paris", False),
        ("It was 112 years", "12", False),
        ("答案是珠穆朗玛峰。", "珠穆朗玛峰", True),
        ("central, processing unit", "Central Processing Unit", True),
        ("", "x", False),
    ],
)
def test_contained_means_whole_words(text, wanted, expected):
    assert contains(text, wanted) is expected


def test_f1_of_shared_words():
    assert f1("red green blue", "green blue black white") == pytest.approx(2 * 2 / (3 + 4))
    assert f1("", "") == 1.0
    assert f1("x", "y") == 0.0
    found = metric("f1").compute(predictions=["red"], references=[["blue", "red hat"]])
    assert found["f1"] == pytest.approx(100 * 2 / 3)


def test_accuracy_is_to_the_letter():
    found = metric("accuracy").compute(predictions=["a", "B"], references=[["a"], ["b"]])
    assert found["accuracy"] == 50.0


@pytest.mark.parametrize("name", NAMES)
def test_score_is_the_total_of_the_sum_of_rows(name):
    measure = metric(name)
    rows = measure.rows(HYPOTHESES, REFERENCES)
    assert len(rows) == len(HYPOTHESES)
    whole = measure.compute(predictions=HYPOTHESES, references=REFERENCES)[name]
    assert measure.total(rows.sum(0)) == pytest.approx(whole)
    perfect = measure.rows([r[0] for r in REFERENCES], REFERENCES)
    assert measure.total(perfect.sum(0)) == pytest.approx(100)


def test_unknown_metric_is_named():
    with pytest.raises(ValueError, match="no metric 'bleurt'"):
        metric("bleurt")


def test_metrics_need_no_network_and_no_home(tmp_path: Path):
    # A file where the home folder should be: nothing under it can be made, even by root.
    home = tmp_path / "home"
    home.write_text("")
    code = (
        "from compress.eval.metrics import metric\n"
        f"for name in {NAMES}:\n"
        "    print(metric(name).compute(predictions=['a b'], references=[['a b']]))\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == len(NAMES)
