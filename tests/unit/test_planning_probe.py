"""The machine as a device: measured figures that can be, and the benchmark that judges them."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig

from compress.errors import UserError
from compress.planning import probe
from compress.planning.devices import CPU, GPUS
from compress.planning.memory import HEAP, all_schemes, token_bytes
from compress.planning.requests import Request
from compress.planning.shape import shape_of
from compress.planning.study import Question, study
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
    options = Namespace(
        model=stories260k, checkpoint=[], settings=["2x16"], threads=1, memory=False
    )
    (row,) = benchmark.measure(options)
    capsys.readouterr()
    assert row["scheme"] == "16 bit"
    assert row["memory"][0] == pytest.approx(row["memory"][1], rel=0.2)
    assert all(predicted > 0 and found > 0 for predicted, found in (row["ttft"], row["tpot"]))
    said = benchmark.table(json.loads(json.dumps([row])))
    assert "2x16" in said
    assert "TPOT" in said
    assert "TTFT" not in benchmark.table([{k: v for k, v in row.items() if k[0] != "t"}])


def test_the_process_without_a_model_is_measured() -> None:
    found = probe.serving_process()
    assert 200e6 < found < 1.5e9
    assert probe.serving_process() == found


def test_a_plan_for_a_cpu_counts_what_serves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and its libraries are no model, and on a small machine are most of the memory."""
    process = 465_000_000
    monkeypatch.setattr(probe, "serving_process", lambda: process)
    fields = LlamaConfig(**{k: v for k, v in SMALL.items() if k != "architectures"})
    shape = shape_of(fields, "small")
    gpu = GPUS["a10g"]
    question = Question(shape, shape, gpu, 10**9, [Request(500, 12)], window=2048)
    cpu = replace(question, device=replace(gpu, name=CPU))
    plans = {name: study(asked) for name, asked in (("gpu", question), ("cpu", cpu))}
    assert plans["gpu"]["overhead"] == pytest.approx(0.05 * 10**9)
    assert plans["cpu"]["overhead"] == pytest.approx(process + 0.05 * (10**9 - process))
    at_once = {name: plan["schemes"][0]["largest_batch"]["16"] for name, plan in plans.items()}
    token = 4 * 2 * 2 * 64 * 2  # blocks, K and V, KV heads, channels, bytes
    kept = (HEAP - 1) * 512 * token_bytes(shape.hidden, shape.intermediate)  # of a prompt
    less = (0.95 * process + kept) / (512 * token + 4 * 1000)  # a request and its logits
    assert at_once["gpu"] - at_once["cpu"] == pytest.approx(less, abs=1)
    with pytest.raises(UserError, match=r"wanted memory=4\d\d\.\dMB or more"):
        study(replace(cpu, memory=400_000_000))
