"""Whether the tensors of a model's folder are what its config.json says, before they are used."""

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.tensors import TensorFiles

CHUNK = 1 << 25
"""Values of a tensor that are in memory at a time: 134 MB in float32."""
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check(tensors: TensorFiles, name: str, empty: Tensor) -> None:
    """Raise UserError where the stored tensor `name` cannot fill `empty`, a parameter or a buffer
    of the model: it is not there, of another shape, no weight in 16 or 32 bit, or not finite.
    """
    folder = tensors.folder
    if name not in tensors:
        raise UserError(f"{folder}: no tensor {name}; the checkpoint is incomplete")
    found = tensors.shape(name)
    if found != tuple(empty.shape):
        raise UserError(
            f"{folder}: {name} has shape {list(found)}, wanted {list(empty.shape)} by config.json"
        )
    for _, part in tensors.chunks(name, CHUNK):
        if isinstance(empty, nn.Parameter) and part.dtype not in WEIGHTS:
            raise UserError(
                f"{folder}: {name} is stored as {str(part.dtype).removeprefix('torch.')}; wanted "
                "the original model in 16 or 32 bit"
            )
        if part.is_floating_point() and not torch.isfinite(torch.stack(part.aminmax())).all():
            raise UserError(
                f"{folder}: {name} holds NaN or Inf; wanted finite weights: "
                "fetch the model again or repair that layer"
            )


def check_tied(tensors: TensorFiles, source: str, name: str) -> None:
    """Raise UserError where the tied weight `name` is stored too, and is not its `source`.

    transformers then keeps the two apart, whatever config.json says.
    """
    if name not in tensors:
        return
    same = tensors.shape(source) == tensors.shape(name) and all(
        torch.equal(one, other)
        for (_, one), (_, other) in zip(
            tensors.chunks(source, CHUNK), tensors.chunks(name, CHUNK), strict=True
        )
    )
    if not same:
        raise UserError(
            f"{tensors.folder}: {name} differs from {source}, but config.json ties them; set "
            "tie_word_embeddings to false there, or leave one out"
        )
