"""Metrics as local `evaluate` classes: nothing is downloaded, nothing is written to a cache.

Every metric is a sum over items: what one item adds (a row of S numbers), and what the sum over
items comes to. So one set of rows gives the score, the item's own score, and the interval of a
difference by resampling items (eval/statistics.py), for BLEU as well as for a mean.
All scores are on the scale 0 to 100. Shapes: n items, S numbers an item.
"""

import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import datasets
import evaluate
import numpy as np
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

from compress.eval import checks
from compress.eval.text import contains, f1, has_cjk, normalized, units

Rows = NDArray[np.float64]
References = Sequence[Sequence[str]]


class Summed(evaluate.Metric):
    """A metric over n predictions and, for each, one or more references (the best one counts).

    `compute(predictions=[...], references=[[...], ...])` is that of `evaluate`, and returns
    `{name: score}`. label: the metric's name.
    """

    label: str

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


Grade = Callable[[str, Sequence[str]], float]
"""What one answer is worth, 0 to 1, beside the references accepted for it."""

GRADES: dict[str, Grade] = {
    # Equal to a reference to the letter.
    "accuracy": lambda p, accepted: p in accepted,
    # Equal to one once case, punctuation and articles are gone.
    "exact_match": lambda p, accepted: any(normalized(p) == normalized(r) for r in accepted),
    # A reference occurs in it as whole words, normalized.
    "contained": lambda p, accepted: any(contains(p, r) for r in accepted),
    # F1 of words (Chinese: characters) shared with the best reference.
    "f1": lambda p, accepted: max(f1(p, r) for r in accepted),
    # Share of the names and numbers that a summary has to keep; they stand as its references.
    "entities": lambda p, kept: sum(contains(p, name) for name in kept) / len(kept),
    # Without references: the answer is JSON; it parses as Python; it does not repeat itself.
    "json": lambda p, _: checks.is_json(p),
    "python": lambda p, _: checks.is_python(p),
    "no_loop": lambda p, _: not checks.loops(p),
}


class Mean(Summed):
    """Mean over items of one of GRADES."""

    def __init__(self, label: str) -> None:
        self.label = label
        super().__init__()

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        pairs = zip(predictions, references, strict=True)
        return _means([float(GRADES[self.label](p, accepted)) for p, accepted in pairs])

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
        self.label = kind
        super().__init__()

    def rows(self, predictions: Sequence[str], references: References) -> Rows:
        scorer = RougeScorer([self.label], tokenizer=_Units())
        pairs = zip(predictions, references, strict=True)
        return _means([scorer.score_multi(list(r), p)[self.label].fmeasure for p, r in pairs])

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
    if name in GRADES:
        return Mean(name)
    if name in ("rouge1", "rouge2", "rougeL"):
        return Rouge(name)  # type: ignore[arg-type]
    if name in ("bleu", "chrf"):
        return Bleu() if name == "bleu" else Chrf()
    raise ValueError(f"no metric {name!r}")
