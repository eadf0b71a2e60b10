"""The measurement of the KV cache by length, on a tiny model."""

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


def test_every_length_and_kind_is_measured(stories260k: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"On day {i} Lily went to the park with {i} dogs. " for i in range(99)))
    options = Namespace(
        model=stories260k, original=None, text=text, lengths=[512, 256], dtype="float32"
    )
    result = kv_cache.run(options)
    records = {(r["length"], r["kv_cache"]): r for r in result["records"]}
    assert list(records) == [(n, kind) for n in (256, 512) for kind in ("16", "v8", "kv8")]
    for length in (256, 512):
        exact, v8, kv8 = (records[length, kind]["to_16_bit"]["kl"] for kind in ("16", "v8", "kv8"))
        assert exact == 0 < v8 < kv8 < 1e-3
        assert abs(records[length, "16"]["to_original"]["kl"]) < 1e-6
        assert records[length, "kv8"]["bytes_per_token"] < records[length, "16"]["bytes_per_token"]
    assert all(r["decode_tokens_per_s"] > 0 for r in records.values())
    assert len(kv_cache.table(result["records"]).splitlines()) == 2 + 6


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
