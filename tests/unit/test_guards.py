"""What float16 cannot hold is found: scaled where a scale helps, kept or refused elsewhere."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compress import guards
from compress.blocks.collector import Collector
from compress.errors import UserError
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.tensors import TensorFiles

PREFIX = "model.layers.1."
Change = Callable[[nn.Module], None]


@pytest.mark.parametrize(
    ("largest", "factor"),
    [
        (0.0, 1.0),
        (3000.0, 1.0),
        (16376.0, 1.0),  # 65504 / 4
        (16377.0, 2.0),
        (65504.0, 4.0),
        (1e6, 64.0),  # 1e6 / 64 = 15625
        (2.0**-14, 1.0),
        (2.0**-15, 2.0**-15),
        (3e-5, 2.0**-16),  # 3e-5 / 2^-16 = 1.97
    ],
)
def test_powers_of_two_bring_activations_into_range(largest: float, factor: float) -> None:
    assert guards.into_range(largest) == factor


@torch.no_grad()
def passed(model: BlockModel, block: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """What block 1 gives for some tokens, and its statistics by names in the block."""
    ids = torch.randint(5, 1000, (2, 16), generator=torch.Generator().manual_seed(0))
    collector = Collector(model.block_linears(1), torch.zeros(2, 2, dtype=torch.int64))
    with collector:
        collector.start(0, torch.ones_like(ids))
        given = block(model.embed(ids), **model.calls(ids)[1])
    found = {key.removeprefix(PREFIX): value for key, value in collector.tensors().items()}
    for name in model.block_linears(1):
        local = name.removeprefix(PREFIX)
        found[f"{local}.input_absmax"] = found[f"{local}.absmax"].max()
    return given, found | {"output_absmax": given.abs().max()}


def times(name: str, factor: float) -> Change:
    return lambda block: block.get_parameter(f"{name}.weight").mul_(factor)


@pytest.mark.parametrize(
    ("source", "target"),
    [("mlp.up_proj", "mlp.down_proj"), ("self_attn.v_proj", "self_attn.o_proj")],
)
@pytest.mark.parametrize("factor", [2.0**20, 2.0**-24])
@torch.no_grad()
def test_what_leaves_the_range_is_scaled_and_the_block_stays(
    tiny_model: Path, source: str, target: str, factor: float
) -> None:
    model = BlockModel(tiny_model)
    with model.block(1) as block:
        times(source, factor)(block)
        times(target, 1 / factor)(block)
        before, found = passed(model, block)
        sizes = found[f"{source}.output_absmax"].max(), found[f"{target}.input_absmax"]
        rows, mean_abs = found[f"{target}.rows"], found[f"{target}.mean_abs"]
        (scaling,) = guards.scalings(model.config, block, found)
        assert scaling.feed.source == source
        assert scaling.largest == pytest.approx(float(max(sizes)))
        guards.scale_into_range(model.config, block, found)
        after, again = passed(model, block)
        assert torch.equal(found[f"{target}.rows"], rows / scaling.factor)
        assert torch.equal(found[f"{target}.mean_abs"], mean_abs / scaling.factor)
        assert guards.scalings(model.config, block, again) == []
    assert torch.equal(after, before)  # in float32 powers of two lose nothing
    largest = max(again[f"{source}.output_absmax"].max(), again[f"{target}.input_absmax"])
    if factor > 1:
        assert guards.LARGEST / guards.HEADROOM / 2 < largest <= guards.LARGEST / guards.HEADROOM
    else:
        assert 1 <= largest < 2


@torch.no_grad()
def test_stored_in_float16_weights_lose_bits_where_they_fall_below_its_normal_range(
    tiny_model: Path,
) -> None:
    model = BlockModel(tiny_model)
    with model.block(1) as block:
        times("mlp.gate_proj", 2.0**12)(block)
        times("mlp.up_proj", 2.0**5)(block)
        times("mlp.down_proj", 2.0**-8)(block)
        for parameter in block.parameters():
            parameter.copy_(parameter.half())  # a model that is stored in float16
        before, found = passed(model, block)
        guards.scale_into_range(model.config, block, found)
        up = block.get_parameter("mlp.up_proj.weight").clone()
        for parameter in block.parameters():
            parameter.copy_(parameter.half())
        lost = (block.get_parameter("mlp.up_proj.weight") - up).abs()
        after, _ = passed(model, block)
    below = up.abs() < guards.SMALLEST
    assert below.any()
    assert not lost[~below].any()
    assert 0 < lost.max() <= 2.0**-25  # half a step of float16's subnormal numbers
    assert 0 < (after - before).norm() < 1e-5 * before.norm()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"mlp.gate_proj": 2.0**17}, r"model\.layers\.1\.mlp\.gate_proj: its output reaches"),
        ({"self_attn.q_proj": 2.0**17}, r"model\.layers\.1\.self_attn\.q_proj: its output"),
        ({"mlp.down_proj": 2.0**17}, r"model\.layers\.1.*: its output reaches .*model\.dtype=bf"),
        ({"mlp.up_proj": 2.0**20, "mlp.down_proj": 2.0**-20}, None),
        ({}, None),
    ],
)
@torch.no_grad()
def test_overflow_that_no_scale_helps_is_refused(
    tiny_model: Path, changed: dict[str, float], told: str | None
) -> None:
    model = BlockModel(tiny_model)
    with model.block(1) as block:
        for name, factor in changed.items():
            times(name, factor)(block)
        _, found = passed(model, block)
        if told is None:
            guards.refuse_overflow(model.config, "model.layers.1", block, found)
            return
        with pytest.raises(UserError, match=told):
            guards.refuse_overflow(model.config, "model.layers.1", block, found)


@torch.no_grad()
def test_an_input_that_no_linear_before_it_scales_is_refused(tiny_model: Path) -> None:
    model = BlockModel(tiny_model)
    config = copy.deepcopy(model.config)
    config.model_type = "unknown"  # of which no feed is known
    with model.block(1) as block:
        times("mlp.up_proj", 2.0**12)(block)
        times("mlp.down_proj", 2.0**-12)(block)
        _, found = passed(model, block)
        found["mlp.up_proj.output_absmax"] = torch.tensor([300.0])
        found["mlp.down_proj.input_absmax"] = torch.tensor(9e4)
        guards.refuse_overflow(model.config, "model.layers.1", block, found)
        with pytest.raises(UserError, match=r"1\.mlp\.down_proj: its input reaches 9e\+04 on"):
            guards.refuse_overflow(config, "model.layers.1", block, found)


@torch.no_grad()
def test_the_largest_that_is_left_is_none_that_is_scaled(tiny_model: Path, tmp_path: Path) -> None:
    model = BlockModel(tiny_model)
    with model.block(1) as block:
        _, found = passed(model, block)
    for index in range(len(model)):
        prefix = f"{model.block_name(index)}."
        local = {f"{prefix}{key}": value for key, value in found.items()}
        save_file(local, tmp_path / f"block_{index:03d}.safetensors")
    plain = guards.largest_left(model, tmp_path)
    file = tmp_path / "block_001.safetensors"
    local = load_file(file)

    def left(key: str, value: float) -> float:
        changed = local[f"{PREFIX}{key}"].clone().fill_(value)
        save_file(local | {f"{PREFIX}{key}": changed}, file)
        return guards.largest_left(model, tmp_path)

    assert left("mlp.up_proj.output_absmax", 5e4) == plain
    assert left("mlp.down_proj.input_absmax", 5e4) == plain
    assert left("mlp.gate_proj.output_absmax", 5e4) == 5e4
    assert left("mlp.gate_proj.input_absmax", 5e4) == 5e4
    assert left("output_absmax", 5e4) == 5e4


def test_a_residual_that_overflows_is_refused_by_the_block(tiny_model: Path) -> None:
    model = BlockModel(tiny_model)
    with pytest.raises(UserError, match=r"^model\.layers\.1: its output reaches 7e\+04 on the"):
        guards.refuse_overflow(
            model.config, "model.layers.1", model.blocks[1], {"output_absmax": torch.tensor(7e4)}
        )


@pytest.fixture
def shrunk(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with 2 of 128 rows of a down_proj, and the whole of another, made small."""
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 2.0**-12
    tensors["model.layers.1.mlp.down_proj.weight"][:2] *= 2.0**-12
    tensors["model.layers.2.mlp.down_proj.weight"][0] *= 2.0**-12
    tensors["model.layers.3.mlp.down_proj.weight"][:64] = 0
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_linears_whose_scales_float16_cannot_hold_are_named(shrunk: Path) -> None:
    model = BlockModel(shrunk)
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    kept = guards.small_scales(model, names, QuantSpec(8, activation_bits=8))
    # 2 of 128 rows are above the hundredth; 1 is below it, and rows of zeros lose nothing.
    assert list(kept) == names[:2]
    assert kept[names[0]].startswith("its scales are below float16's 6.1e-05; model.dtype=bfloat16")


def test_weights_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    fine = {"a": torch.full((2, 2), 65504.0), "n": torch.tensor([1 << 40]), "b": torch.tensor(1.0)}
    save_file(fine, file)
    guards.refuse_large_weights(TensorFiles(tmp_path))
    save_file(fine | {"norm": torch.tensor([1.0, -7e4], dtype=torch.bfloat16)}, file)
    with pytest.raises(UserError, match=r"norm holds 7\.01e\+04; float16 ends at 65504: model\.dt"):
        guards.refuse_large_weights(TensorFiles(tmp_path))


@pytest.mark.parametrize(
    ("largest", "dtype", "told"),
    [
        (16000.0, torch.float16, None),
        (20000.0, torch.float16, "activations reach 2e+04 of the 65504 that float16 holds"),
        (60000.0, torch.bfloat16, None),
        (7e4, torch.bfloat16, "activations reach 7e+04: float16, which ends at 65504, cannot"),
    ],
)
def test_remarks_come_near_the_end_of_float16(
    largest: float, dtype: torch.dtype, told: str | None
) -> None:
    found = guards.remark(largest, dtype)
    assert found is None if told is None else (found or "").startswith(told)
