"""The deployable folder, in the layout of compressed-tensors.

transformers, vLLM and SGLang read it as it is:
https://github.com/vllm-project/compressed-tensors. Its `config.json` says which linears are
quantized and how; a quantized linear `name` holds, in safetensors,

    W8A8           name.weight int8 [N, K], name.weight_scale [N, 1]
    W8A16, W4A16   name.weight_packed int32 [N, ceil(K * bits / 32)], name.weight_scale [N, G],
                   name.weight_shape int64 [2]
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.artifact import write_json
from compress.errors import UserError
from compress.log import logger
from compress.qtensor import QTensor, QuantSpec, pack_int32, unpack_int32
from compress.tensors import INDEX, SINGLE, TensorFiles, ToWrite, tensor_names, write_stream


def quantization_config(specs: Mapping[str, QuantSpec], ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    specs: how each quantized linear is, by its full name. Where all are the same, one group holds
    every Linear but those in `ignore`; else there is a group a spec, with the names of its linears.
    `ignore` holds full names of linears too: patterns mean different things to different engines.
    """
    groups = {spec: [name for name in specs if specs[name] == spec] for spec in specs.values()}
    if len(groups) == 1:
        groups = {spec: ["Linear"] for spec in groups}
    layouts = {_layout(spec) for spec in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {
            f"group_{number}": _group(spec, targets)
            for number, (spec, targets) in enumerate(groups.items())
        },
    }


def _layout(spec: QuantSpec) -> str:
    return "pack-quantized" if spec.activation_bits is None else "int-quantized"


def _group(spec: QuantSpec, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": spec.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if spec.group_size else "channel",
        "group_size": spec.group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    activations = {
        "num_bits": spec.activation_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
        "observer": None,
    }
    return {
        "targets": targets,
        "format": _layout(spec),
        "weights": weights,
        "input_activations": None if spec.activation_bits is None else activations,
        "output_activations": None,
    }


def read_quantization_config(
    config: Mapping[str, Any], linears: Iterable[str]
) -> dict[str, QuantSpec]:
    """The inverse of `quantization_config`: of `linears`, full names of a model's, those that are
    quantized, and how. A name decides before a pattern (`re:`), and that before `Linear`.

    Raises UserError for a layout that this runtime does not serve.
    """
    groups, ignore = _groups(config), set(config.get("ignore") or [])
    found = {name: _spec_of(name, groups) for name in linears if name not in ignore}
    return {name: spec for name, spec in found.items() if spec is not None}


def group_specs(config: Mapping[str, Any]) -> list[QuantSpec]:
    """Every spec of a `quantization_config`. Raises UserError as reading it does."""
    return [spec for spec, _ in _groups(config)]


def _groups(config: Mapping[str, Any]) -> list[tuple[QuantSpec, list[str]]]:
    groups = config.get("config_groups") or {}
    if config.get("quant_method") != "compressed-tensors" or not groups:
        raise UserError(
            f"quantization_config is {config.get('quant_method')!r} with {len(groups)} groups; "
            "wanted compressed-tensors with at least one, as this project writes it"
        )
    return [(_served_spec(name, group), group["targets"]) for name, group in groups.items()]


# By name what a group may say of its weights, and of its activations, which may be None.
SERVED: dict[str, dict[str, tuple[Any, ...]]] = {
    "weights": {
        "type": ("int",),
        "symmetric": (True,),
        "num_bits": (8, 4),
        "strategy": ("channel", "group"),
        "actorder": (None, "static", "weight"),
    },
    "input_activations": {
        "type": ("int",),
        "symmetric": (True,),
        "num_bits": (8,),
        "strategy": ("token",),
        "dynamic": (True,),
    },
}


# What compressed-tensors takes for said where a group is silent (its class QuantizationArgs).
SILENT = {"type": "int", "symmetric": True, "num_bits": 8, "dynamic": False, "actorder": None}


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of its weights or activations, and what it means where it is silent."""
    size = given.get("group_size")
    by_size = "tensor" if size is None else "group" if size > 0 else "channel"
    return SILENT | dict(given) | {"strategy": given.get("strategy") or by_size}


def _served_spec(name: str, group: Mapping[str, Any]) -> QuantSpec:
    said = {part: _said(group[part]) for part in SERVED if group.get(part) is not None}
    weights, activations = said.get("weights"), said.get("input_activations")
    if weights is None:
        raise UserError(
            f"quantization_config has no weights in {name}; this runtime serves quantized ones; "
            "transformers and vLLM may load it"
        )
    for part, given in said.items():
        for field, values in SERVED[part].items():
            if given[field] not in values:
                raise UserError(
                    f"quantization_config has {part}.{field}={given[field]} in {name}; this "
                    f"runtime serves {' or '.join(map(str, values))}; transformers and vLLM may "
                    "load it"
                )
    spec = QuantSpec(
        bits=weights["num_bits"],
        group_size=weights["group_size"] if weights["strategy"] == "group" else None,
        activation_bits=activations["num_bits"] if activations else None,
    )
    if activations and (spec.bits, spec.group_size) != (8, None):
        raise UserError(
            f"quantization_config has {spec.scheme} in {name}; this runtime serves activations of "
            "8 bit with weights of 8 bit per channel; transformers and vLLM may load it"
        )
    return spec


def _spec_of(name: str, groups: list[tuple[QuantSpec, list[str]]]) -> QuantSpec | None:
    kinds: tuple[Callable[[str], Any], ...] = (
        lambda target: target == name,
        lambda target: target.startswith("re:") and re.match(target.removeprefix("re:"), name),
        lambda target: target == "Linear",
    )
    for fits in kinds:
        for spec, targets in groups:
            if any(fits(target) for target in targets):
                return spec
    return None


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
