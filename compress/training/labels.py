"""The teacher's soft labels of many windows on disk, made once.

They depend on the teacher and the text alone, so a distillation with other training settings
reads them again. A folder of Arrow files, one for CHUNK windows, each row one window of T tokens:

    tokens [T] int32, mask [T] int8 (0 where padded), ids [T * k] int32,
    probabilities [T * k] float16, rest [T] float16 (compress.algorithms.soft_labels.top_k)

6 k + 7 bytes a token: 391 at k = 64, so a million tokens take 0.4 GB. Rows are read from the
mapped files as they are asked for.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from compress import processes
from compress.algorithms.soft_labels import teacher_log_probabilities
from compress.artifact import Artifact, write_json
from compress.log import logger, progress
from compress.source import shortest_window
from compress.stage import Run
from compress.text import documents
from compress.text.windows import Windows, draw
from compress.training.endpoint import Endpoint
from compress.training.teacher import Label, Teacher

if TYPE_CHECKING:
    from datasets import Dataset

VERSION = 1
"""Raised whenever the same settings would give other labels: old ones are then made again."""
CHUNK = 16
"""Windows for which the teacher's blocks are read once, and what a killed process loses at most."""
NOTHING = -100  # no token: what torch's losses leave out


@dataclass(frozen=True)
class Batch:
    """Some windows: `ids` and `mask` [B, T] int64; `follows` [B, T], the token after each, and
    NOTHING where there is none; and what the teacher says there: `kept` [B, T, k] int64, its
    likeliest tokens, and `teacher` [B, T, k + 1] float32, the log-probabilities of these and of
    all others as one.
    """

    ids: Tensor
    mask: Tensor
    follows: Tensor
    kept: Tensor
    teacher: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def part(self, positions: slice) -> "Batch":
        """The same windows at some of their positions."""
        return Batch(**{name: tensor[:, positions] for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class Labels:
    """n windows with the teacher's labels. figures: what they cost, for the manifest."""

    rows: "Dataset"
    k: int
    figures: dict[str, Any]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Tensor) -> Batch:
        """The windows numbered `rows` [B]."""
        found = self.rows[rows.tolist()]
        ids, mask = found["tokens"], found["mask"]
        follows = ids.roll(-1, 1).masked_fill(mask.roll(-1, 1) == 0, NOTHING)
        follows[:, -1] = NOTHING
        shape = (len(rows), -1, self.k)
        teacher = teacher_log_probabilities(found["probabilities"].view(shape), found["rest"])
        return Batch(ids, mask, follows, found["ids"].view(shape), teacher)


def drawn(run: Run, models: Iterable[Path], *, count: int, length: int, seed: int) -> Windows:
    """`count` windows of the run's text to learn from, without what is held out, of `length` tokens
    or as many as all of `models` hold.
    """
    trust = run.config.model.trust_remote_code
    longest = shortest_window(models, trust)
    if longest < length:
        logger.info(f"  windows of {longest} tokens instead of {length}, the limit of the models")
    rest, _, _ = documents.split(run.config.data)
    return draw(
        rest,
        AutoTokenizer.from_pretrained(run.original, trust_remote_code=trust),
        count=count,
        length=min(length, longest),
        seed=seed,
        description=run.config.data.source,
    )


def make(place: Artifact, teacher: Teacher | Endpoint, windows: Windows) -> Labels:
    """The teacher's labels of `windows`: those that `place` holds where they are of this teacher
    and these windows, else made there. A killed process goes on after its last CHUNK windows.
    """
    text = hashlib.sha256(windows.ids.numpy().tobytes() + windows.mask.numpy().tobytes())
    key = {
        "version": VERSION,
        **teacher.identity(),
        "windows": list(windows.ids.shape),
        "text": text.hexdigest(),
    }
    done = place.manifest()
    if done is None or done["key"] != key:
        place.begin(key)
        place.finish({"key": key, "figures": _write(place, teacher, windows)})
        done = place.manifest()
        assert done is not None
    else:
        logger.info("  soft labels: those on disk are of this teacher and this text")
    from datasets import Dataset, concatenate_datasets  # a second, which other runs need not wait

    files = sorted(place.folder.glob("*.arrow"))
    rows = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    figures = {**done["figures"], "bytes": sum(file.stat().st_size for file in files)}
    return Labels(rows.with_format("torch"), teacher.kept, figures)


def _write(place: Artifact, teacher: Teacher | Endpoint, windows: Windows) -> dict[str, Any]:
    """Write the parts that are not there; returns what all of them cost."""
    costs = {first: place.work / f"{first:06d}.json" for first in range(0, len(windows.ids), CHUNK)}
    missing = [first for first, cost in costs.items() if not cost.exists()]
    processes.everywhere(_write_parts, place, teacher, windows, missing)
    told = [json.loads(cost.read_text()) for cost in costs.values()]
    return {
        "tokens": windows.tokens,
        "top_k": teacher.kept,
        "mass": sum(cost["mass"] for cost in told) / windows.tokens,
        "seconds": sum(cost["seconds"] for cost in told),
        "flops": teacher.flops(windows.tokens),
    }


def _write_parts(
    place: Artifact, teacher: Teacher | Endpoint, windows: Windows, firsts: list[int]
) -> None:
    """Write the parts that begin with these windows: of several processes each a share of them."""
    own = processes.share(firsts)
    if not own:
        return
    label = teacher.opened()
    for first in progress(own, "soft labels", "chunk", total=len(own)):
        started = time.monotonic()
        rows = slice(first, first + CHUNK)
        file = place.out / f"{first:06d}.arrow"
        mass = _write_part(file, label, windows.ids[rows], windows.mask[rows])
        cost = {"seconds": time.monotonic() - started, "mass": mass}
        write_json(place.work / f"{first:06d}.json", cost)


def _write_part(file: Path, label: Label, ids: Tensor, mask: Tensor) -> float:
    """Write the labels of some windows; returns the kept probability, summed over their tokens."""
    from datasets import Features, Sequence, Value
    from datasets.arrow_writer import ArrowWriter

    tokens, probabilities, rest = label(ids, mask)
    length, k = ids.shape[1], tokens.shape[-1]
    columns = {
        "tokens": (ids.int(), "int32", length),
        "mask": (mask.to(torch.int8), "int8", length),
        "ids": (tokens.flatten(1), "int32", length * k),
        "probabilities": (probabilities.flatten(1), "float16", length * k),
        "rest": (rest, "float16", length),
    }
    features = Features({n: Sequence(Value(t), size) for n, (_, t, size) in columns.items()})
    aside = file.with_suffix(".tmp")
    with ArrowWriter(path=str(aside), features=features) as writer:
        writer.write_batch({name: values.numpy() for name, (values, _, _) in columns.items()})
        writer.finalize()
    aside.rename(file)
    return float(probabilities.float().sum(-1)[mask.bool()].sum())
