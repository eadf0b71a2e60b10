"""The measurement of the KV cache by length, on a tiny model."""

import json
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from compress.runtime.cache import make_cache
from compress.runtime.loader import load

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, no package
kv_cache = import_module("kv_cache")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"On day {i} Lily went to the park with {i} dogs. " for i in range(99)))
    return file


def test_every_length_and_kind_is_measured(stories260k: Path, text: Path) -> None:
    options = Namespace(
        model=stories260k, original=None, text=text, lengths=[512, 256], dtype="float32",
        timing=True,
    )  # fmt: skip
    (*_, result) = kv_cache.run(options)
    records = {(r["length"], r["kv_cache"]): r for r in result["records"]}
    assert list(records) == [(n, kind) for n in (256, 512) for kind in ("16", "v8", "kv8")]
    for length in (256, 512):
        exact, v8, kv8 = (records[length, kind]["to_16_bit"]["kl"] for kind in ("16", "v8", "kv8"))
        assert exact == 0 < v8 < kv8 < 1e-3
        assert abs(records[length, "16"]["to_original"]["kl"]) < 1e-6
        assert records[length, "kv8"]["bytes_per_token"] < records[length, "16"]["bytes_per_token"]
    assert all(r["decode_tokens_per_s"] > 0 for r in records.values())
    assert len(kv_cache.table(result["records"]).splitlines()) == 2 + 6


def test_a_run_that_is_stopped_leaves_what_it_has(
    stories260k: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = text.with_name("out.json")
    lengths = ("--lengths", "256", "512", "--no-timing", "--out", str(out))
    monkeypatch.setattr(
        sys, "argv", ["kv_cache", "--model", str(stories260k), "--text", str(text), *lengths]
    )
    write = kv_cache.write_json

    def stopped(file: Path, result: object) -> None:
        write(file, result)
        raise KeyboardInterrupt

    monkeypatch.setattr(kv_cache, "write_json", stopped)
    with pytest.raises(KeyboardInterrupt):
        kv_cache.main()
    result = json.loads(out.read_text())
    assert result["lengths_asked"] == [256, 512]
    assert [(r["length"], r["kv_cache"]) for r in result["records"]] == [
        (256, "16"), (256, "v8"), (256, "kv8")
    ]  # fmt: skip
    assert {r["decode_tokens_per_s"] for r in result["records"]} == {None}
    assert kv_cache.table(result["records"]).count("not timed") == 3


@torch.inference_mode()
def test_asking_leaves_the_cache_as_it_was(stories260k: Path) -> None:
    model, tokenizer = load(stories260k), AutoTokenizer.from_pretrained(stories260k)
    ids = torch.tensor([tokenizer("Lily went to the park. " * 30).input_ids[:150]])
    cache, untouched = (make_cache("kv8", model.config) for _ in range(2))
    for each in (cache, untouched):
        kv_cache.feed(model, each, ids)
    answer, seconds = kv_cache.ask(model, cache, ids[:, :9], 5)
    assert (len(answer), len(seconds)) == (5, 4)
    assert cache.get_seq_length() == untouched.get_seq_length() == 150
    after, before = (kv_cache.ask(model, each, ids[:, 9:20], 5)[0] for each in (cache, untouched))
    assert after == before


def test_a_text_too_short_is_refused(stories260k: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    with pytest.raises(SystemExit, match="wanted 5000, or shorter --lengths"):
        kv_cache.tokens(tokenizer, "Too short.", 5000)
