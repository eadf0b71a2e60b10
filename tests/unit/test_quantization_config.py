"""The `quantization_config`, held against the compressed-tensors library itself."""

import json
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig, QuantizationStrategy

from compress.errors import UserError
from compress.qtensor import QuantSpec
from compress.quantization_config import (
    group_specs,
    quantization_config,
    read_quantization_config,
)
from tests.unit.test_checkpoint import IGNORE, NAME, every_spec


@every_spec
def test_library_reads_the_configuration(spec: QuantSpec) -> None:
    ours = quantization_config({NAME: spec}, IGNORE)
    config = QuantizationConfig.model_validate(json.loads(json.dumps(ours)))
    group = config.config_groups["group_0"]
    assert config.ignore == IGNORE
    assert (
        config.format
        == group.format
        == ("int" if spec.activation_bits else "pack") + ("-quantized")
    )
    assert group.targets == ["Linear"]
    assert (group.weights.num_bits, group.weights.symmetric) == (spec.bits, True)
    assert group.weights.dynamic is False
    assert group.weights.group_size == spec.group_size
    expected = QuantizationStrategy.GROUP if spec.group_size else QuantizationStrategy.CHANNEL
    assert group.weights.strategy == expected
    if spec.activation_bits:
        assert group.input_activations.strategy == QuantizationStrategy.TOKEN
        assert group.input_activations.dynamic is True
        assert group.input_activations.num_bits == 8
    else:
        assert group.input_activations is None


@every_spec
def test_our_configuration_reads_back(spec: QuantSpec) -> None:
    written = json.loads(json.dumps(quantization_config({NAME: spec}, IGNORE)))
    assert read_quantization_config(written, [*IGNORE, NAME]) == {NAME: spec}


@every_spec
def test_configuration_as_the_library_writes_it_reads_back(spec: QuantSpec) -> None:
    config = QuantizationConfig.model_validate(quantization_config({NAME: spec}, IGNORE))
    theirs = json.loads(config.model_dump_json())
    assert read_quantization_config(theirs, [*IGNORE, NAME]) == {NAME: spec}


def test_mixed_precision_is_a_group_a_spec() -> None:
    w4, w8, w8a8 = QuantSpec(4, group_size=64), QuantSpec(8), QuantSpec(8, activation_bits=8)
    specs = {"b.0.up": w4, "b.0.down": w8, "b.1.up": w4, "b.1.down": w8}
    config = json.loads(json.dumps(quantization_config(specs, IGNORE)))
    assert config["format"] == "pack-quantized"
    groups = config["config_groups"].values()
    assert [g["targets"] for g in groups] == [["b.0.up", "b.1.up"], ["b.0.down", "b.1.down"]]
    assert read_quantization_config(config, [*specs, *IGNORE, "b.2.up"]) == specs
    assert group_specs(config) == [w4, w8]
    specs["b.1.down"] = w8a8
    config = quantization_config(specs, IGNORE)
    assert config["format"] == "mixed-precision"
    library = QuantizationConfig.model_validate(config)
    formats = [group.format for group in library.config_groups.values()]
    assert formats == ["pack-quantized", "pack-quantized", "int-quantized"]
    theirs = json.loads(library.model_dump_json())
    assert read_quantization_config(theirs, [*specs, *IGNORE]) == specs


def test_a_name_goes_before_a_pattern_and_that_before_the_class() -> None:
    config = quantization_config({"b.0.up": QuantSpec(4), "b.0.down": QuantSpec(8)}, [])
    everything, some = config["config_groups"].values()
    everything["targets"], some["targets"] = ["Linear"], ["re:.*down", "b.1.up"]
    found = read_quantization_config(config, ["b.0.up", "b.0.down", "b.1.up"])
    assert found == {"b.0.up": QuantSpec(4), "b.0.down": QuantSpec(8), "b.1.up": QuantSpec(8)}


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "gptq", "bits": 4}, {}, {"quant_method": "compressed-tensors"}],
)
def test_other_layouts_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="wanted compressed-tensors with at least one"):
        read_quantization_config(config, [NAME])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weights", {"type": "float"}, "weights.type=float in group_0; this runtime serves int;"),
        ("weights", {"symmetric": False}, "weights.symmetric=False in group_0; .* serves True;"),
        ("weights", {"num_bits": 3}, "weights.num_bits=3 in group_0; this runtime serves 8 or 4;"),
        ("weights", {"strategy": "tensor"}, "weights.strategy=tensor in .* channel or group;"),
        ("weights", {"actorder": "group"}, "weights.actorder=group in .* None or static or weight"),
        ("weights", {"num_bits": 4}, "W4A8 in group_0; this runtime serves activations of 8"),
        ("input_activations", {"dynamic": False}, "input_activations.dynamic=False in group_0;"),
        ("input_activations", {"strategy": "tensor"}, "input_activations.strategy=tensor in"),
    ],
)
def test_what_no_kernel_of_ours_serves_is_refused_by_name(
    part: str, change: dict[str, Any], message: str
) -> None:
    config = quantization_config({NAME: QuantSpec(8, activation_bits=8)}, IGNORE)
    config["config_groups"]["group_0"][part] |= change
    with pytest.raises(UserError, match=f"quantization_config has {message}") as told:
        read_quantization_config(config, [NAME])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("weights", "spec"),
    [
        ({"num_bits": 4, "group_size": 32}, QuantSpec(4, 32)),
        ({"num_bits": 4, "group_size": -1}, QuantSpec(4)),
        ({"strategy": "channel"}, QuantSpec(8)),
    ],
)
def test_where_a_group_is_silent_it_means_what_the_library_reads(
    weights: dict[str, Any], spec: QuantSpec
) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights}},
    }
    assert read_quantization_config(config, [NAME]) == {NAME: spec}
    theirs = QuantizationConfig.model_validate(config).config_groups["g"].weights
    ours = quantization_config({NAME: spec}, [])["config_groups"]["group_0"]["weights"]
    assert (theirs.num_bits, theirs.strategy) == (ours["num_bits"], ours["strategy"])


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weights": None}, "no weights in g; this runtime serves quantized ones"),
        ({}, "no weights in g; this"),
        (
            {"weights": {"strategy": "group"}},
            "weights.strategy=group in g and no group_size",
        ),
        ({"weights": {"num_bits": 8}}, "weights.strategy=tensor in g; this runtime serves channel"),
        (
            {"weights": {"group_size": -1}, "input_activations": {"strategy": "token"}},
            "input_activations.dynamic=False in g; this runtime serves True",
        ),
    ],
)
def test_silence_that_no_kernel_of_ours_serves_is_refused(
    group: dict[str, Any], message: str
) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], **group}},
    }
    with pytest.raises(UserError, match=f"quantization_config has {message}"):
        read_quantization_config(config, [NAME])
