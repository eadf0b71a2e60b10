"""A model folder with a longer window: config and tokenizer changed, the weights as they are."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from compress import checkpoint
from compress.algorithms import rope
from compress.artifact import write_json
from compress.errors import UserError
from compress.log import logger
from compress.source import describe, head_dim
from compress.training.long_window import arithmetic, losses

STRETCHES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Times the factor by which a search slows the frequencies."""


def rope_of(parsed: PretrainedConfig) -> dict[str, Any]:
    """Its `rope_parameters`; empty where it has none."""
    return dict(getattr(parsed, "rope_parameters", None) or {})


def window_of(parsed: PretrainedConfig) -> int:
    """The window that a model has now, in tokens."""
    return rope.whole_window(rope_of(parsed), parsed.max_position_embeddings)


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
    parameters, window = rope_of(parsed), window_of(parsed)
    folder.mkdir(exist_ok=True)
    checkpoint.hand_on(source, folder)
    changed = {
        **describe(source),
        "rope_parameters": rope.scaled(
            method, parameters, factor, head_dim(parsed), window, stretch
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
    if (settings.get("model_max_length") or window) < window:
        write_json(file, {**settings, "model_max_length": window})


def check_frequencies(model: PreTrainedModel) -> None:
    """Raise UserError where a model does not turn by the frequencies that its config stands for."""
    config = model.config
    wanted, _ = rope.frequencies(rope_of(config), head_dim(config), window_of(config))
    built = [b for name, b in model.named_buffers() if name.rpartition(".")[2] == "inv_freq"]
    if not built or not all(
        b.shape == wanted.shape and torch.allclose(b.cpu().double(), wanted, rtol=1e-4)
        for b in built
    ):
        raise UserError(
            f"extend: a {model.config.model_type} does not take its frequencies from "
            "rope_parameters as others do; use extend.factor=1"
        )


@torch.no_grad()
def search(
    stretched: Callable[[float], PreTrainedModel],
    factor: float,
    ids: Tensor,
    precision: torch.dtype = torch.float32,
) -> dict[str, float]:
    """The perplexity of windows `ids` [n, T] by each of STRETCHES that still slows.

    stretched: makes the model whose frequencies are slowed by so many times `factor`.
    """
    found = {}
    for stretch in STRETCHES:
        if factor * stretch < 1:
            continue
        model = stretched(stretch)
        with arithmetic(model, precision):
            loss = torch.cat([losses(model, row.to(model.device)) for row in ids.split(1)]).mean()
        found[str(stretch)] = float(loss.exp())
        logger.info(f"  slowed by {factor * stretch:g}: perplexity {found[str(stretch)]:.2f}")
    return found


def best(searched: Mapping[str, float]) -> float:
    """The stretch with the lowest perplexity, 1 where none was tried."""
    return float(min(searched, key=lambda name: searched[name])) if searched else 1.0
