"""extend: a longer window by scaling RoPE, and a short fine-tune of what is in 16 bit."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

from compress import checkpoint, heldout, processes
from compress.algorithms import rope
from compress.artifact import Artifact, once
from compress.errors import ConfigError, UserError
from compress.eval.length import sliding_windows
from compress.eval.length_judge import LengthJudge, length_judge
from compress.eval.length_needles import ASKED
from compress.log import logger
from compress.model import storage_dtype
from compress.source import describe
from compress.stage import Run
from compress.stages.distill import PRECISIONS
from compress.text import documents
from compress.training import labels, long_training
from compress.training.labels import Labels
from compress.training.loop import History
from compress.training.scaling import (
    best,
    check_frequencies,
    raise_limit,
    rope_of,
    scale,
    search,
    window_of,
)
from compress.training.teacher import original
from compress.training.trainable import load_exact, make_trainable

SHORT_RISE = 0.01
"""Rise of the perplexity in windows of the old length from which on it is told."""
CHARACTERS = 16
"""So many to a token fill a window: on average a token has fewer in any language."""


@dataclass(kw_only=True)
class Extend:
    """How far the context window is stretched, and how the model is used to it.

    factor: new window over old; 1 leaves the model as it is. method: ntk (static NTK-aware: a
    larger theta alone), yarn (NTK by parts), linear. search: frequencies are also tried slowed by
    less and by more than the factor, by perplexity on one long window of training text.
    steps: of the fine-tune of norms, Q and K (and V where it is in one matrix with them), the
    integers frozen; 0: none. rate: its learning rate. batch: windows a step. length: tokens of a
    training window; null: the whole new window; fewer are spread over its positions (PoSE).
    passkey: share of the training windows in which a number is hidden and asked for.
    labels: the original's soft labels, the `top_k` likeliest of each, are learned and not the text,
    in windows no longer than its own. near: share of the windows without a number that stay at the
    first positions, where short texts are read.
    heldout_windows: long held-out windows on which it is measured, `measures` times in training.
    precision: arithmetic of the fine-tune and of what is measured by length: float32, or bfloat16
    but for norms, softmax and the residual stream; weights and the KL stay in float32.
    keys: numbers hidden at each length and depth to measure retrieval; 0: none. depths: how many.
    """

    name: ClassVar[str] = "extend"
    version: ClassVar[int] = 4
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics", "quantized")
    gives: ClassVar[str | None] = "quantized"
    shares: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "device")

    factor: float = 1.0
    method: str = "ntk"
    search: bool = False
    steps: int = 0
    rate: float = 2e-5
    batch: int = 1
    length: int | None = None
    passkey: float = 0.0
    labels: bool = False
    top_k: int = 64
    near: float = 0.0
    precision: str = "float32"
    heldout_windows: int = 2
    measures: int = 4
    keys: int = 1
    depths: int = 5

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.factor <= 64:
            problems.append(f"extend.factor is {self.factor}; wanted 1 (off) to 64")
        if self.method not in rope.METHODS:
            problems.append(
                f"extend.method is {self.method!r}; wanted one of {', '.join(rope.METHODS)}"
            )
        if self.precision not in PRECISIONS:
            problems.append(
                f"extend.precision is {self.precision!r}; wanted one of {', '.join(PRECISIONS)}"
            )
        for name, share in (("passkey", self.passkey), ("near", self.near)):
            if not 0 <= share <= 1:
                problems.append(f"extend.{name} is {share}; wanted a share, 0 to 1")
        if not 1 <= self.depths <= len(ASKED.things):
            problems.append(f"extend.depths is {self.depths}; wanted 1 to {len(ASKED.things)}")
        if self.rate <= 0:
            problems.append(f"extend.rate is {self.rate}; wanted above 0")
        for name, value, least in (
            ("steps", self.steps, 0),
            ("batch", self.batch, 1),
            ("length", self.length, 64),
            ("top_k", self.top_k, 1),
            ("heldout_windows", self.heldout_windows, 1),
            ("measures", self.measures, 1),
            ("keys", self.keys, 0),
        ):
            if value is not None and value < least:
                problems.append(f"extend.{name} is {value}; wanted at least {least}")
        if problems:
            raise ConfigError(problems)

    def refuse(self, model: PretrainedConfig) -> None:
        """Raise UserError for a window that cannot be had, or processes that cannot share it."""
        if self.factor == 1:
            return
        if why := rope.refusal(self.method, rope_of(model)):
            raise UserError(f"extend: {why}; use extend.factor=1")
        if not self.steps:
            return
        processes.refuse_fewer("extend.batch", self.batch)
        if processes.sharded():
            raise UserError(
                "extend: its fine-tune is not cut over processes; launch with --multi_gpu in place "
                "of --use_fsdp, or add extend.steps=0"
            )

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        source, trust = run.artifacts["quantized"], run.config.model.trust_remote_code
        parsed = AutoConfig.from_pretrained(source, trust_remote_code=trust)
        window = window_of(parsed)
        if self.factor == 1:
            checkpoint.hand_on(source, out)
            logger.info(f"  off: the window of {window} tokens is kept")
            return {
                "method": None,
                "factor": 1.0,
                "window": {"before": window, "after": window},
                "kept": False,
                "notes": ["off: this recipe needs no longer context"],
            }

        longer = round(window * self.factor)
        judge, texts = self._texts(run, window, longer)
        before = once(run.work / "before.json", lambda: self._before(run, source, judge))
        searched = self._search(run, source, parsed, judge, texts) if self.search else {}
        stretch = best(searched)
        folder = run.work / "scaled"
        scale(source, folder, parsed, self.method, self.factor, stretch)

        at_once = once(run.work / "scaled.json", lambda: judge.judge(_scaled(run, folder)))
        steps = self._pieces(run, judge, texts)
        taught = self._labels(run, steps)
        history = processes.everywhere(self._fine_tuned, run, folder, judge, steps, taught)
        changed = history.best if history.best_step else {}
        checkpoint.rewrite(source, out, changed, describe(folder))
        raise_limit(out, longer)
        model = load_exact(out, run.config)
        after = judge.judge(model) if changed else at_once
        kl = heldout.distance_of(model, run.artifacts["statistics"]).kl
        kls = {"before": before["kl"], "after": kl}
        found = {"before": before, "scaled": at_once, "after": after}
        long, short = (
            {when: judged["ppl"][key] for when, judged in found.items()}
            for key in ("long", "short")
        )
        logger.info(
            f"  window {window} to {longer} ({self.method}): perplexity over all of it "
            f"{long['before']:.2f} unscaled, {long['scaled']:.2f} scaled, "
            f"{long['after']:.2f} in the end; in windows of {window} {short['before']:.2f}, "
            f"{short['scaled']:.2f}, {short['after']:.2f}"
        )
        parts = len(after["ppl"]["by_position"])
        return {
            "method": self.method,
            "factor": self.factor,
            "stretch": stretch,
            "search": searched,
            "window": {"before": window, "after": longer},
            "rope_parameters": describe(out)["rope_parameters"],
            "ppl_by_position": {
                "positions": [longer * (part + 1) // parts for part in range(parts)],
                **{when: judged["ppl"]["by_position"] for when, judged in found.items()},
            },
            "ppl": long,
            "short_ppl": short,
            "retrieval": {when: judged["retrieval"] for when, judged in found.items()}
            if self.keys
            else None,
            "kl": kls,
            "heldout_kl": kls,
            "labels": taught and taught.figures,
            "curve": [{"step": p["step"], "ppl": math.exp(p["value"])} for p in history.curve],
            "best_step": history.best_step,
            "kept": True,
            "notes": self._notes(bool(changed), short["after"] / short["before"] - 1),
        }

    def _notes(self, tuned: bool, rise: float) -> list[str]:
        """What a reader should know. rise: of the perplexity in windows of the old length."""
        notes = []
        if self.steps and not tuned:
            notes.append("no fine-tuning step lowered the loss; scaled only")
        if rise > SHORT_RISE:
            notes.append(f"the perplexity in windows of the old length rose by {rise:.1%}")
        return notes

    def _texts(self, run: Run, window: int, longer: int) -> tuple[LengthJudge, list[str]]:
        """What to judge by, of held-out text, and the documents to learn from."""
        rest, held, description = documents.split(run.config.data)
        judge = length_judge(
            AutoTokenizer.from_pretrained(
                run.artifacts["dense"], trust_remote_code=run.config.model.trust_remote_code
            ),
            # Conversations are joined as text: one alone would not fill a long window.
            "\n\n".join(map(documents.plain, held)),
            window=window,
            longer=longer,
            windows=self.heldout_windows,
            lengths=sorted({window // 2, window, longer // 2, longer}),
            keys=self.keys,
            depths=self.depths,
            seed=run.config.seed,
            description=description,
            precision=getattr(torch, self.precision),
        )
        return judge, [documents.plain(document) for document in rest]

    def _before(self, run: Run, source: Path, judge: LengthJudge) -> dict[str, Any]:
        model = load_exact(source, run.config)
        kl = heldout.distance_of(model, run.artifacts["statistics"]).kl
        return {**judge.judge(model), "kl": kl}

    def _search(
        self, run: Run, source: Path, parsed: PretrainedConfig, judge: LengthJudge, texts: list[str]
    ) -> dict[str, float]:
        """The perplexity of one long window of training text, by stretch."""
        longer = judge.ids.shape[1]
        start = "\n\n".join(texts)[: CHARACTERS * longer]
        ids = sliding_windows(start, judge.tokenizer, 1, longer, run.config.data.source)

        def tried(stretch: float) -> PreTrainedModel:
            scale(source, run.work / "tried", parsed, self.method, self.factor, stretch)
            return load_exact(run.work / "tried", run.config)

        return search(tried, self.factor, ids, getattr(torch, self.precision))

    def _pieces(
        self, run: Run, judge: LengthJudge, texts: list[str]
    ) -> list[list[long_training.Piece]]:
        """What each step learns from; empty where there are none."""
        if not self.steps:
            return []
        return long_training.batches(
            texts,
            judge.tokenizer,
            steps=self.steps,
            batch=self.batch,
            length=self._length(run, judge),
            passkey=self.passkey,
            seed=run.config.seed + 2,
            labelled=self.labels,
            near=self.near,
        )

    def _length(self, run: Run, judge: LengthJudge) -> int:
        """The tokens of a training window."""
        longer = judge.ids.shape[1]
        if not self.labels:
            return min(self.length or longer, longer)
        trust = run.config.model.trust_remote_code
        parsed = AutoConfig.from_pretrained(run.original, trust_remote_code=trust)
        most = min(judge.window, window_of(parsed.get_text_config()))
        if (self.length or 0) > most:
            logger.info(
                f"  training windows of {most} tokens instead of {self.length}: what the original "
                "holds, whose labels are learned"
            )
        return min(self.length or most, most)

    def _labels(self, run: Run, steps: list[list[long_training.Piece]]) -> Labels | None:
        """What the original says of the pieces that learn it; None where there are none."""
        windows = long_training.to_label(steps)
        if windows is None:
            return None
        place = Artifact("extend_labels", run.stages / "extend_labels", run.stages, rebuilt=True)
        return labels.make(
            place, original(run, self.top_k, getattr(torch, self.precision)), windows
        )

    def _fine_tuned(
        self,
        run: Run,
        folder: Path,
        judge: LengthJudge,
        steps: list[list[long_training.Piece]],
        taught: Labels | None,
    ) -> History:
        """How the scaled model learned; an empty history where there are no steps."""
        if not steps:
            return History()
        model = _scaled(run, folder)
        return long_training.fine_tune(
            model,
            steps,
            judge.ids.shape[1],
            lambda: judge.loss(model),
            rate=self.rate,
            measures=self.measures,
            work=run.work,
            seed=run.config.seed,
            dtype=storage_dtype(model.config, run.config.model.dtype),
            precision=getattr(torch, self.precision),
            labels=taught,
        )


def _scaled(run: Run, folder: Path) -> PreTrainedModel:
    """The scaled model in `folder`, as it learns."""
    model = load_exact(folder, run.config)
    check_frequencies(model)
    return make_trainable(model)
