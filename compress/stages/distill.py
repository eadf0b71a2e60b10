"""distill: the original's soft labels win back what quantization lost."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from compress import checkpoint, processes
from compress.artifact import Artifact, once
from compress.errors import ConfigError, UserError
from compress.eval.own import named
from compress.log import logger
from compress.model_path import home
from compress.report.words import several
from compress.source import describe
from compress.stage import Run
from compress.stages.calibrate import WINDOWS
from compress.text.windows import Windows
from compress.training import labels
from compress.training.asking import Asked, by_likelihood, prepared, scores
from compress.training.choosing import words
from compress.training.endpoint import Endpoint, connect
from compress.training.labels import Labels
from compress.training.learning import learn, served_kl
from compress.training.optimizer import OPTIMIZERS, missing
from compress.training.student import LOSSES, figures
from compress.training.teacher import Teacher, linear_weights, original, shared_vocabulary
from compress.training.trainable import WAYS

PRECISIONS = ("float32", "bfloat16")
CHOICES = {"loss": LOSSES, "train": WAYS, "precision": PRECISIONS, "optimizer": OPTIMIZERS}


@dataclass(kw_only=True)
class Distill:
    """A short training of the quantized model towards the original, or towards another teacher.

    samples, length: windows of text, and tokens a window; those that calibrate.written made come
    on top. teacher: the folder of another model with the same tokenizer; null: the original.
    endpoint: a server that runs the teacher (http://HOST:PORT/v1, compress/training/endpoint.py);
    teacher is then the server's name for it, null: the only one that it has.
    top_k: the teacher's likeliest tokens that are kept, with the remaining mass as one more.
    train: `scales` (with norms, Q and K, and V in 16 bit; the integers stay); `latent` (the
    integers too, by latent weights that are rounded going forward); or `adapters` (the integers
    too, moved by alpha / rank times a product of that rank, rounded with them going forward).
    batch: windows a step. epochs: times each window is seen. scale_rate: learning rate of the
    scales, relative to their mean size in each layer; rate: of norms, Q, K, V; null: by the bits
    (RATES). latent_rate: of latent weights, in steps of the grid; adapter_rate: of adapters.
    loss: kl, reverse_kl or jensen_shannon, the last with the teacher's share beta; at this
    temperature; hard: the share of cross-entropy with the text itself.
    precision: arithmetic of the teacher and of the student while it learns; measured in float32.
    recompute: less memory for a third more time: a block's inside is made again on the way back.
    optimizer: adamw, or adamw_8bit, whose state takes a fourth (compress/training/optimizer.py).
    measures: how often the held-out KL is taken; after `patience` of them that are no better than
    the best, training ends. tasks: names of bundled suites, or .yaml files of tasks of one's own,
    of kind choice or cloze, whose first `task_items` items are asked then, too; a step at which one
    of them has fallen is not kept.
    """

    name: ClassVar[str] = "distill"
    version: ClassVar[int] = 3
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics", "quantized")
    gives: ClassVar[str | None] = "quantized"
    shares: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "device", "teacher")

    samples: int = 32
    length: int = 512
    teacher: str | None = None
    endpoint: str | None = None
    top_k: int = 64
    train: str = "scales"
    batch: int = 2
    epochs: int = 1
    scale_rate: float | None = None
    rate: float | None = None
    latent_rate: float = 1e-2
    rank: int = 16
    alpha: float = 32.0
    adapter_rate: float = 1e-3
    loss: str = "kl"
    beta: float = 0.5
    temperature: float = 1.0
    hard: float = 0.0
    precision: str = "float32"
    recompute: bool = False
    optimizer: str = "adamw"
    measures: int = 4
    patience: int = 3
    tasks: list[str] = field(default_factory=list)
    task_items: int = 40

    def __post_init__(self) -> None:
        counts = ("top_k", "batch", "epochs", "measures", "patience", "samples", "rank")
        above_0 = ("scale_rate", "rate", "latent_rate", "adapter_rate", "alpha", "temperature")
        least = {**dict.fromkeys(counts, 1), "length": 16, "task_items": 1}
        problems = [
            f"distill.{name} is {getattr(self, name)}; wanted at least {number}"
            for name, number in least.items()
            if getattr(self, name) < number
        ]
        problems += [
            f"distill.{name} is {value}; wanted above 0"
            for name in above_0
            if (value := getattr(self, name)) is not None and value <= 0
        ]
        problems += [
            f"distill.{name} is {getattr(self, name)!r}; wanted one of {', '.join(choices)}"
            for name, choices in CHOICES.items()
            if getattr(self, name) not in choices
        ]
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            problems.append(f"distill.endpoint is {self.endpoint!r}; wanted http://HOST:PORT/v1")
        if not 0 < self.beta < 1:
            problems.append(f"distill.beta is {self.beta}; wanted between 0 and 1")
        if not 0 <= self.hard <= 1:
            problems.append(f"distill.hard is {self.hard}; wanted 0 to 1")
        if needed := missing(self.optimizer):
            problems.append(f"distill.optimizer={self.optimizer} needs {needed}")
        try:
            by_likelihood(self.tasks)
        except UserError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError(problems)

    def teacher_folder(self) -> Path | None:
        """The folder of the other teacher, if any; raises UserError where no model is there."""
        if self.teacher is None or self.endpoint is not None:
            return None
        folder = home(self.teacher)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"distill.teacher={self.teacher}: no config.json there; wanted the folder of a "
                "model, or null for the original"
            )
        return folder

    def _teacher_name(self) -> str | None:
        """Words for the teacher, where it is not the original."""
        if self.endpoint is not None:
            return self.teacher or f"the model at {self.endpoint}"
        folder = self.teacher_folder()
        return folder.name if folder else None

    def refuse(self, original: Path | None, trust_remote_code: bool) -> None:
        """Raise UserError for a teacher that cannot teach, or processes that cannot share the work.

        original: the model's folder; None where it has no tokenizer yet to compare with.
        """
        processes.refuse_fewer("distill.batch", self.batch)
        if self.train == "adapters" and processes.sharded():
            raise UserError(
                "distill.train is adapters, which are not cut over processes; wanted scales or "
                "latent, or launch with --multi_gpu in place of --use_fsdp"
            )
        if self.optimizer != "adamw" and processes.sharded():
            raise UserError(
                f"distill.optimizer is {self.optimizer}, whose state is not cut over processes; "
                "wanted adamw, or launch with --multi_gpu in place of --use_fsdp"
            )
        if self.endpoint is not None:
            self._connected(self.endpoint, original, trust_remote_code)
        elif (other := self.teacher_folder()) is not None and original is not None:
            shared_vocabulary(other, original, trust_remote_code)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        config, source = run.config, run.artifacts["quantized"]
        made = self._labels(run)
        batch = min(self.batch, len(made))
        asked = prepared(by_likelihood(self.tasks), self.task_items, run) if self.tasks else []
        told = self._asked(run, asked)
        learned = processes.everywhere(learn, self, run, made, batch, asked)
        history = learned.history
        kept = history.best_step > 0
        if kept:
            checkpoint.rewrite(source, out, learned.tensors, describe(source))
        else:
            checkpoint.hand_on(source, out)
        before, after = served_kl(run, source), served_kl(run, out)
        if learned.unrounded is not None:
            logger.info(f"  held-out KL {learned.unrounded:.4f} before adapters are rounded")
        fell = [(p["step"], fall) for p in history.curve for fall in p.get("falls", ())]
        start = history.curve[0]["value"]
        held_back = any(p.get("falls") and p["value"] < start for p in history.curve)
        but = " without a task falling" if held_back else ""
        logger.info(
            f"  held-out KL {before:.4f} to {after:.4f}, best at step {history.best_step}"
            if kept
            else f"  held-out KL {before:.4f} was not improved{but}; handed on as it was"
        )
        notes = [f"step {step}: {words(fall)}: not kept" for step, fall in fell]
        if not kept:
            notes.append(f"no step improved the held-out KL{but}; the input is handed on")
        weights = linear_weights(run.artifacts["dense"], config.model.trust_remote_code)
        return {
            "teacher": self._teacher_name(),
            "train": self.train,
            **figures(history, made, batch, weights),
            "trained_parameters": learned.count,
            "unrounded_kl": learned.unrounded,
            "kl": {"before": before, "after": after},
            "kept": kept,
            "heldout_kl": {"before": before, "after": after},
            "notes": notes,
            **({"tasks": told, "held_back": held_back} if self.tasks else {}),
        }

    def _asked(self, run: Run, asked: list[Asked]) -> dict[str, Any]:
        """Of each task that is asked at every measure: its items, and the original's score, 0 to
        100, which is read a block at a time.
        """
        if not asked:
            return {}
        file = run.work / "original.json"
        original = once(file, lambda: scores(asked, run.original, run))
        for one in asked:
            name, items = one.task.name, several(len(one.items), "item")
            logger.info(f"  {name}: {items}, the original's score {original[name]:.1f}")
        judging = {task.name for task in named(run.config.score.tasks)}
        both = [one.task.name for one in asked if one.task.name in judging]
        if both and "score" in run.config.stages:
            names = ", ".join(both)
            logger.info(f"  {names}: in score.tasks too; what chose the step then judges it")
        return {
            one.task.name: {"items": len(one.items), "original": original[one.task.name]}
            for one in asked
        }

    def _windows(self, run: Run) -> Windows:
        """Text from the data of the run, and what the model wrote for calibrate."""
        models = (run.original, run.artifacts["dense"])
        seed = run.config.seed + 1
        text = labels.drawn(run, models, count=self.samples, length=self.length, seed=seed)
        written = load_file(run.artifacts["statistics"] / WINDOWS).get("written")
        return text if written is None else _joined(text, written)

    def _labels(self, run: Run) -> Labels:
        """The teacher's labels, which stay beside the stages: other training settings read them."""
        place = Artifact("labels", run.stages / "labels", run.stages, rebuilt=True)
        return labels.make(place, self._teacher(run), self._windows(run))

    def _teacher(self, run: Run) -> Teacher | Endpoint:
        """What labels: the server's model, that of another folder, or the original."""
        trust = run.config.model.trust_remote_code
        if self.endpoint is not None:
            return self._connected(self.endpoint, run.original, trust)
        other, dtype = self.teacher_folder(), getattr(torch, self.precision)
        if other is None:
            return original(run, self.top_k, dtype)
        vocabulary = shared_vocabulary(other, run.original, trust)
        return Teacher(other, vocabulary, self.top_k, dtype, run.config.device, trust)

    def _connected(self, url: str, original: Path | None, trust_remote_code: bool) -> Endpoint:
        tokenizer = original and AutoTokenizer.from_pretrained(
            original, trust_remote_code=trust_remote_code
        )
        return connect(url, self.teacher, self.top_k, tokenizer)


def _joined(text: Windows, written: Tensor) -> Windows:
    """`text` [n, T], and what the model wrote, in windows of the same length."""
    length = text.ids.shape[1]
    more = written.flatten()[: written.numel() // length * length].view(-1, length)
    return replace(
        text,
        ids=torch.cat([text.ids, more]),
        mask=torch.cat([text.mask, torch.ones_like(more)]),
    )
