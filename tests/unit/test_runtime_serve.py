"""Generation, timing, and the serve stage."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.errors import ConfigError, UserError
from compress.kernels import w8a8
from compress.model_path import Model
from compress.qtensor import QuantSpec
from compress.runtime import latency
from compress.runtime.cache import KEY_BLOCK, KV_CACHES
from compress.runtime.decode import Decoder
from compress.runtime.generate import chat_prompt, encode, generate
from compress.runtime.latency import Timing, summarize, time_models, time_ratio
from compress.runtime.loader import load
from compress.stage import Run
from compress.stages.serve import Serve
from tests.unit.test_runtime import quantized


@pytest.fixture(scope="module")
def checkpoint(stories260k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "quantized"
    quantized(stories260k, folder, QuantSpec(8, activation_bits=8))
    return folder


def test_a_batch_answers_as_each_prompt_alone(stories260k: Path, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = ["Once upon a time", "Lily", "The big dog ran to the park and"]
    model = load(checkpoint, dtype=torch.float32)
    together = generate(model, tokenizer, prompts, max_new_tokens=12, batch_size=3)
    alone = [
        generate(model, tokenizer, [prompt], max_new_tokens=12, batch_size=1)[0]
        for prompt in prompts
    ]
    assert together == alone
    assert all(together)
    assert not any(text.startswith(p) for text, p in zip(together, prompts, strict=True))


def test_what_a_folder_says_of_choosing_tokens_is_not_heard(stories260k: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    model = load(stories260k, dtype=torch.float32)
    written = generate(model, tokenizer, ["Lily"], max_new_tokens=40, batch_size=1)
    own = model.generation_config
    own.update(no_repeat_ngram_size=1, repetition_penalty=3.0, min_new_tokens=30, do_sample=True)
    assert generate(model, tokenizer, ["Lily"], max_new_tokens=40, batch_size=1) == written
    assert model.generation_config is own


def test_a_kv_cache_in_8_bit_writes_the_same_texts(stories260k: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    model = load(stories260k, dtype=torch.float32)
    texts = {
        kind: generate(
            model,
            tokenizer,
            ["Once upon a time", "Lily"],
            max_new_tokens=100,
            batch_size=2,
            kv_cache=kind,
        )
        for kind in KV_CACHES
    }
    assert texts["v8"] == texts["kv8"] == texts["16"]
    assert all(len(tokenizer(text).input_ids) > KEY_BLOCK for text in texts["16"])


def test_prompts_are_padded_on_the_left_and_bos_comes_once(stories260k: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    bos = tokenizer.bos_token
    ids, mask = encode(tokenizer, ["Lily", f"{bos}Lily went home"], pad_token_id=0)
    assert ids.shape == mask.shape
    assert mask[1].all()
    assert mask[0].tolist() == sorted(mask[0].tolist())
    assert (ids[1] == tokenizer.bos_token_id).sum() == 1
    assert chat_prompt(tokenizer, "Why?") == "Why?"


def test_rates_and_percentiles_are_those_of_the_requests() -> None:
    timings = [Timing(0.2, [0.01, 0.03]), Timing(0.4, [0.02, 0.02])]
    slow = [*timings, Timing(0.3, [9.0, 0.01])]
    assert summarize(slow, prompt_tokens=60)["decode_tokens_per_s"] == pytest.approx(50)
    figures = summarize(timings, prompt_tokens=60)
    assert figures["ttft_ms"]["p50"] == pytest.approx(300)
    assert figures["ttft_ms"]["mean"] == pytest.approx(300)
    assert figures["tpot_ms"]["p50"] == pytest.approx(20)
    assert figures["tpot_ms"]["p99"] == pytest.approx(29.7)
    assert figures["decode_tokens_per_s"] == pytest.approx(50)
    assert figures["prefill_tokens_per_s"] == pytest.approx(200)
    assert (figures["prompt_tokens"], figures["new_tokens"], figures["requests"]) == (60, 3, 2)


def test_every_model_is_timed_as_often(stories260k: Path) -> None:
    model = load(stories260k)
    timings = time_models(
        {"a": Decoder(model), "b": Decoder(model, kv_cache="kv8")},
        prompt_tokens=5,
        new_tokens=4,
        requests=2,
        warmup=1,
        seed=0,
    )
    assert {name: len(found) for name, found in timings.items()} == {"a": 2, "b": 2}
    assert all(t.ttft > 0 and len(t.tpot) == 3 and min(t.tpot) > 0 for t in timings["a"])


def run_of(dense: Path, checkpoint: Path, work: Path) -> Run:
    config: Any = SimpleNamespace(device="cpu", seed=0, model=Model())
    return Run(config, {"dense": dense, "checkpoint": checkpoint}, work, {})


@pytest.mark.slow
def test_the_stage_checks_asks_and_times(
    stories260k: Path, checkpoint: Path, tmp_path: Path
) -> None:
    stage = Serve(
        prompt_tokens=600, new_tokens=3, requests=2, warmup=0, answer_tokens=4, kv_cache="kv8"
    )
    metrics = stage.run(run_of(stories260k, checkpoint, tmp_path), tmp_path)
    assert (metrics["backend"], metrics["kv_cache"]) == ("cpu", "kv8")
    assert metrics["kernel_check"]["max_relative_error"] < 1e-5
    assert sorted(metrics["kernel_check"]["shapes"]) == [[64, 64], [64, 172], [172, 64]]
    assert set(metrics["answers"]) == {"before", "after"}
    for side in ("before", "after"):
        figures = metrics[side]
        assert figures["prompt_tokens"] == 512 - 3
        assert figures["requests"] == 2
        assert figures["peak_rss_bytes"] > figures["idle_rss_bytes"] > 0
        assert figures["load_seconds"] > 0
        assert figures["compiled"] is False
        assert figures["attention"] == "SDPA, the heads of a group together"


def test_a_checkpoint_without_a_tokenizer_is_asked_through_the_originals(
    stories260k: Path, checkpoint: Path, tmp_path: Path
) -> None:
    stage = Serve(prompt_tokens=8, new_tokens=2, requests=1, warmup=0, answer_tokens=4)
    (whole := tmp_path / "whole").mkdir()
    expected = stage.run(run_of(stories260k, checkpoint, whole), whole)["answers"]
    bare = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert stage.run(run_of(stories260k, bare, tmp_path), tmp_path)["answers"] == expected


def test_a_scale_that_is_no_number_is_not_called_a_kernel_that_is_off(
    stories260k: Path, checkpoint: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight_scale"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    stage = Serve(prompt_tokens=8, new_tokens=2, requests=1, warmup=0, answer_tokens=4)
    found = stage.run(run_of(stories260k, broken, tmp_path), tmp_path)
    assert found["kernel_check"]["max_relative_error"] < 0.01


def test_a_kernel_that_is_off_is_refused(
    stories260k: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = w8a8.prepare

    def broken(weight: Any, scale: Any, bias: Any, backend: str) -> Any:
        return good(weight, scale.roll(1, 0), bias, backend)

    monkeypatch.setattr(w8a8, "prepare", broken)
    with pytest.raises(UserError, match=r"_proj: backend cpu is off the reference by"):
        Serve().run(run_of(stories260k, checkpoint, tmp_path), tmp_path)


def test_all_fields_that_cannot_be_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Serve(new_tokens=1, requests=0, backend="gpu", compile="on")
    assert len(caught.value.problems) == 4


def test_models_are_timed_by_turns_that_go_forth_and_back(
    stories260k: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(stories260k)
    decoders = {name: Decoder(model) for name in ("before", "after")}
    names, seen = {id(decoder): name for name, decoder in decoders.items()}, []

    def record(decoder: Decoder, prompt: Any, new_tokens: int) -> Timing:
        seen.append((names[id(decoder)], prompt.tolist()))
        return Timing(float(len(seen)), [1.0] * (new_tokens - 1))

    monkeypatch.setattr(latency, "time_request", record)
    found = time_models(decoders, prompt_tokens=3, new_tokens=2, requests=2, warmup=1, seed=0)
    assert [name for name, _ in seen] == ["before", "after", "after", "before", "before", "after"]
    assert all(seen[i][1] == seen[i + 1][1] for i in (0, 2, 4))
    assert [t.ttft for t in found["before"]] == [4.0, 5.0]
    assert [t.ttft for t in found["after"]] == [3.0, 6.0]


def test_the_interval_of_a_ratio_of_times_is_of_order_statistics() -> None:
    def timings(*ttft: float) -> list[Timing]:
        return [Timing(t, [t / 4, t / 2, 9 * t]) for t in ttft]

    ones, rising = timings(*[1.0] * 16), timings(*[(n * 7 % 16 + 1) / 10 for n in range(16)])
    found = time_ratio(ones, rising)
    assert found["ttft"] == pytest.approx((0.4, 1.3))  # the 4th and the 13th: 97.9%
    assert found["tpot"] == pytest.approx((0.4, 1.3))
    found = time_ratio(timings(2.0, *[1.0] * 7), timings(*[0.5] * 8))
    assert found["ttft"] == pytest.approx((0.25, 0.5))  # all of 8: 99.2%
    assert time_ratio(ones[:5], rising[:5])["tpot"] == (0.0, None)
