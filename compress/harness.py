"""Published tasks through lm-evaluation-harness, with our own runtime as its model.

    python -m compress.harness folder=runs/…/checkpoint tasks=hellaswag,arc_easy [original=FOLDER]
        [limit=N] [shots=N] [chat=true] [batch_size=8] [device=cpu] [out=FILE]

Task names, prompts and metrics are the harness's, so that figures compare with published ones. Its
data come from the hub unless they are in the cache. With `original` both models answer the same
items, and each figure has its paired difference. `out` takes the whole result, items included.
Needs `pip install 'compress-llm[harness]'`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import MISSING

from compress import options
from compress.artifact import write_text
from compress.errors import UserError
from compress.eval import statistics
from compress.model_path import home


@dataclass(kw_only=True)
class Settings:
    """folder: a model, dense or quantized. tasks: names of the harness, a comma between them.

    original: the model that it is to be set beside. limit: items a task; null: all. shots: examples
    before a question; null: as many as the task has by itself. chat: put prompts through the
    tokenizer's chat template, as is usual for tasks that ask an instructed model to write. out: a
    file for the whole result.
    """

    folder: str = MISSING
    tasks: str = MISSING
    original: str | None = None
    limit: int | None = None
    shots: int | None = None
    chat: bool = False
    batch_size: int = 8
    device: str = "cpu"
    out: str | None = None


def evaluate(
    folder: Path,
    tasks: Sequence[str | dict[str, Any]],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
    shots: int | None = None,
    chat: bool = False,
) -> dict[str, Any]:
    """The harness's own result for the model in `folder`: `results` by task, and `samples`.

    tasks: names, or whole task configurations of the harness. shots, chat: as in Settings. Raises
    UserError where the harness is not installed, or knows no task of a name.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(
            f"lm-evaluation-harness is not installed ({error}); pip install 'compress-llm[harness]'"
        ) from error
    # Not above: these take seconds, and what is wrong until here none.
    import torch
    from transformers import AutoTokenizer

    from compress.runtime.loader import load

    model = HFLM(
        pretrained=load(folder, device=device),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        backend="causal",
        batch_size=batch_size,
        softmax_dtype=torch.float32,  # in bfloat16 a likelihood has 3 digits
    )
    try:
        found = simple_evaluate(
            model,
            tasks=list(tasks),
            limit=limit,
            num_fewshot=shots,
            apply_chat_template=chat,
            bootstrap_iters=1000,
        )
    except (KeyError, ConnectionError, FileNotFoundError) as error:
        names = ", ".join(str(task) for task in tasks)
        raise UserError(
            f"tasks={names}: the harness has no such task, or its data are not here: {error}"
        ) from error
    return dict(found or {})


def paired(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two results of `evaluate` for the same tasks, item by item: a record for each task and metric
    that gives every item a number, as those of our own tasks (compress.eval.answers.compare).

    Scores are in percent, as the harness has them from 0 to 1.
    """
    records = []
    for task, old in before["samples"].items():
        new = _by_item(after["samples"][task])
        pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for (item, metric, filtered), value in _by_item(old).items():
            pairs.setdefault((metric, filtered), []).append((value, new[item, metric, filtered]))
        for (metric, filtered), values in pairs.items():
            name = metric if filtered == "none" else f"{metric}, {filtered}"
            records.append({"name": task, "metric": name, **_compared(np.array(values))})
    return records


def _by_item(samples: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str, str], float]:
    """Numbers by item, metric and filter of the answer. Perplexities come in pairs, and are no
    figure of an item.
    """
    return {
        (sample["doc_id"], metric, sample.get("filter", "none")): float(sample[metric])
        for sample in samples
        for metric in sample["metrics"]
        if isinstance(sample[metric], bool | int | float)
    }


def _compared(values: NDArray[np.float64]) -> dict[str, Any]:
    """The record of pairs [n, 2], before and after, each from 0 to 1."""

    def percent(summed: NDArray[np.float64]) -> float:
        return 100 * float(summed[0] / summed[1])

    old, new = (np.stack([side, np.ones(len(side))], 1) for side in values.T)
    gained, lost = statistics.flips(values[:, 0], values[:, 1])
    low, high = statistics.score_interval(old, new, percent, seed=0)
    before, after = percent(old.sum(0)), percent(new.sum(0))
    right_or_wrong = bool(np.isin(values, (0, 1)).all())
    loss = (
        statistics.smallest_loss(len(values), gained, int(values[:, 0].sum()))
        if right_or_wrong
        else statistics.smallest_reach(len(values), before, high - (after - before))
    )
    return {
        "n": len(values),
        "before": before,
        "after": after,
        "ci95": [low, high],
        "gained": gained,
        "lost": lost,
        "p": statistics.mcnemar(gained, lost),
        "smallest_loss": loss,
    }


def _file(out: str) -> Path:
    """The file `out`, its folder made. Raises UserError where it cannot be written."""
    file = home(out)
    if file.is_dir():
        raise UserError(f"out={out}: a folder; wanted a file in it")
    options.folder(file.parent)
    return file


def main(words: list[str]) -> None:
    """Evaluate, and print each task's figures as JSON."""
    settings = options.parsed(Settings, words)
    out = _file(settings.out) if settings.out else None  # before what takes long
    folders = {"after": settings.folder, "before": settings.original}
    results = {
        when: evaluate(
            home(folder),
            [name.strip() for name in settings.tasks.split(",")],
            limit=settings.limit,
            batch_size=settings.batch_size,
            device=settings.device,
            shots=settings.shots,
            chat=settings.chat,
        )
        for when, folder in folders.items()
        if folder is not None
    }
    whole, shown = results["after"], results["after"]["results"]
    if settings.original is not None:
        shown = paired(results["before"], results["after"])
        whole = {**results, "paired": shown}
    if out is not None:
        write_text(out, json.dumps(whole, default=str, ensure_ascii=False))
    sys.stdout.write(json.dumps(shown, indent=2, default=str) + "\n")


if __name__ == "__main__":
    options.run(main, __doc__ or "")
