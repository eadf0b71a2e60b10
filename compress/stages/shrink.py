"""shrink: a smaller dense model in the original's place, taught by the original."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig

from compress import checkpoint, heldout, processes
from compress.algorithms.prune import Removal
from compress.artifact import Artifact, once
from compress.errors import ConfigError, UserError
from compress.log import logger
from compress.model import BlockModel, storage_dtype
from compress.model_path import home
from compress.sizes import tensor_bytes, tensor_elements
from compress.source import describe, read_config
from compress.stage import Run
from compress.stages.distill import PRECISIONS
from compress.text.windows import Windows
from compress.training import cutting, labels
from compress.training.cutting import Cut, Size, size_of
from compress.training.importance import choose
from compress.training.labels import Labels
from compress.training.padded import pad_vocabulary
from compress.training.refitting import refitted
from compress.training.student import figures
from compress.training.teacher import linear_weights, original, shared_vocabulary
from compress.training.whole import learn_all

SIZES = ("blocks", "mlp", "kv_heads")
LABELS = "shrink_labels"


@dataclass(kw_only=True)
class Shrink:
    """A smaller model for where the original is too large in any format; off unless asked for.

    blocks, mlp, kv_heads: what the original is cut to: decoder blocks, and in each the channels of
    the MLP and the KV heads (each with its query heads); null: as many as it has. student: the
    folder of a smaller model with the same tokenizer, in place of cutting.
    windows: of text by which it is measured what the original misses least. fit: of text by which
    what stays is fitted to the original before it learns (training/refitting.py); 0: it is not.
    samples, length: windows of text to learn from, and tokens a window; no samples: the student
    stays as it is cut. top_k: the original's likeliest tokens that are kept, with the remaining
    mass as one more. batch: windows a step. epochs: times each window is seen. rate: learning rate
    of all weights. hard: the share of cross-entropy with the text itself.
    precision: arithmetic of trials, of the original's labels and of the student while it learns;
    held-out KL is measured in float32. recompute: less memory for a third more time.
    measures: how often the held-out KL is taken; after `patience` of them that are no better than
    the best, training ends.
    """

    name: ClassVar[str] = "shrink"
    version: ClassVar[int] = 3
    needs: ClassVar[tuple[str, ...]] = ("dense",)
    gives: ClassVar[str | None] = "dense"
    shares: ClassVar[tuple[str, ...]] = ("model", "data", "seed", "device", "heldout", "student")

    blocks: int | None = None
    mlp: int | None = None
    kv_heads: int | None = None
    student: str | None = None
    windows: int = 2
    fit: int = 32
    samples: int = 128
    length: int = 512
    top_k: int = 64
    batch: int = 1
    epochs: int = 1
    rate: float = 1e-4
    hard: float = 0.0
    precision: str = "float32"
    recompute: bool = False
    measures: int = 4
    patience: int = 3

    def __post_init__(self) -> None:
        counts = ("windows", "top_k", "batch", "epochs", "measures", "patience", *SIZES)
        least = {**dict.fromkeys(counts, 1), "fit": 0, "samples": 0, "length": 16}
        problems = [
            f"shrink.{name} is {value}; wanted at least {number}"
            for name, number in least.items()
            if (value := getattr(self, name)) is not None and value < number
        ]
        if self.fit == 1:
            problems.append("shrink.fit is 1; wanted 0, or at least 2, one of them to check by")
        if self.rate <= 0:
            problems.append(f"shrink.rate is {self.rate}; wanted above 0")
        if not 0 <= self.hard <= 1:
            problems.append(f"shrink.hard is {self.hard}; wanted 0 to 1")
        if self.precision not in PRECISIONS:
            problems.append(
                f"shrink.precision is {self.precision!r}; wanted one of {', '.join(PRECISIONS)}"
            )
        if self.student is not None and self._cuts:
            problems.append(
                "shrink.student is given with shrink.blocks, mlp or kv_heads; wanted a smaller "
                "model or a cut of the original, not both"
            )
        if problems:
            raise ConfigError(problems)

    @property
    def _cuts(self) -> bool:
        return any(getattr(self, name) is not None for name in SIZES)

    @property
    def asked(self) -> bool:
        """Whether a smaller model is wanted."""
        return self._cuts or self.student is not None

    def student_folder(self) -> Path | None:
        """The folder of the given student, if any; raises UserError where no model is there."""
        if self.student is None:
            return None
        folder = home(self.student)
        if not (folder / "config.json").is_file():
            raise UserError(
                f"shrink.student={self.student}: no config.json there; wanted the folder of a model"
            )
        return folder

    def size(self, config: PretrainedConfig) -> Size:
        """What a model of this configuration is cut to. Raises UserError where it cannot be."""
        whole = size_of(config)
        wanted = Size(
            self.blocks or whole.blocks, self.kv_heads or whole.kv_heads, self.mlp or whole.mlp
        )
        cutting.refuse(config, wanted)
        return wanted

    def planned(self, model: PretrainedConfig, trust_remote_code: bool) -> PretrainedConfig:
        """The configuration of the student that is to stand in for `model`, before it is known
        which parts of that stay.
        """
        if folder := self.student_folder():
            return read_config(folder, trust_remote_code)
        size = self.size(model)
        cut = Cut(list(range(size.blocks)), [list(range(size.kv_heads))], [list(range(size.mlp))])
        return type(model).from_dict(cutting.cut_config(model.to_dict(), model, cut))

    def refuse(
        self, model: PretrainedConfig, original: Path | None, trust_remote_code: bool
    ) -> None:
        """Raise UserError for a cut or a student that cannot be, or processes that cannot share it.

        original: the folder of `model`; None where it has no tokenizer yet to compare with.
        """
        if self.samples:
            processes.refuse_fewer("shrink.batch", self.batch)
        given = self.student_folder()
        if given is None:
            self.size(model)
            return
        found = read_config(given, trust_remote_code)  # whatever is wrong with the folder
        if original is None:
            return
        known = shared_vocabulary(given, original, trust_remote_code, option="shrink.student")
        rows, wanted = (c.get_text_config().vocab_size for c in (found, model))
        if rows != wanted and min(rows, wanted) < known:
            raise UserError(
                f"shrink.student={self.student}: an output of {rows} tokens where the original's "
                f"has {wanted}, and {known} in the tokenizer; wanted as many, but for padding"
            )

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        held, given = run.work / "heldout", run.work / "given"
        said = once(held.with_suffix(".json"), lambda: self._keep_heldout(run, _emptied(held)))
        cut = once(given.with_suffix(".json"), lambda: self._give(run, _emptied(given)))
        distance = partial(
            heldout.distance,
            statistics=held,
            device=run.config.device,
            trust_remote_code=run.config.model.trust_remote_code,
        )
        before = distance(given)
        logger.info(f"  untrained: held-out KL {before.kl:.4f}, perplexity {before.ppl:.2f}")
        fit, start = None, given
        if self.fit and self.student is None:
            folder = run.work / "fitted"
            make = partial(self._fit, run, given, cut["left_out"], folder, distance)
            fit = once(folder.with_suffix(".json"), make)
            start = folder if fit["kl"] < before.kl else given
        taught = self._taught(run, start, held, out) if self.samples else {"kept": False}
        if not taught["kept"]:
            checkpoint.hand_on(start, out)
        after = distance(out)
        logger.info(f"  in the end: held-out KL {after.kl:.4f}, perplexity {after.ppl:.2f}")
        kls = {"before": before.kl, "after": after.kl}
        return {
            **cut,
            "fit": fit,
            "ppl": {"original": said["ppl"], "before": before.ppl, "after": after.ppl},
            "kl": kls,
            "heldout_kl": kls,
            **taught,
        }

    def _keep_heldout(self, run: Run, folder: Path) -> dict[str, Any]:
        """Keep in `folder` what the original says of the held-out text."""
        student = self.student_folder() or run.original
        config = read_config(student, run.config.model.trust_remote_code)
        return {"ppl": heldout.record(run, heldout.windows(run, config), folder)}

    def _take(self, given: Path, folder: Path, original: Path, trust: bool) -> None:
        """Make `folder` the given student, with as many outputs as the original has."""
        rows, wanted = (
            read_config(place, trust).get_text_config().vocab_size for place in (given, original)
        )
        if rows == wanted:
            checkpoint.hand_on(given, folder)
            return
        logger.info(f"  {given}: its output of {rows} tokens is padded to the original's {wanted}")
        pad_vocabulary(given, folder, wanted, trust)

    def _give(self, run: Run, folder: Path) -> dict[str, Any]:
        """Make `folder` the student that is to learn; what it is beside the original."""
        original, options = run.artifacts["dense"], run.config.model
        given, removed = self.student_folder(), list[Removal]()
        if given is not None:
            self._take(given, folder, original, options.trust_remote_code)
        else:
            model = self._opened(run, original)
            text = self._windows(run, self.windows, run.config.seed)
            file = run.stages / "shrink_trials.json"
            cut, removed = choose(model, text, file, self.size(model.config))
            dtype = storage_dtype(model.config, options.dtype)
            cutting.write_cut(original, folder, model.config, model.prefix, cut, dtype)

        def both(of: Callable[[Path], Any]) -> dict[str, Any]:
            return {"before": of(original), "after": of(folder)}

        return {
            "student": given.name if given else None,
            "size": both(lambda f: asdict(size_of(read_config(f, options.trust_remote_code)))),
            "left_out": [asdict(removal) for removal in removed],
            "parameters": both(lambda f: sum(tensor_elements(f).values())),
            "bytes": both(lambda f: sum(tensor_bytes(f).values())),
        }

    def _fit(
        self,
        run: Run,
        given: Path,
        left_out: list[dict[str, Any]],
        folder: Path,
        distance: Callable[[Path], heldout.Distance],
    ) -> dict[str, Any]:
        """Make `folder` the cut model in `given`, fitted to the original; how close it is."""
        original = self._opened(run, run.artifacts["dense"])
        gone = {removal["block"] for removal in left_out}
        kept = [block for block in range(len(original)) if block not in gone]
        text = self._windows(run, self.fit, run.config.seed)
        dtype = storage_dtype(original.config, run.config.model.dtype)
        tensors = refitted(original, self._opened(run, given), kept, text, dtype)
        checkpoint.rewrite(given, _emptied(folder), tensors, describe(given))
        found = distance(folder)
        logger.info(f"  fitted: held-out KL {found.kl:.4f}, perplexity {found.ppl:.2f}")
        return {"tokens": text.tokens, "tensors": len(tensors), **found.asdict()}

    def _opened(self, run: Run, folder: Path) -> BlockModel:
        return BlockModel(
            folder,
            device=run.config.device,
            dtype=getattr(torch, self.precision),
            trust_remote_code=run.config.model.trust_remote_code,
        )

    def _taught(self, run: Run, given: Path, held: Path, out: Path) -> dict[str, Any]:
        """Train the student in `given`; where that makes it better, write it to `out`."""
        made = self._labels(run)
        batch = min(self.batch, len(made))
        history, best = processes.everywhere(learn_all, self, run, given, held, made, batch)
        kept = history.best_step > 0
        if kept:
            checkpoint.rewrite(given, out, best, describe(given))
        weights = linear_weights(given, run.config.model.trust_remote_code)
        return {
            **figures(history, made, batch, weights),
            "trained_parameters": sum(tensor.numel() for tensor in history.best.values()),
            "kept": kept,
            "notes": [] if kept else ["no step improved the student; it stays as it was"],
        }

    def _labels(self, run: Run) -> Labels:
        """The original's labels, which stay beside the stages: other settings read them again."""
        return labels.make(
            Artifact(LABELS, run.stages / LABELS, run.stages, rebuilt=True),
            original(run, self.top_k, getattr(torch, self.precision)),
            self._windows(run, self.samples, run.config.seed + 1),
        )

    def _windows(self, run: Run, count: int, seed: int) -> Windows:
        models = [run.original, *filter(None, [self.student_folder()])]
        return labels.drawn(run, models, count=count, length=self.length, seed=seed)


def _emptied(folder: Path) -> Path:
    """`folder`, there and with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
