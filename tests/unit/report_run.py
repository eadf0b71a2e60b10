"""A run for the report's tests: made-up figures in the shape in which the stages give them."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compress.eval.gate import Gate
from compress.stages.score import Score

BLOCKS = 12
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
KINDS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
QUANTIZED = KINDS[3:]


@dataclass
class Model:
    path: str = "example/Fixture-135M"

    @property
    def name(self) -> str:
        return "Fixture-135M"


@dataclass
class Settings:
    recipe: str = "fixture_int8"
    out: str = "runs/fixture_int8/Fixture-135M"
    seed: int = 7
    device: str = "cpu"
    engine: str = "any"
    checkpoint: str | None = None
    model: Model = field(default_factory=Model)
    score: Score = field(
        default_factory=lambda: Score(gate=Gate(kl=0.05, tasks={"knowledge": 12.0}))
    )
    quantize: dict[str, Any] = field(default_factory=lambda: {"bits": 8, "keep": ["<b>"]})


def _names(kinds: tuple[str, ...]) -> list[tuple[int, str]]:
    return [(b, f"model.layers.{b}.{kind}") for b in range(BLOCKS) for kind in kinds]


def plan() -> dict[str, Any]:
    before = {"embeddings": 56623104, "attention": 53084160, "mlp": 159252480, "norms": 70272}
    before |= {"lm_head": 0, "other": 0}
    after = before | {"attention": 43165440, "mlp": 79920000}
    before["total"], after["total"] = sum(before.values()), sum(after.values())
    return {
        "scheme": "W8A8",
        "parameters": 134515008,
        "bytes": {"before": before, "after": after},
        "bits_per_weight": {"before": 16.0, "after": 8 * after["total"] / 134515008},
        "kv_cache": {
            "kind": "16",
            "by_kind": {"16": 23040, "v8": 17460, "kv8": 11880},
            "bytes_per_token": 23040,
            "table": [
                {"batch": b, "tokens": t, "bytes": b * t * 23040}
                for b in (1, 4, 16, 64)
                for t in (1024, 2048, 4096)
            ],
        },
        "memory": {
            "given": 2_000_000_000,
            "weights": after["total"],
            "kv_cache": 47185920,
            "activations": 17301504,
            "overhead": 100_000_000,
            "total": after["total"] + 164487424,
            "fits": True,
            "batch": 1,
            "tokens": 2048,
        },
        "quantized": [name for _, name in _names(QUANTIZED)],
        "kept": {name: "16 bit" for _, name in _names(KINDS[:3])} | {"lm_head": "16 bit"},
        "notes": ["v_proj stays in 16 bit: engines fuse q, k and v"],
    }


def calibrate() -> dict[str, Any]:
    def absmax(block: int, name: str) -> float:
        return 220.0 if "down" in name and block == 1 else 6.0 + block % 5

    return {
        "tokens": 24576,
        "samples": 48,
        "available": 120,
        "ppl": 17.5,
        "largest_activation": 2922.0,
        "length": 512,
        "padding_tokens": 12,
        "template_tokens": 0,
        "linears": BLOCKS * 7,
        "least_tokens": 24576,
        "layers": [
            {"name": name, "absmax": absmax(b, name), "mean_abs": 0.4, "outlier_share": 0.0021}
            for b, name in _names(KINDS)
        ],
        "heldout": {
            "windows": 8,
            "tokens": 2048,
            "description": "the last tenth",
            "ppl": 18.25,
            "token_divergence": 1.04,
        },
        "notes": [],
    }


def quantize() -> dict[str, Any]:
    return {
        "scheme": "W8A8",
        "layers": [
            {
                "name": name,
                "error": 0.009 + 0.0004 * (b % 4),
                "error_rtn": 0.013 + 0.001 * (b % 5),
                "smooth": 0.7 if "up" in name else None,
                "clip": 0.97,
            }
            for b, name in _names(QUANTIZED)
        ],
        "heldout_kl": {"after": 0.0131},
        "seconds_by_part": {"search": 12.5, "writing": 0.25},
        "notes": ["v_proj stays in 16 bit: engines fuse q, k and v"],
    }


def distill() -> dict[str, Any]:
    curve = [(0, 0.0131), (20, 0.0112), (40, 0.0104), (60, 0.0101), (80, 0.0103)]
    return {
        "teacher": None,
        "train": "scales",
        "labels": {"tokens": 40960, "top_k": 32, "bytes": 7864320, "seconds": 41.5, "mass": 0.962},
        "trained_parameters": 9_100_000,
        "steps": 80,
        "best_step": 60,
        "tokens": 40960,
        "kl": {"before": 0.0131, "after": 0.0101},
        "curve": [{"step": s, "tokens": 512 * s, "kl": kl} for s, kl in curve],
        "kept": True,
        "notes": [],
    }


def extend() -> dict[str, Any]:
    positions = [512, 1024, 2048, 4096, 8192, 12288, 16384]
    return {
        "method": "yarn",
        "factor": 2.0,
        "labels": {"tokens": 98_304},
        "window": {"before": 8192, "after": 16384},
        "ppl_by_position": {
            "positions": positions,
            "before": [21.0, 19.5, 18.8, 18.1, 17.9, 240.0, 910.0],
            "scaled": [21.9, 20.3, 19.5, 18.9, 18.7, 18.8, 19.4],
            "after": [21.2, 19.7, 18.9, 18.2, 17.9, 17.8, 17.9],
        },
        "ppl": {"before": 96.2, "scaled": 19.4, "after": 18.1},
        "short_ppl": {"before": 18.7, "scaled": 19.3, "after": 18.8},
        "retrieval": {
            "before": retrieval([[1.0, 0.5, 0.0], [1.0, 1.0, 0.0]]),
            "scaled": retrieval([[1.0, 1.0, 0.5], [1.0, 1.0, 0.5]]),
            "after": retrieval([[1.0, 1.0, 1.0], [1.0, 1.0, 0.5]]),
        },
        "kl": {"before": 0.0101, "after": 0.0118},
        "kept": True,
    }


def retrieval(exact: list[list[float | None]]) -> dict[str, Any]:
    chance = [[0.01 + (cell or 0) / 2 for cell in row] for row in exact]
    passkey = {"exact": exact, "chance": chance, "mean": 0.5}
    short = [[None, *row[1:]] for row in exact], [[None, *row[1:]] for row in chance]
    needles = {"exact": short[0], "chance": short[1], "mean": 0.5}
    about = {"lengths": [4096, 8192, 16384], "depths": [0.0, 1.0], "keys": 2}
    return {**about, "passkey": passkey, "needles": needles}


def export() -> dict[str, Any]:
    files = [("README.md", 2114), ("config.json", 3120), ("model.safetensors", 179_830_000)]
    return {
        "files": [{"name": name, "bytes": size} for name, size in files],
        "bytes": 179_830_000,
        "bits_per_weight": 8 * 179_830_000 / 134515008,
        "verified": {"tensors": 420, "read_back": 0, "kl": 0.0112, "kl_moved": 0.0},
    }


def _latency(ttft: float, tpot: float, rss: int) -> dict[str, Any]:
    def tail(middle: float) -> dict[str, float]:
        return {"p50": middle, "p95": middle * 1.2, "p99": middle * 1.5, "mean": middle * 1.04}

    return {
        "ttft_ms": tail(ttft),
        "tpot_ms": tail(tpot),
        "decode_tokens_per_s": 1000 / tpot,
        "prefill_tokens_per_s": 128000 / ttft,
        "peak_rss_bytes": rss,
        "load_seconds": 0.83,
        "prompt_tokens": 128,
        "new_tokens": 64,
        "requests": 16,
        "compiled": tpot < 15,
    }


def serve() -> dict[str, Any]:
    return {
        "backend": "aten",
        "threads": 2,
        "by_turns": True,
        "kernel_check": {"max_relative_error": 0.00031, "layers": 6, "of": 48},
        "question": "What is the capital of France?",
        "answers": {"before": "Paris <i>of course</i>", "after": "Paris."},
        "before": _latency(92.0, 20.1, 910_000_000),
        "after": _latency(71.0, 12.3, 742_000_000),
    }


def score() -> dict[str, Any]:
    rows = [
        ("knowledge", "accuracy", 40, 62.5, 52.5, [-17.5, -2.5], 0, 4, 15.0),
        ("commonsense", "accuracy", 40, 80.0, 82.5, [-2.5, 7.5], 2, 1, 22.5),
        ("short_answers", "contained", 40, 55.0, 55.0, [0.0, 0.0], 0, 0, 15.0),
        ("summaries", "rougeL", 12, 31.2, 30.4, [-4.1, 2.6], 5, 6, 3.4),
        ("translation", "chrf", 20, 28.4, 29.9, [0.2, 3.1], 9, 5, 1.6),
    ]
    keys = ("name", "metric", "n", "before", "after", "ci95", "gained", "lost")
    keys += ("smallest_loss",)
    return {
        "fidelity": {
            "kl": 0.01237,
            "kl_ci95": [0.0115, 0.0134],
            "kl_floor": 0.00042,
            "top1": 0.9431,
            "ppl": {"before": 29.22, "after": 29.41},
            "windows": 8,
            "window_tokens": 1024,
            "text": "held-out.txt",
            "worst": [
                {
                    "kl": 3.25,
                    "window": 2,
                    "position": 17,
                    "text": "the town of Krato",
                    "follows": "ch",
                    "before": [{"token": "ch", "p": 0.91}, {"token": "k", "p": 0.04}],
                    "after": [{"token": "m", "p": 0.55}, {"token": EVIL, "p": 0.2}],
                }
            ],
        },
        "blocks": {
            "error": [0.02 + 0.001 * b for b in range(BLOCKS)],
            "error_floor": [0.004] * BLOCKS,
            "gain": [1.0] * BLOCKS,
            "head_kl": 0.0002,
            "head_scheme": None,
        },
        "faults": [],
        "drift": [
            {
                "name": "summaries",
                "n": 12,
                "same": 3,
                "length": {"before": 21.5, "after": 24.25},
                "loops": {"before": 0, "after": 2},
            }
        ],
        "tasks": [dict(zip(keys, row, strict=True)) for row in rows],
    }


EVIL = '<script>alert("x")</script><img src=http://evil.example/a.png> & </div>'


def outputs() -> list[dict[str, Any]]:
    texts = [
        ("The capital of France is Paris.", "The capital of France is Paris."),
        ("It was a cold winter day.", "It was a bright and cold day."),
        ("Sehr geehrte Damen", EVIL),
        ("早上好，你好吗？", "早上好，您怎么样？"),
        ("", "x" * 300),
    ]
    return [
        {
            "why": "drawn by chance",
            "task": "short_answers",
            "id": f"item-{i:02d}",
            "prompt": f"Question {i}: {EVIL if i % 7 == 2 else 'What is it?'}",
            "references": ["Paris"],
            "before": before,
            "after": after,
            "metric": "contained",
            "score_before": 100.0,
            "score_after": 0.0,
            "kl": None if before == after else 0.041 * i,
            "broken_before": [],
            "broken_after": ["no_loop"] if i % 5 == 4 else [],
        }
        for i, (before, after) in enumerate(texts * 4)
    ]


STAGES = {
    stage.__name__: stage
    for stage in (plan, calibrate, quantize, distill, extend, export, serve, score)
}


def fixture(folder: Path, *left_out: str) -> SimpleNamespace:
    """A run of all stages but those left out, with its outputs on disk."""
    manifests = {
        name: {
            "stage": name,
            "metrics": metrics(),
            "seconds": 3.7 * 2**i,
            "peak_rss_bytes": 1_000_000_000 + 10_000_000 * i,
            "temporary_disk_bytes": 30_000_000,
            "packages": {"python": "3.11.2", "torch": "2.13.0"},
            "hardware": {
                "cpu": "Fixture CPU",
                "cores": 2,
                "memory_bytes": 25_000_000_000,
                "gpu": None,
                "system": "Linux x86_64",
            },
            "started": "2026-01-01T10:00:00+00:00",
            "finished": "2026-01-01T10:05:00+00:00",
            "skipped": name == "plan",
        }
        for i, (name, metrics) in enumerate(STAGES.items())
        if name not in left_out
    }
    lines = "".join(json.dumps(o, ensure_ascii=False) + "\n" for o in outputs())
    (folder / "outputs.jsonl").write_text(lines, encoding="utf-8")
    artifacts = {} if "score" in left_out else {"scores": folder}
    return SimpleNamespace(config=Settings(), artifacts=artifacts, work=folder, manifests=manifests)


class Tags(HTMLParser):
    """Every start tag with its attributes, the tags left open, and the text."""

    VOID = ("meta", "input", "br", "img", "rect", "line", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
