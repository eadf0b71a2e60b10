"""Metrics as local `evaluate` classes: nothing is downloaded, nothing is written to a cache.

Every metric is a sum over items: what one item adds (a row of S numbers), and what the sum over
items comes to. So one set of rows gives the score, the item's own score, and the interval of a
difference by resampling items (eval/statistics.py), for BLEU as well as for a mean.
All scores are on the scale 0 to 100. Shapes: n items, S numbers an item.
"""

import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

from compress.eval.text import has_cjk, normalized, units

Rows = NDArray[np.float64]
References = Sequence[Sequence[str]]


class Summed(evaluate.Metric):
    """A metric over n predictions and, for each, one or more references (the best one counts).

    `compute(predictions=[...], references=[[...], ...])` is that of `evaluate`, and returns
    `{name: score}`.
    """

    def __init__(self) -> None:
        # `evaluate` makes a cache folder even when everything is kept in memory; a read-only home
        # must not stop a run.
        with tempfile.TemporaryDirectory() as folder:
            super().__init__(keep_in_memory=True, cache_dir=folder)

    @abstractmethod
    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        """What each item adds, [n, S]."""

    @abstractmethod
    def total(self, summed: Rows) -> float:
        """The score, 0 to 100, that a sum of rows [S] comes to."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The metric's name in reports."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=(type(self).__doc__ or "").strip(),
            citation="",
            inputs_description="predictions: list of str; references: list of lists of str",
            features=datasets.Features(
                {"predictions": text, "references": datasets.Sequence(text)}
            ),
        )

    def _compute(self, predictions: list[str], references: References) -> dict[str, float]:
        return {self.label: self.total(self.rows(predictions, references).sum(0))}


def _means(values: list[float]) -> Rows:
    """Rows of a mean: the item's value (0 to 1), and 1 for the count."""
    return np.array([[value, 1.0] for value in values], dtype=np.float64).reshape(-1, 2)


def _mean(summed: Rows) -> float:
    return 100 * float(summed[0] / summed[1])


class Accuracy(Summed):
    """Share of predictions that equal a reference to the letter."""

    label = "accuracy"

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        pairs = zip(predictions, references, strict=True)
        return _means([float(p in accepted) for p, accepted in pairs])

    def total(self, summed: Rows) -> float:
        return _mean(summed)


class ExactMatch(Summed):
    """Share of predictions that equal a reference once case, punctuation and articles are gone."""

    label = "exact_match"

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        pairs = zip(predictions, references, strict=True)
        return _means(
            [float(any(normalized(p) == normalized(r) for r in accepted)) for p, accepted in pairs]
        )

    def total(self, summed: Rows) -> float:
        return _mean(summed)


def contains(text: str, wanted: str) -> bool:
    """Whether `wanted` occurs in `text` as whole words (Chinese: characters), normalized."""
    hay, needle = normalized(text), normalized(wanted)
    return any(hay[i : i + len(needle)] == needle for i in range(len(hay) - len(needle) + 1))


class Contained(Summed):
    """Share of predictions in which a reference occurs as whole words, normalized."""

    label = "contained"

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        pairs = zip(predictions, references, strict=True)
        return _means([float(any(contains(p, r) for r in accepted)) for p, accepted in pairs])

    def total(self, summed: Rows) -> float:
        return _mean(summed)


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over normalized units (SQuAD), 0 to 1."""
    found, wanted = normalized(prediction), normalized(reference)
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else float(found == wanted)


class F1(Summed):
    """Mean over items of the F1 of words (Chinese: characters) shared with the best reference."""

    label = "f1"

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        pairs = zip(predictions, references, strict=True)
        return _means([max(f1(p, r) for r in accepted) for p, accepted in pairs])

    def total(self, summed: Rows) -> float:
        return _mean(summed)


class _Units:
    """`units` in the form that rouge-score takes a tokenizer in."""

    def tokenize(self, text: str) -> list[str]:
        return units(text)


class Rouge(Summed):
    """Mean F-measure of ROUGE-1, ROUGE-2 or ROUGE-L (Lin, 2004), by rouge-score, without stemming.

    Chinese is compared by characters.
    """

    def __init__(self, kind: Literal["rouge1", "rouge2", "rougeL"] = "rougeL") -> None:
        self.kind = kind
        super().__init__()

    @property
    def label(self) -> str:
        return self.kind

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        scorer = RougeScorer([self.kind], tokenizer=_Units())
        pairs = zip(predictions, references, strict=True)
        return _means([scorer.score_multi(list(r), p)[self.kind].fmeasure for p, r in pairs])

    def total(self, summed: Rows) -> float:
        return _mean(summed)


# sacrebleu's own bootstrap resamples these statistics too, but no public name leads to them; a
# test holds that their sum gives what `corpus_score` gives.
def _statistics(metric: Any, prediction: str, references: Sequence[str]) -> list[float]:
    streams = [[reference] for reference in references]
    return list(metric._extract_corpus_statistics([prediction], streams)[0])


class Bleu(Summed):
    """Corpus BLEU (Papineni et al., 2002; sacrebleu: Post, 2018, arXiv:1804.08771).

    Tokenized by 13a, or by Chinese characters (`zh`) where the reference holds any.
    """

    label = "bleu"

    @cached_property
    def _by_script(self) -> dict[bool, BLEU]:
        return {chinese: BLEU(tokenize="zh" if chinese else "13a") for chinese in (False, True)}

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        pairs = zip(predictions, references, strict=True)
        rows = [_statistics(self._by_script[has_cjk(r[0])], p, r) for p, r in pairs]
        return np.array(rows, dtype=np.float64)

    def total(self, summed: Rows) -> float:
        counts = [int(count) for count in summed]
        return float(self._by_script[False]._compute_score_from_stats(counts).score)


class Chrf(Summed):
    """Corpus chrF2, character n-grams up to 6 (Popović, 2015; sacrebleu)."""

    label = "chrf"

    @cached_property
    def _chrf(self) -> CHRF:
        return CHRF()

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        pairs = zip(predictions, references, strict=True)
        return np.array([_statistics(self._chrf, p, r) for p, r in pairs], dtype=np.float64)

    def total(self, summed: Rows) -> float:
        counts = [int(count) for count in summed]
        return float(self._chrf._compute_score_from_stats(counts).score)


def metric(name: str) -> Summed:
    """The metric called `name` in a task."""
    if name in ("rouge1", "rouge2", "rougeL"):
        return Rouge(name)  # type: ignore[arg-type]
    for kind in (Accuracy, ExactMatch, Contained, F1, Bleu, Chrf):
        if kind.label == name:
            return kind()
    raise ValueError(f"no metric {name!r}")
