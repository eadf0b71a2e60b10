"""What a whole run would be refused for, told at its start: no weight is read."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from compress import engines, judged
from compress.blocks.structure import head_names
from compress.kernels.backend import pick_backend
from compress.model import linear_shapes, outside_linears, skeleton, storage_dtype

if TYPE_CHECKING:
    from compress.config import Config


def refuse(
    config: "Config", model: PretrainedConfig, folder: Path | None, ahead: Collection[str]
) -> None:
    """Raise UserError for what the stages `ahead` would refuse when it is their turn.

    model: the original's configuration. folder: where the original is; None where it is still to
    be made, and what needs its tokenizer is left to the stages.
    """
    trust = config.model.trust_remote_code
    if "shrink" in ahead:
        config.shrink.refuse(model, folder, trust)
    if "shrink" in config.stages:
        model = config.shrink.planned(model, trust)
    if "quantize" in ahead:
        preflight(model, config)
    if "distill" in ahead:
        config.distill.refuse(folder, trust)
    if "extend" in ahead:
        config.extend.refuse(model)
    if config.checkpoint is not None:
        judged.refuse(config.checkpoint, model, trust)
    if "serve" in ahead:
        pick_backend(config.device, config.serve.backend)
    if "score" in ahead:
        config.score.heldout(config.data)


def preflight(
    model: PretrainedConfig, config: "Config", guarded: Mapping[str, str] | None = None
) -> engines.Preflight:
    """What of `model` can be quantized as `config` asks, see `engines.choose`.

    guarded: linears left in 16 bit for what their weights hold, with the reason. Raises UserError
    for what the engine cannot serve.
    """
    trust = config.model.trust_remote_code
    empty = skeleton(model, torch.bfloat16, trust)
    outside = dict.fromkeys([*outside_linears(empty), *head_names(empty)])
    return engines.choose(
        linear_shapes(model, trust),
        config.quantize.spec,
        config.engine,
        config.quantize.keep,
        list(outside),
        dtype=storage_dtype(model, config.model.dtype),
        guarded=guarded,
    )
