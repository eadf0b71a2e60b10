"""The `quantization_config` of config.json, as compressed-tensors has it: which linears are
quantized, and how.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from compress.errors import UserError
from compress.qtensor import QuantSpec


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
    if weights["strategy"] == "group" and not weights.get("group_size"):
        raise UserError(
            f"quantization_config has weights.strategy=group in {name} and no group_size; wanted "
            "the input channels of a group"
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
