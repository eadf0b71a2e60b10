"""extend: a longer window by scaling RoPE, and a short fine-tune of what is in 16 bit."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel

from compress import checkpoint, data, heldout, long_training
from compress.algorithms import rope
from compress.artifact import write_json
from compress.errors import ConfigError, UserError
from compress.eval.length import leading, read, sliding_windows
from compress.eval.length_judge import LengthJudge, length_judge
from compress.log import logger
from compress.model import storage_dtype
from compress.source import describe
from compress.stage import Run
from compress.trainable import load_exact, make_trainable

STRETCHES = (1.0, 1.25, 1.5, 2.0, 3.0)
"""By how much more than the factor the search slows the frequencies."""


@dataclass(kw_only=True)
class Extend:
    """How far the context window is stretched, and how the model is used to it.

    factor: new window over old; 1 leaves the model as it is. method: ntk (static NTK-aware: a
    larger theta alone), yarn (NTK by parts), linear. search: frequencies are also tried slowed by
    more than the factor (STRETCHES), by perplexity on one long window of training text.
    steps: of the fine-tune of norms, Q and K (and V where it is in one matrix with them), the
    integers frozen; 0: none. rate: its learning rate. batch: windows a step. length: tokens of a
    training window; null: the whole new window; fewer are spread over its positions (PoSE).
    passkey: share of the training windows in which a number is hidden and asked for.
    heldout_windows: long held-out windows on which it is measured, `measures` times in training.
    keys: numbers hidden at each length and depth to measure retrieval; 0: none. depths: how many.
    """

    name: ClassVar[str] = "extend"
    version: ClassVar[int] = 3
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
        if not 0 <= self.passkey <= 1:
            problems.append(f"extend.passkey is {self.passkey}; wanted a share, 0 to 1")
        if self.rate <= 0:
            problems.append(f"extend.rate is {self.rate}; wanted above 0")
        for name, value, least in (
            ("steps", self.steps, 0),
            ("batch", self.batch, 1),
            ("length", self.length, 64),
            ("heldout_windows", self.heldout_windows, 1),
            ("measures", self.measures, 1),
            ("keys", self.keys, 0),
            ("depths", self.depths, 1),
        ):
            if value is not None and value < least:
                problems.append(f"extend.{name} is {value}; wanted at least {least}")
        if problems:
            raise ConfigError(problems)

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
        if why := rope.refusal(self.method, _parameters(parsed)):
            raise UserError(f"extend: {why}; use extend.factor=1")
        judge, texts = self._texts(run, window, longer)
        before = _once(run.work / "before.json", lambda: self._before(run, source, judge))
        searched = self._search(run, source, parsed, texts, longer) if self.search else {}
        stretch = float(min(searched, key=lambda found: searched[found])) if searched else 1.0
        folder = run.work / "scaled"
        scale(source, folder, parsed, self.method, self.factor, stretch)

        model = make_trainable(_scaled_model(folder, run))
        at_once = _once(run.work / "scaled.json", lambda: judge.judge(model))
        changed, curve = self._fine_tuned(run, model, judge, texts, longer)
        after = judge.judge(model) if changed else at_once
        checkpoint.rewrite(source, out, changed, describe(folder))
        raise_limit(out, longer)
        kl = heldout.distance_of(load_exact(out, run.config), run.artifacts["statistics"]).kl
        told = (judged["ppl"]["long"] for judged in (before, at_once, after))
        logger.info(
            f"  window {window} to {longer} ({self.method}): perplexity over all of it "
            + ", ".join(map("{:.2f} {}".format, told, ("unscaled", "scaled", "in the end")))
        )
        kls = {"before": before["kl"], "after": kl}
        found = {"before": before, "scaled": at_once, "after": after}
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
            "ppl": {when: judged["ppl"]["long"] for when, judged in found.items()},
            "short_ppl": {when: judged["ppl"]["short"] for when, judged in found.items()},
            "retrieval": {when: judged["retrieval"] for when, judged in found.items()}
            if self.keys
            else None,
            "kl": kls,
            "heldout_kl": kls,
            "curve": curve,
            "kept": True,
            "notes": []
            if changed or not self.steps
            else ["no fine-tuning step lowered the loss at the new length; scaled only"],
        }

    def _texts(self, run: Run, window: int, longer: int) -> tuple[LengthJudge, list[str]]:
        """What to judge by, of held-out text, and the documents to learn from."""
        rest, held, description = data.split(run.config.data)
        judge = length_judge(
            AutoTokenizer.from_pretrained(
                run.artifacts["dense"], trust_remote_code=run.config.model.trust_remote_code
            ),
            # Conversations are joined as text: one alone would not fill a long window.
            "\n\n".join(map(data.plain, held)),
            window=window,
            longer=longer,
            windows=self.heldout_windows,
            lengths=sorted({window // 2, window, longer // 2, longer}),
            keys=self.keys,
            depths=self.depths,
            seed=run.config.seed,
            description=description,
        )
        return judge, [data.plain(document) for document in rest]

    def _before(self, run: Run, source: Path, judge: LengthJudge) -> dict[str, Any]:
        model = load_exact(source, run.config)
        kl = heldout.distance_of(model, run.artifacts["statistics"]).kl
        return {**judge.judge(model), "kl": kl}

    def _search(
        self, run: Run, source: Path, parsed: PretrainedConfig, texts: list[str], longer: int
    ) -> dict[str, float]:
        """The perplexity of one long window of training text for each of STRETCHES."""
        tokenizer = AutoTokenizer.from_pretrained(run.artifacts["dense"])
        text, bos = "\n\n".join(texts), leading(tokenizer)
        ids = sliding_windows(text, tokenizer, 1, longer, run.config.data.source)
        found = {}
        for stretch in STRETCHES:
            folder = run.work / "tried"
            scale(source, folder, parsed, self.method, self.factor, stretch)
            found[str(stretch)] = read(load_exact(folder, run.config), ids, longer, bos).long
            logger.info(f"  slowed by {stretch:g} times the factor: {found[str(stretch)]:.2f}")
        return found

    def _fine_tuned(
        self, run: Run, model: PreTrainedModel, judge: LengthJudge, texts: list[str], longer: int
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """The tensors of the best step, none where that is the start, and the measured curve."""
        if not self.steps:
            return {}, []
        steps = long_training.batches(
            texts,
            judge.tokenizer,
            steps=self.steps,
            batch=self.batch,
            length=min(self.length or longer, longer),
            passkey=self.passkey,
            seed=run.config.seed + 2,
        )

        def measure() -> float:
            """The mean loss of long and of short windows: neither may pay for the other."""
            found = judge.perplexities(model)
            return (math.log(found["long"]) + math.log(found["short"])) / 2

        history = long_training.fine_tune(
            model,
            steps,
            longer,
            measure,
            rate=self.rate,
            measures=self.measures,
            work=run.work,
            seed=run.config.seed,
            dtype=storage_dtype(model.config, run.config.model.dtype),
        )
        curve = [{"step": p["step"], "ppl": math.exp(p["value"])} for p in history.curve]
        return (history.best if history.best_step else {}), curve


def _once(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, kept in `file` for a run that goes on."""
    if not file.exists():
        write_json(file, make())
    return json.loads(file.read_text(encoding="utf-8"))


def _parameters(parsed: PretrainedConfig) -> dict[str, Any]:
    return dict(getattr(parsed, "rope_parameters", None) or {})


def window_of(parsed: PretrainedConfig) -> int:
    """The window that a model has now, in tokens."""
    return rope.whole_window(_parameters(parsed), parsed.max_position_embeddings)


def _head_dim(parsed: PretrainedConfig) -> int:
    return getattr(parsed, "head_dim", None) or parsed.hidden_size // parsed.num_attention_heads


def scale(
    source: Path,
    folder: Path,
    parsed: PretrainedConfig,
    method: str,
    factor: float,
    stretch: float = 1.0,
) -> None:
    """Make `folder` the model of `source` with its RoPE scaled, by links.

    parsed: its config as transformers reads it, which knows the several spellings of config.json
    and the defaults that it leaves out.
    """
    parameters, window = _parameters(parsed), window_of(parsed)
    folder.mkdir(exist_ok=True)
    checkpoint.hand_on(source, folder)
    changed = {
        **describe(source),
        "rope_parameters": rope.scaled(
            method, parameters, factor, _head_dim(parsed), window, stretch
        ),
        "max_position_embeddings": round(window * factor),
    }
    # Older spellings of the same would contradict it.
    for name in ("rope_theta", "rope_scaling"):
        changed.pop(name, None)
    write_json(folder / "config.json", changed)


def raise_limit(folder: Path, window: int) -> None:
    """Let the tokenizer's own limit be no lower: vLLM takes the lower of the two windows."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if settings.get("model_max_length", window) < window:
        write_json(file, {**settings, "model_max_length": window})


def _scaled_model(folder: Path, run: Run) -> PreTrainedModel:
    """The scaled model; raises UserError where it does not turn by the frequencies meant."""
    model = load_exact(folder, run.config)
    wanted, _ = rope.frequencies(
        _parameters(model.config), _head_dim(model.config), window_of(model.config)
    )
    built = [b for name, b in model.named_buffers() if name.rpartition(".")[2] == "inv_freq"]
    if not built or not all(
        b.shape == wanted.shape and torch.allclose(b.cpu().double(), wanted, rtol=1e-4)
        for b in built
    ):
        raise UserError(
            f"extend: a {model.config.model_type} does not take its frequencies from "
            "rope_parameters as others do; use extend.factor=1"
        )
    return model
