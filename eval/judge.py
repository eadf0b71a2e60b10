"""Both models judged, one in memory at a time; what is known of them is kept on disk at once."""

import gc
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress import source
from compress.artifact import write_json
from compress.eval import diagnosis, fidelity, fingerprint, layers, sheet, statistics
from compress.eval.answers import Answer, ask, compare, fitting
from compress.eval.fidelity import Disagreement, Fidelity, Reference
from compress.eval.items import Item, items, records
from compress.eval.layers import Blocks
from compress.eval.tasks import Task
from compress.log import logger
from compress.machine import hardware, packages
from compress.report.tasks import unasked as said
from compress.runtime.loader import load

SHOWN = 24  # tokens of the text before a disagreement

Questions = list[tuple[Task, list[Item]]]
Job = tuple[str, Callable[[PreTrainedModel], Any]]


@dataclass(frozen=True)
class Unasked:
    """A task of whose items, `of` as they were counted, only `fit` fit a context of this many
    tokens, prompt and answer together.
    """

    name: str
    fit: int
    of: int
    context: int


def questions(
    tasks: list[Task], limit: int | None, tokenizer: PreTrainedTokenizerBase, context: int
) -> tuple[Questions, list[Unasked]]:
    """The tasks, each with its first `limit` items, less those that need a longer context; and the
    tasks that these were taken from, which are not asked at all where none fits.
    """
    found, unasked = [], []
    for task in tasks:
        task = replace(task, window=min(task.window, context))
        # A longer text is not even made: it can be longer than memory.
        lengths = tuple(length for length in task.lengths if length <= context)
        every = items(replace(task, lengths=lengths), limit, tokenizer)
        of = len(every)
        if len(lengths) < len(task.lengths):
            of = len(records(task)[:limit]) * len(task.lengths) * len(task.depths)
        fit = fitting(task, every, tokenizer, context)
        if len(fit) < of:
            unasked.append(Unasked(task.name, len(fit), of, context))
            logger.info(f"  {said(asdict(unasked[-1]))}")
        if fit:
            found.append((task, fit))
    return found, unasked


@dataclass(frozen=True)
class Judge:
    """What both models are measured on, and where results are kept.

    tokenizer: the original's. windows [n, T]: held-out text. asked: tasks with their items.
    work: a folder for results, each written as soon as it is known, so that a killed run goes on.
    originals: a folder where what the original answered is kept for other runs; None: in `work`.
    kv_cache: how the compressed model keeps keys and values; the original keeps them in 16 bit.
    trust_remote_code: run the models' own Python. rope: the `rope_parameters` that the compressed
    model should have, where they are not the original's. same_blocks: whether its blocks stand for
    the original's one by one, so that each can be judged beside its own.
    """

    tokenizer: PreTrainedTokenizerBase
    windows: Tensor
    asked: Questions
    batch_size: int
    device: str
    work: Path
    originals: Path | None = None
    kv_cache: str = "16"
    trust_remote_code: bool = False
    rope: Mapping[str, Any] | None = None
    same_blocks: bool = True

    def judge(
        self, dense: Path, checkpoint: Path, *, seed: int
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Scores, and every item's outputs side by side, of the models in these folders.

        The original is loaded twice, in float32 as the reference for KL and then as it is served,
        which gives its answers and what the arithmetic alone costs; last the compressed one.
        """
        reference, states = self._reference(dense)
        kept, known = self._original_folder(dense), (reference, states)
        if self.originals is not None:
            logger.info(f"  what the original answers is kept in {kept}")
        before = self._results(kept, "original", dense, known, "16")
        after = self._results(self._folder, "compressed", checkpoint, known, self.kv_cache)
        rows, outputs, drifts = [], [], []
        for task, its in self.asked:
            old, new = ([Answer(**a) for a in found[task.name]] for found in (before, after))
            rows += compare(task, its, old, new, seed=seed)
            outputs += sheet.side_by_side(task, its, old, new)
            drifts += sheet.drift(task, old, new)
        close, floor = (_restored(found["fidelity"]) for found in (after, before))
        blocks, served = (
            Blocks(**found["blocks"]) if self.same_blocks else None for found in (after, before)
        )
        trust = self.trust_remote_code
        prints = [fingerprint.fingerprint(f, trust_remote_code=trust) for f in (dense, checkpoint)]
        scores = {
            "fidelity": {
                **_fidelity(close, floor, seed),
                "worst": [self._told(place) for place in close.worst],
            },
            "blocks": _beside(blocks, served),
            "faults": diagnosis.faults(self._as_it_should_be(prints[0]), prints[1], blocks, served),
            "tasks": rows,
            "drift": drifts,
        }
        return scores, outputs

    def _as_it_should_be(self, original: fingerprint.Fingerprint) -> fingerprint.Fingerprint:
        return original if self.rope is None else replace(original, rope=self.rope, window=0)

    def _told(self, place: Disagreement) -> dict[str, Any]:
        """A disagreement in words: the text before it, what follows, and what each expected."""
        ids, here = self.windows[place.window], place.position + 1
        read = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
        return {
            "kl": place.kl,
            "window": place.window,
            "position": place.position,
            "text": read(ids[max(0, here - SHOWN) : here]),
            "follows": read(ids[here : here + 1]),
            "before": [{"token": read([token]), "p": p} for token, p in place.before],
            "after": [{"token": read([token]), "p": p} for token, p in place.after],
        }

    @property
    def _folder(self) -> Path:
        """Where this run's results are kept: its name differs where they would."""
        return self._named(self.work, self.kv_cache)

    def _original_folder(self, dense: Path) -> Path:
        """Where the original's are: with this run's, or named by all that they depend on."""
        if self.originals is None:
            return self._folder
        return self._named(self.originals, [source.fingerprint(dense), hardware(), packages()])

    def _named(self, parent: Path, more: Any) -> Path:
        asked = [(asdict(task), [asdict(item) for item in its]) for task, its in self.asked]
        settings = [asked, self.batch_size, self.device, more]
        digest = hashlib.sha256(json.dumps(settings, default=str).encode())
        digest.update(self.windows.numpy().tobytes())
        folder = parent / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _reference(self, dense: Path) -> tuple[Reference, Tensor]:
        """The original's predictions on the windows, and what its blocks read, in float32."""
        file = self._original_folder(dense) / "reference.safetensors"
        if not file.exists():
            model = load(
                dense,
                device="cpu",
                dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
            )
            if self.device == "cuda" and _fits(model):
                model.to(self.device)
            reference = fidelity.remember(model, self.windows)
            states = layers.trace(model, self.windows[0])
            aside = file.with_suffix(f".{os.getpid()}")  # other runs may be at it too
            save_file({**vars(reference), "states": states}, aside)
            aside.rename(file)
            del model
            gc.collect()
        found = load_file(file)
        states = found.pop("states")
        return Reference(**found), states

    def _results(
        self,
        kept: Path,
        who: str,
        model_folder: Path,
        original: tuple[Reference, Tensor],
        kv_cache: str,
    ) -> dict[str, Any]:
        """Fidelity and the answers to every task, from `kept` or of the model, which is loaded if
        one is missing.
        """
        jobs: list[Job] = [
            ("fidelity", partial(self._closeness, original[0], kv_cache)),
            *([("blocks", partial(self._blocks, *original))] if self.same_blocks else []),
            *((task.name, partial(self._answers, task, its, kv_cache)) for task, its in self.asked),
        ]
        files = {name: kept / f"{who}.{name}.json" for name, _ in jobs}
        missing = [(name, job) for name, job in jobs if not files[name].exists()]
        if missing:
            model = load(
                model_folder,
                device=self.device,
                dtype=None,
                trust_remote_code=self.trust_remote_code,
            )
            for name, job in missing:
                logger.info(f"  {who}: {name}")
                write_json(files[name], job(model))
            del model
            gc.collect()
        return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}

    def _closeness(
        self, reference: Reference, kv_cache: str, model: PreTrainedModel
    ) -> dict[str, Any]:
        return asdict(fidelity.compare_to(reference, model, self.windows, kv_cache))

    def _blocks(
        self, reference: Reference, states: Tensor, model: PreTrainedModel
    ) -> dict[str, Any]:
        return asdict(layers.beside(reference, states, model, self.windows[0]))

    def _answers(
        self, task: Task, its: list[Item], kv_cache: str, model: PreTrainedModel
    ) -> list[dict[str, Any]]:
        answers = ask(
            model, self.tokenizer, task, its, batch_size=self.batch_size, kv_cache=kv_cache
        )
        return [asdict(answer) for answer in answers]


def _fits(model: PreTrainedModel) -> bool:
    """Whether a float32 model on the CPU fits the GPU, with a fifth of its memory to spare."""
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    free, _ = torch.cuda.mem_get_info()
    if needed > 0.8 * free:
        logger.info(
            f"  the original in float32 takes {needed / 1e9:.1f} GB, the GPU has {free / 1e9:.1f} "
            "GB free: it runs on the CPU"
        )
    return needed <= 0.8 * free


def _restored(found: dict[str, Any]) -> Fidelity:
    """Fidelity as it was written to JSON."""
    return Fidelity(**{**found, "worst": [Disagreement(**place) for place in found["worst"]]})


def _beside(blocks: Blocks | None, served: Blocks | None) -> dict[str, Any] | None:
    if blocks is None or served is None:
        return None
    return {**asdict(blocks), "error_floor": served.error}


def _fidelity(close: Fidelity, floor: Fidelity, seed: int) -> dict[str, Any]:
    before, after = close.perplexity
    by_window = torch.tensor(close.kl, dtype=torch.float64).numpy()
    return {
        "kl": close.mean_kl,
        "kl_ci95": list(statistics.mean_interval(by_window, seed=seed)),
        "kl_floor": floor.mean_kl,
        "top1": close.mean_top1,
        "top1_floor": floor.mean_top1,
        "ppl": {"before": before, "after": after},
        "by_window": {name: value for name, value in asdict(close).items() if name != "worst"},
    }
