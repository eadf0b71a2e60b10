"""Which formats a linear may have, and what room a budget leaves."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress import engines
from compress.budget import choices
from compress.errors import UserError
from compress.qtensor import QuantSpec, parse_scheme

W4G128, W4G32, W8 = QuantSpec(4, 128), QuantSpec(4, 32), QuantSpec(8)
W8A8 = QuantSpec(8, activation_bits=8)


def linears(blocks: int, hidden: int = 256, wide: int = 640) -> dict[str, tuple[int, int]]:
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    return {f"model.layers.{b}.{n}": shape for b in range(blocks) for n, shape in shapes.items()}


def names(groups: list[choices.Group]) -> list[str]:
    return [group.name.removeprefix("model.layers.0.") for group in groups]


def test_groups_are_what_engines_join_and_q_and_k_are_in_none() -> None:
    offer = choices.offered(linears(1), [W4G128, W4G32], "any", [], ["lm_head"])
    assert names(offer.groups) == ["self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj"]
    assert [name.rpartition(".")[2] for name in offer.reasons] == ["q_proj", "k_proj", "v_proj"]
    assert offer.notes[0] == "16 bit: 2 × q_proj and k_proj (query and key, on which RoPE acts)"
    groups = choices.offered(linears(1), [W8A8], "native", [], ["lm_head"]).groups
    assert names(groups)[0] == "self_attn.v_proj"
    assert list(groups[0].sizes) == [W8A8, None]


def test_bytes_are_those_of_integers_and_scales() -> None:
    groups = choices.offered(linears(1), [W4G128, W4G32, W8], "any", [], ["lm_head"]).groups
    gate_up = groups[1]
    assert gate_up.weights == 2 * 640 * 256
    bits = {spec: 8 * size / gate_up.weights for spec, size in gate_up.sizes.items()}
    assert bits == {W4G128: 4.125, W4G32: 4.5, W8: 8 + 16 / 256, None: 16}


def test_a_group_size_is_fitted_to_each_linear_and_one_that_cannot_be_is_not_offered() -> None:
    both = [W4G128, W4G32]
    groups = choices.offered(linears(1, 192, 224), both, "native", [], ["lm_head"]).groups
    of = {group.name.rpartition(".")[2]: list(group.sizes) for group in groups}
    assert of["o_proj"] == [QuantSpec(4, 64), W4G32, None]  # K = 192
    assert of["down_proj"] == [W4G32, None]  # K = 224
    offer = choices.offered(linears(1, 192, 176), [W4G32, W8], "native", [], ["lm_head"])
    of = {group.name.rpartition(".")[2]: list(group.sizes) for group in offer.groups}
    assert of["down_proj"] == [W8, None]  # K = 176
    assert offer.notes[-1] == (
        "W4A16 g32 is not offered: 1 × down_proj (no group size up to 32 divides its 176)"
    )


@pytest.mark.parametrize(("group", "engine"), [(0, "native"), (7, "any"), (48, "vllm")])
def test_groups_that_no_kernel_serves_are_refused_with_a_reason(group: int, engine: str) -> None:
    with pytest.raises(UserError, match=rf"no group size up to {group} divides its 256"):
        choices.offered(linears(1), [QuantSpec(4, group)], engine, [], ["lm_head"])


def test_a_scheme_that_no_engine_has_is_not_offered() -> None:
    with pytest.raises(UserError, match="group size is 64 for W8A8"):
        choices.offered(linears(1), [QuantSpec(8, 64, 8)], "any", [], ["lm_head"])


def test_what_the_engine_says_of_a_format_is_said_once() -> None:
    offer = choices.offered(linears(1), [W4G32, W8, QuantSpec(8, 32)], "vllm", [], ["lm_head"])
    assert offer.notes[:1] == list(engines.remarks(W8, "vllm", torch.bfloat16))
    assert sum("CUDA only" in note for note in offer.notes) == 1


def test_what_float16_cannot_hold_is_lost_to_that_format_alone() -> None:
    offer = choices.offered(linears(1), [W4G32, W8], "any", [], ["lm_head"])
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    left = offer.without({W4G32: {up: "small", down: "small"}, W8: {down: "small"}})
    assert [list(group.sizes) for group in left.groups] == [[W4G32, W8, None], [W8, None]]
    assert left.reasons[down] == "small"
    assert up not in left.reasons
    assert left.notes[-1] == "W4A16 g32 is not offered: 2 × gate_proj and up_proj (small)"
    every = {name: "small" for group in offer.groups for name in group.names}
    with pytest.raises(UserError, match=r"no linear has a choice of formats: .*\(small\)"):
        offer.without({W4G32: every, W8: every})


def test_what_an_engine_has_no_kernel_for_is_not_offered() -> None:
    shapes = linears(1, 192, 256)
    groups = choices.offered(shapes, [W4G32, W8], "sglang", [], ["lm_head"]).groups
    assert "self_attn.o_proj" not in names(groups)  # 192 x 192 has no Marlin tile
    groups = choices.offered(shapes, [W4G32, W8], "vllm", [], ["lm_head"]).groups
    assert "self_attn.o_proj" in names(groups)
    small = {"model.layers.0.mlp.down_proj": (40, 40)}
    offer = choices.offered(small, [W4G32, W8], "vllm", [], ["lm_head"])
    assert [list(group.sizes) for group in offer.groups] == [[W8, None]]
    assert any("W4A16 g32 is not offered" in note for note in offer.notes)


def test_what_keep_names_has_no_choice() -> None:
    offer = choices.offered(linears(2), [W8], "any", ["*.0.mlp.gate_proj"], ["lm_head"])
    groups = offer.groups
    assert offer.reasons["model.layers.0.mlp.gate_proj"] == "asked for by keep"
    kept = {n for group in groups for n in group.names}
    assert not {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"} & kept
    assert "model.layers.1.mlp.up_proj" in kept


ELEMENTS = {"model.embed_tokens.weight": 1000, **{f"{n}.weight": a * b for n, (a, b) in
            linears(1).items()}}  # fmt: skip


def test_bits_are_counted_over_what_may_be_quantized() -> None:
    groups = choices.offered(linears(1), [W4G128, W4G32, W8], "any", [], ["lm_head"]).groups
    weights = sum(group.weights for group in groups)
    assert choices.room("4.125", groups, ELEMENTS) == weights * 4.125 / 8
    with pytest.raises(UserError, match=r"take 4\.125 bits a weight; wanted budget=4\.125 or more"):
        choices.room("4.12", groups, ELEMENTS)
    assert choices.room("15.99", groups, ELEMENTS) < 2 * weights
    for all_fits in ("16", "80"):
        with pytest.raises(UserError, match=r"all fits in 16 bit.* below 16, or none"):
            choices.room(all_fits, groups, ELEMENTS)


def test_a_size_is_of_the_whole_checkpoint_and_the_least_that_is_named_is_enough() -> None:
    groups = choices.offered(linears(1), [W4G128, W8], "any", [], ["lm_head"]).groups
    others = 2 * (1000 + 2 * 128 * 256 + 256 * 256)
    room = choices.room("0.8MB", groups, ELEMENTS)
    assert 8 * 10**5 - others - 8000 < room < 8 * 10**5 - others
    with pytest.raises(UserError, match=r"all fits in 16 bit.*below 1\.4MB"):
        choices.room("10MB", groups, ELEMENTS)
    with pytest.raises(UserError, match=r"wanted budget=0\.6MB or more") as caught:
        choices.room("0.3MB", groups, ELEMENTS)
    assert "\n" not in str(caught.value)
    assert choices.room("0.6MB", groups, ELEMENTS) > 0


@pytest.mark.parametrize("text", ["4.5", "4", "4.2GB", "800 MiB", "0.2 TB"])
def test_budgets_as_they_are_written(text: str) -> None:
    assert choices.budget_problem(text) is None


@pytest.mark.parametrize("text", ["", "0", "-1", "four", "4.5bits", "4 PB", "nan", "1e3"])
def test_what_is_no_budget_is_told_what_is(text: str) -> None:
    assert "wanted bits a weight such as 4.5" in (choices.budget_problem(text) or "")


SPECS = st.one_of(
    st.just(W8A8), st.builds(QuantSpec, st.sampled_from([4, 8]), st.sampled_from([None, 32, 128]))
)


@given(SPECS)
def test_schemes_are_read_as_they_are_written(spec: QuantSpec) -> None:
    assert parse_scheme(spec.scheme) == parse_scheme(spec.scheme.lower()) == spec
    assert parse_scheme(f"{spec.scheme}?") is None


def test_an_assignment_is_kept_and_a_missing_one_is_one_line(tmp_path: Path) -> None:
    specs = {"a": W4G32, "b": W8A8}
    choices.write_assignment(tmp_path, specs)
    assert choices.read_assignment(tmp_path) == specs
    with pytest.raises(UserError, match="run the stage allocate first"):
        choices.read_assignment(tmp_path / "nowhere")


def test_a_mixture_is_named_by_what_most_linears_have() -> None:
    assert choices.scheme_of({"a": W8, "b": W4G32, "c": W4G32}) == "W4A16 g32 and W8A16"
