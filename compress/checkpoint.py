"""The deployable folder, in the layout of compressed-tensors.

transformers, vLLM and SGLang read it as it is:
https://github.com/vllm-project/compressed-tensors. Its `config.json` says which linears are
quantized and how (quantization_config.py); a quantized linear `name` holds, in safetensors,

    W8A8           name.weight int8 [N, K], name.weight_scale [N, 1]
    W8A16, W4A16   name.weight_packed int32 [N, ceil(K * bits / 32)], name.weight_scale [N, G],
                   name.weight_shape int64 [2]
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact import write_json
from compress.log import logger
from compress.qtensor import QTensor, QuantSpec, pack_int32, unpack_int32
from compress.tensors import INDEX, SINGLE, TensorFiles, ToWrite, tensor_names, write_stream


def pack(name: str, weight: QTensor) -> dict[str, Tensor]:
    """The tensors by which a checkpoint stores the quantized weight of the linear `name`."""
    if weight.spec.activation_bits is not None:
        return {f"{name}.weight": weight.ints, f"{name}.weight_scale": weight.scales}
    return {
        f"{name}.weight_packed": pack_int32(weight.ints, weight.spec.bits),
        f"{name}.weight_scale": weight.scales,
        f"{name}.weight_shape": torch.tensor(weight.ints.shape, dtype=torch.int64),
    }


def unpack(name: str, tensors: dict[str, Tensor], spec: QuantSpec) -> QTensor:
    """The inverse of `pack`."""
    scales = tensors[f"{name}.weight_scale"]
    if spec.activation_bits is not None:
        return QTensor(tensors[f"{name}.weight"], scales, spec)
    in_features = int(tensors[f"{name}.weight_shape"][1])
    ints = unpack_int32(tensors[f"{name}.weight_packed"], spec.bits, in_features)
    return QTensor(ints, scales, spec)


SHARD_BYTES = 2_000_000_000
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
LEFT_BEHIND = ("config.json", INDEX, "README.md")


def write(
    folder: Path,
    tensors: Mapping[str, ToWrite],
    config: Mapping[str, Any],
    like: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model folder: `tensors` as shards, `config`, and all else (tokenizer, ...) of `like`.

    Memory is that of a part of one tensor. A single shard is called model.safetensors.
    """
    shards = _shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE if len(shards) == 1 else several
        # The widest first, so that each begins at a multiple of its width.
        ordered = sorted(shard, key=lambda name: (-tensors[name].dtype.itemsize, name))
        sizes = {name: (tensors[name].dtype, tensors[name].shape) for name in ordered}
        values = (part for name in ordered for part in tensors[name].values())
        write_stream(folder / file, sizes, values, {"format": "pt"})
        weight_map |= dict.fromkeys(ordered, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    write_json(folder / "config.json", dict(config))
    copy_companions(like, folder)


def _shards(tensors: Mapping[str, ToWrite], shard_bytes: int) -> list[list[str]]:
    """Names in their order, in runs of at most `shard_bytes`, or of one."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def rewrite(
    source: Path, folder: Path, changed: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Write the model of `source` again with some tensors `changed` and another `config`.

    What is changed and in none of its files is left out, with a warning.
    """
    stored = _stored(source)
    if unknown := sorted(changed.keys() - stored.keys()):
        logger.warning(
            f"  {source}: no tensor {unknown[0]}; of what was changed {len(unknown)} of "
            f"{len(changed)} tensors are in none of its files and are left out"
        )
    new = {name: ToWrite.of(changed[name]) for name in stored if name in changed}
    write(folder, stored | new, config, source)


def reshard(source: Path, folder: Path, *, shard_bytes: int) -> None:
    """Make `folder` the model of `source` in files of at most `shard_bytes`: by links where they
    are, else written again.
    """
    if max(file.stat().st_size for file in TensorFiles.files(source)) <= shard_bytes:
        hand_on(source, folder)
        return
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write(folder, _stored(source), config, source, shard_bytes=shard_bytes)


def _stored(folder: Path) -> dict[str, ToWrite]:
    """Every tensor of a model folder, file by file."""
    files = TensorFiles.files(folder)
    return {
        name: ToWrite.stored(file, name) for file in files for name in sorted(tensor_names(file))
    }


def hand_on(source: Path, folder: Path) -> None:
    """Make `folder` the same model as `source`: by links where the disk can, else by copies."""
    for file in sorted(source.iterdir()):
        if file.is_file():
            link_or_copy(file, folder / file.name)


def link_or_copy(file: Path, target: Path) -> None:
    """Put `file` at `target` without taking room twice, where the file system allows it."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, target)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what a model folder holds beside its weights: tokenizer, chat template, generation
    config, licence. The chat template is also put into tokenizer_config.json, since not every
    engine reads chat_template.jinja.
    """
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix not in WEIGHTS and file.name not in LEFT_BEHIND:
            shutil.copyfile(file, folder / file.name)
    template, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if template.exists() and settings.exists():
        tokenizer = json.loads(settings.read_text(encoding="utf-8"))
        if "chat_template" not in tokenizer:
            tokenizer["chat_template"] = template.read_text(encoding="utf-8")
            write_json(settings, tokenizer)
