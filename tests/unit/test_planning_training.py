"""What plan says that learning takes, against a count by hand."""

from dataclasses import replace

import pytest

from compress.planning.training import PROCESS, Step, Student, training_bytes
from compress.qtensor import QuantSpec

LINEARS = {
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.0.self_attn.k_proj": (32, 64),
    "model.layers.0.mlp.up_proj": (128, 64),
    "model.layers.0.mlp.down_proj": (64, 128),
    "model.layers.1.self_attn.q_proj": (64, 64),
    "model.layers.1.self_attn.k_proj": (32, 64),
    "model.layers.1.mlp.up_proj": (128, 64),
    "model.layers.1.mlp.down_proj": (64, 128),
}
TENSORS = {
    "model.embed_tokens.weight": 1000 * 64,
    "model.norm.weight": 64,
    **{f"{name}.weight": n * k for name, (n, k) in LINEARS.items()},
}
STUDENT = Student(
    TENSORS,
    LINEARS,
    [name for name in LINEARS if "mlp" in name],
    QuantSpec(4, 32),
    blocks=2,
    hidden=64,
    intermediate=128,
    attention=64,
    vocabulary=1000,
)
STEP = Step(windows=2, length=8, recompute=True, precision="float32", rank=4)
IN_16_BIT = 2 * (64 * 64 + 32 * 64) + 64
SCALES = 4 * 128 * 64 // 32


@pytest.mark.parametrize(
    ("way", "more"),
    [("scales", 0), ("latent", 4 * 128 * 64), ("adapters", 4 * 4 * (128 + 64))],
)
def test_what_learns_has_its_gradient_its_moments_and_its_best(way: str, more: int) -> None:
    found = training_bytes(STUDENT, STEP, way)
    learned = IN_16_BIT + SCALES + more
    assert found["process"] == PROCESS
    assert found["integers"] == (0 if way == "latent" else 4 * 128 * 64)
    assert found["frozen"] == 4 * 1000 * 64
    assert (found["learned"], found["gradients"]) == (4 * learned, 4 * learned)
    assert (found["optimizer"], found["best step"]) == (8 * learned, 2 * learned)
    assert found["dequantized"] == 8 * 2 * 128 * 64 + 8 * 128 * 64
    inside = 6 * 64 + 5 * 64 + 4 * 128
    assert found["activations"] == 4 * (16 * (2 * 64 + inside) + 4 * 16 * 1000)
    assert found["total"] == sum(size for part, size in found.items() if part != "total")


def test_moments_in_8_bit_take_a_byte_and_a_scale_for_each_256() -> None:
    found = training_bytes(STUDENT, replace(STEP, optimizer="adamw_8bit"), "latent")
    exact = training_bytes(STUDENT, STEP, "latent")
    learned = exact["learned"] // 4
    assert exact["optimizer"] - found["optimizer"] == 8 * learned - round(
        2 * learned * (1 + 1 / 64)
    )
    assert exact["total"] - found["total"] == exact["optimizer"] - found["optimizer"]


def test_without_recomputing_every_block_keeps_its_weights_as_floats() -> None:
    kept = training_bytes(STUDENT, Step(2, 8, False, "bfloat16", 4), "scales")
    assert kept["dequantized"] == (8 + 2) * 4 * 128 * 64 + 8 * 128 * 64
