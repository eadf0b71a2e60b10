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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Sequence, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from compress import processes, source
from compress.algorithms.soft_labels import teacher_log_probabilities, top_k
from compress.artifact import Artifact, write_json
from compress.data import Windows
from compress.errors import UserError
from compress.log import logger, progress
from compress.model import BlockModel, linear_shapes
from compress.runtime.loader import first_line

VERSION = 1
"""Raised whenever the same settings would give other labels: old ones are then made again."""
CHUNK = 16
"""Windows for which the teacher's blocks are read once, and what a killed process loses at most."""
TOGETHER = 2  # windows that go through a block together
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

    rows: Dataset
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


@dataclass(frozen=True)
class Teacher:
    """The model that labels: its folder, and how it runs.

    vocabulary: tokens, from the first, that are more than padding of its output. k: likeliest
    tokens that are kept. dtype: of its arithmetic; its weights are read one block at a time.
    """

    folder: Path
    vocabulary: int
    k: int
    dtype: torch.dtype
    device: str
    trust_remote_code: bool = False


def make(place: Artifact, teacher: Teacher, windows: Windows) -> Labels:
    """The teacher's labels of `windows`: those that `place` holds where they are of this teacher
    and these windows, else made there. A killed process goes on after its last CHUNK windows.
    """
    key = _key(teacher, windows)
    done = place.manifest()
    if done is None or done["key"] != key:
        place.begin(key)
        place.finish({"key": key, "figures": _write(place, teacher, windows)})
        done = place.manifest()
        assert done is not None
    else:
        logger.info("  soft labels: those on disk are of this teacher and this text")
    files = sorted(place.folder.glob("*.arrow"))
    rows = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    figures = {**done["figures"], "bytes": sum(file.stat().st_size for file in files)}
    return Labels(rows.with_format("torch"), min(teacher.k, teacher.vocabulary), figures)


def _key(teacher: Teacher, windows: Windows) -> dict[str, Any]:
    text = hashlib.sha256(windows.ids.numpy().tobytes() + windows.mask.numpy().tobytes())
    return {
        "version": VERSION,
        "teacher": source.fingerprint(teacher.folder),
        "vocabulary": teacher.vocabulary,
        "top_k": teacher.k,
        "dtype": str(teacher.dtype),
        "windows": list(windows.ids.shape),
        "text": text.hexdigest(),
    }


def _write(place: Artifact, teacher: Teacher, windows: Windows) -> dict[str, Any]:
    """Write the parts that are not there; returns what all of them cost."""
    costs = {first: place.work / f"{first:06d}.json" for first in range(0, len(windows.ids), CHUNK)}
    missing = [first for first, cost in costs.items() if not cost.exists()]
    processes.everywhere(_write_parts, place, teacher, windows, missing)
    told = [json.loads(cost.read_text()) for cost in costs.values()]
    return {
        "tokens": windows.tokens,
        "top_k": min(teacher.k, teacher.vocabulary),
        "mass": sum(cost["mass"] for cost in told) / windows.tokens,
        "seconds": sum(cost["seconds"] for cost in told),
        "flops": 2 * linear_weights(teacher.folder, teacher.trust_remote_code) * windows.tokens,
    }


def _write_parts(place: Artifact, teacher: Teacher, windows: Windows, firsts: list[int]) -> None:
    """Write the parts that begin with these windows: of several processes each a share of them."""
    own = processes.share(firsts)
    if not own:
        return
    model = BlockModel(
        teacher.folder,
        device=teacher.device,
        dtype=teacher.dtype,
        trust_remote_code=teacher.trust_remote_code,
    )
    for first in progress(own, "soft labels", "chunk", total=len(own)):
        started = time.monotonic()
        rows = slice(first, first + CHUNK)
        file = place.out / f"{first:06d}.arrow"
        mass = _write_part(file, model, teacher, windows.ids[rows], windows.mask[rows])
        cost = {"seconds": time.monotonic() - started, "mass": mass}
        write_json(place.work / f"{first:06d}.json", cost)


@torch.no_grad()
def _write_part(
    file: Path, model: BlockModel, teacher: Teacher, ids: Tensor, mask: Tensor
) -> float:
    """Write the labels of some windows; returns the kept probability, summed over their tokens."""
    batches = [
        (i.to(model.device), m.to(model.device))
        for i, m in zip(ids.split(TOGETHER), mask.split(TOGETHER), strict=True)
    ]
    hidden = [model.embed(i, m) for i, m in batches]
    for index in range(len(model)):
        with model.block(index) as block:
            for number, (i, m) in enumerate(batches):
                hidden[number] = block(hidden[number], **model.calls(i, m)[index])
    kept = [
        top_k(model.logits(h[row : row + 1])[..., : teacher.vocabulary], teacher.k)
        for h in hidden
        for row in range(len(h))
    ]
    tokens, probabilities, rest = (torch.cat(parts).cpu() for parts in zip(*kept, strict=True))
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


def linear_weights(folder: Path, trust_remote_code: bool) -> int:
    """Weights that a token is multiplied with: of the linears in the blocks, and of the head."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    inside = sum(n * k for n, k in linear_shapes(config, trust_remote_code).values())
    return inside + text.vocab_size * text.hidden_size


def shared_vocabulary(
    folder: Path, model: Path, trust_remote_code: bool, *, option: str = "distill.teacher"
) -> int:
    """How many token ids two models share: all that their tokenizer knows, without the rows by
    which an output layer is padded. option: by which `folder` was given beside `model`. Raises
    UserError where their tokenizers differ, or that of `folder` cannot be read.
    """
    try:
        one, other = (
            AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code).get_vocab()
            for place in (folder, model)
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{option}={folder}: no tokenizer that loads ({first_line(error)}); copy the "
            "files of the model's own there, if they are the same"
        ) from error
    if one != other:
        tokens = sorted(one.keys() | other.keys(), key=lambda t: one.get(t, len(one)))
        token = next(t for t in tokens if one.get(t) != other.get(t))
        raise UserError(
            f"{option}={folder}: another vocabulary, of {len(one)} tokens where the model "
            f"has {len(other)}; {token!r} is number {one.get(token)} and {other.get(token)}; "
            f"wanted one with the model's own tokenizer, or {option}=null"
        )
    return max(one.values()) + 1
