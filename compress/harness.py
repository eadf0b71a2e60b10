"""Published tasks through lm-evaluation-harness, with our own runtime as its model.

    python -m compress.harness folder=runs/…/checkpoint tasks=hellaswag,arc_easy [limit=N]
        [batch_size=8] [device=cpu] [out=FILE]

Task names, prompts and metrics are the harness's, so that figures compare with published ones. Its
data come from the hub unless they are in the cache. `out` takes its whole result, items included.
Needs `pip install 'compress-llm[harness]'`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from transformers import AutoTokenizer

from compress import options
from compress.artifact import write_text
from compress.errors import UserError
from compress.runtime.loader import load


@dataclass(kw_only=True)
class Settings:
    """folder: a model, dense or quantized. tasks: names of the harness, a comma between them.

    limit: items a task; null: all. out: a file for the whole result.
    """

    folder: str = MISSING
    tasks: str = MISSING
    limit: int | None = None
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
) -> dict[str, Any]:
    """The harness's own result for the model in `folder`: `results` by task, and `samples`.

    tasks: names, or whole task configurations of the harness. Raises UserError where the harness is
    not installed, or knows no task of a name.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(
            f"lm-evaluation-harness is not installed ({error}); pip install 'compress-llm[harness]'"
        ) from error
    model = HFLM(
        pretrained=load(folder, device=device),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        backend="causal",
        batch_size=batch_size,
        softmax_dtype=torch.float32,  # in bfloat16 a likelihood has 3 digits
    )
    try:
        found = simple_evaluate(model, tasks=list(tasks), limit=limit, bootstrap_iters=1000)
    except (KeyError, ConnectionError, FileNotFoundError) as error:
        names = ", ".join(str(task) for task in tasks)
        raise UserError(
            f"tasks={names}: the harness has no such task, or its data are not here: {error}"
        ) from error
    return dict(found or {})


def main(words: list[str]) -> None:
    """Evaluate, and print each task's figures as JSON."""
    settings = options.parsed(Settings, words)
    found = evaluate(
        Path(settings.folder).expanduser(),
        [name.strip() for name in settings.tasks.split(",")],
        limit=settings.limit,
        batch_size=settings.batch_size,
        device=settings.device,
    )
    if settings.out:
        write_text(Path(settings.out), json.dumps(found, default=str, ensure_ascii=False))
    sys.stdout.write(json.dumps(found["results"], indent=2, default=str) + "\n")


if __name__ == "__main__":
    options.run(main, __doc__ or "")
