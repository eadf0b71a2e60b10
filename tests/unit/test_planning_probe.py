"""The machine as a device: measured figures that can be, and the benchmark that judges them."""

import json
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoConfig

from compress.planning import probe
from compress.planning.memory import all_schemes
from compress.planning.shape import shape_of
from compress.planning.timing import Clock

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, no package
benchmark = import_module("plan")

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ROUNDS", 2)
    monkeypatch.setattr(probe, "TOKENS", (1, 16, 64))
    monkeypatch.setattr(probe, "CONTEXTS", (16, 528))


def test_a_measured_machine_predicts_more_for_more() -> None:
    shape = shape_of(AutoConfig.for_model(**SMALL), "small")
    device = probe.measure_cpu(shape)
    assert device.source.startswith("measured on ")
    for weights in all_schemes(shape, on_cpu=True)[0]:
        clock = Clock(shape, weights, device)
        assert 0 < clock.prefill([16]) < clock.prefill([512]) < clock.prefill([512] * 8)
        assert 0 < clock.decode(1, 100) <= clock.decode(1, 2000)


def test_the_benchmark_compares_a_model_with_its_plan(
    stories260k: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Namespace(model=stories260k, checkpoint=[], settings=["2x16"], threads=1)
    (row,) = benchmark.measure(options)
    capsys.readouterr()
    assert row["scheme"] == "16 bit"
    assert row["memory"][0] == pytest.approx(row["memory"][1], rel=0.2)
    assert all(predicted > 0 and found > 0 for predicted, found in (row["ttft"], row["tpot"]))
    assert "2x16" in benchmark.table(json.loads(json.dumps([row])))
