"""The engine's check of a whole run, from the model's configuration alone: no weight is read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from compress import engines
from compress.blocks.structure import head_names
from compress.model import linear_shapes, skeleton, storage_dtype

if TYPE_CHECKING:
    from compress.config import Config


def preflight(
    model: PretrainedConfig, config: "Config", guarded: Mapping[str, str] | None = None
) -> engines.Preflight:
    """What of `model` can be quantized as `config` asks, see `engines.preflight`.

    guarded: linears left in 16 bit for what their weights hold, with the reason. Raises UserError
    for what the engine cannot serve.
    """
    trust = config.model.trust_remote_code
    return engines.preflight(
        linear_shapes(model, trust),
        config.quantize.spec,
        config.engine,
        config.quantize.keep,
        head_names(skeleton(model, torch.bfloat16, trust)),
        dtype=storage_dtype(model, config.model.dtype),
        guarded=guarded,
    )
