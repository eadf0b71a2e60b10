"""The report, on a fixture: made-up figures in the shape in which the stages give them."""

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compress.report.figures import figures
from compress.report.pages import page, short
from compress.report.tasks import blind, change, unseen_loss
from compress.stages.report import Report

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
    model: Model = field(default_factory=Model)
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
        "window": {"before": 8192, "after": 16384},
        "ppl_by_position": {
            "positions": positions,
            "before": [21.0, 19.5, 18.8, 18.1, 17.9, 240.0, 910.0],
            "scaled": [21.9, 20.3, 19.5, 18.9, 18.7, 18.8, 19.4],
            "after": [21.2, 19.7, 18.9, 18.2, 17.9, 17.8, 17.9],
        },
        "kl": {"before": 0.0101, "after": 0.0118},
        "kept": True,
    }


def export() -> dict[str, Any]:
    files = [("README.md", 2114), ("config.json", 3120), ("model.safetensors", 179_830_000)]
    return {
        "files": [{"name": name, "bytes": size} for name, size in files],
        "bytes": 179_830_000,
        "bits_per_weight": 8 * 179_830_000 / 134515008,
        "verified": {"tensors": 420, "kl_to_memory": 0.0},
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
        ("knowledge", "accuracy", 40, 62.5, 52.5, [-17.5, -2.5], 0, 4),
        ("commonsense", "accuracy", 40, 80.0, 82.5, [-2.5, 7.5], 2, 1),
        ("short_answers", "contained", 40, 55.0, 55.0, [0.0, 0.0], 0, 0),
        ("summaries", "rougeL", 12, 31.2, 30.4, [-4.1, 2.6], 5, 6),
        ("translation", "chrf", 20, 28.4, 29.9, [0.2, 3.1], 9, 5),
    ]
    keys = ("name", "metric", "n", "before", "after", "ci95", "gained", "lost")
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
        },
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


@pytest.fixture
def run(tmp_path: Path) -> SimpleNamespace:
    return fixture(tmp_path)


def test_figures_hold_what_the_stages_said(run: SimpleNamespace) -> None:
    found = figures(run)
    assert found["recipe"] == "fixture_int8"
    assert found["model"] == "example/Fixture-135M"
    assert found["seed"] == 7
    assert found["bytes"]["before"] == 269030016
    assert found["bytes"]["after"] == 179_830_000
    assert found["bits_per_weight"] == pytest.approx(10.695, abs=1e-3)
    assert found["fidelity"]["kl"] == 0.01237
    assert found["fidelity"]["top1"] == 0.9431
    assert found["fidelity"]["ppl"] == {"before": 29.22, "after": 29.41}
    assert found["tasks"] == score()["tasks"]
    for when in ("before", "after"):
        assert found["latency"][when] == serve()[when]
    assert found["stages"][0] == {
        "name": "plan",
        "skipped": True,
        "seconds": 3.7,
        "peak_rss_bytes": 1_000_000_000,
        "temporary_disk_bytes": 30_000_000,
        "seconds_by_part": None,
        "went_on": False,
        "started": "2026-01-01T10:00:00+00:00",
        "finished": "2026-01-01T10:05:00+00:00",
    }
    assert [s["name"] for s in found["stages"]] == list(STAGES)
    assert found["versions"] == {"python": "3.11.2", "torch": "2.13.0"}
    assert found["hardware"]["cpu"] == "Fixture CPU"
    assert found["config"]["quantize"]["bits"] == 8
    assert len(found["outputs"]) == 20
    assert found["not_finite"] == []
    for name, metrics in STAGES.items():
        if name not in ("serve", "score"):
            assert found[name] == metrics()


def test_a_remark_of_two_stages_is_kept_once(run: SimpleNamespace) -> None:
    assert figures(run)["notes"] == [
        {"stage": "plan", "text": "v_proj stays in 16 bit: engines fuse q, k and v"}
    ]


def test_command_repeats_the_run(run: SimpleNamespace) -> None:
    assert figures(run)["command"] == (
        "python -m compress recipe=fixture_int8 model.path=example/Fixture-135M "
        "out=runs/fixture_int8/Fixture-135M seed=7 device=cpu engine=any"
    )


def test_figures_that_are_not_finite_are_told(run: SimpleNamespace) -> None:
    run.manifests["score"]["metrics"]["fidelity"]["ppl"]["after"] = float("inf")
    run.manifests["quantize"]["metrics"]["layers"][3]["error"] = float("nan")
    run.manifests["distill"]["metrics"]["curve"][1]["kl"] = float("inf")
    found = figures(run)
    assert found["fidelity"]["ppl"]["after"] is None
    broken = ["fidelity.ppl.after", "quantize.layers[3].error", "distill.curve[1].kl"]
    assert found["not_finite"] == broken
    json.loads(json.dumps(found, allow_nan=False))
    assert found["verdict"]["findings"][0]["tone"] == "bad"
    assert "fidelity.ppl.after" in page(found)
    assert "fidelity.ppl.after" in short(found)


def test_verdict_says_it_in_words(run: SimpleNamespace) -> None:
    verdict = figures(run)["verdict"]
    said = {f["about"]: f["text"] for f in verdict["findings"]}
    assert verdict["headline"] == (
        "Fixture-135M in W8A8: 33% smaller, decode 1.63×\u00a0faster, "
        "KL 0.012, 1 of 5 tasks measurably worse."
    )
    assert "1.66\u00a0GB of the given 2.00\u00a0GB stay free" in said["It fits"]
    assert "269\u00a0MB to 180\u00a0MB on disk, 33% smaller" in said["Size"]
    assert "49.8\u00a0tok/s to 81.3\u00a0tok/s (1.63×\u00a0faster)" in said["Speed"]
    assert "0.0124 nats" in said["Closeness"]
    assert "29.22 to 29.41 (+0.7%)" in said["Closeness"]
    assert "knowledge, accuracy 62.5 to 52.5 (−10.0 points" in said["Measurably worse"]
    assert "translation, chrf" in said["Measurably better"]
    assert "3 of 5 scores show no clear difference" in said["Tasks"]
    # 40 items of which none got worse: 1 - 0.05^(1/40) is 7.2 points.
    assert (
        "short answers, contained, with 40 items, a loss of up to 7.2 points"
        in (said["What this cannot show"])
    )


TASK = {"name": "knowledge", "metric": "accuracy", "n": 30, "before": 50.0, "after": 50.0}


@pytest.mark.parametrize(
    ("row", "said", "unseen"),
    [
        ({"ci95": [-5.0, -1.0], "gained": 1, "lost": 4}, "worse", 5.0),
        ({"ci95": [-5.0, -1.0], "gained": 0, "lost": 4, "p": 0.125}, "perhaps worse", 5.0),
        ({"ci95": [-9.0, -2.0], "gained": 0, "lost": 8, "p": 0.008}, "worse", 9.0),
        ({"ci95": [1.0, 5.0], "gained": 4, "lost": 1, "p": 0.03}, "better", 0.0),
        ({"ci95": [1.0, 5.0], "gained": 3, "lost": 1, "p": 0.6}, "perhaps better", 0.0),
        ({"ci95": [-2.0, 3.0], "gained": 2, "lost": 2}, "unclear", 2.0),
        ({"ci95": [-5.0, 0.0], "gained": 0, "lost": 1}, "unclear", 5.0),
        ({"ci95": [0.0, 0.0], "gained": 0, "lost": 0}, "unclear", 9.503),
        ({"ci95": [0.0, 0.0], "gained": 0, "lost": 0, "n": 1}, "unclear", 50.0),
        ({"ci95": [0.0, 9.0], "gained": 1, "lost": 0, "metric": "rougeL"}, "unclear", None),
    ],
)
def test_what_an_interval_says(row: dict[str, Any], said: str, unseen: float | None) -> None:
    task = TASK | row
    assert change(task) == said
    assert unseen_loss(task) == (None if unseen is None else pytest.approx(unseen, abs=1e-3))


def test_a_task_that_the_original_cannot_do_shows_no_loss() -> None:
    row = TASK | {"ci95": [0.0, 0.0], "gained": 0, "lost": 0, "before": 0.0, "after": 0.0}
    assert blind([row]) == (
        "The original scores nothing in knowledge, accuracy, so no loss could show there."
    )
    assert blind([]) is None


def test_few_answers_are_called_perhaps(run: SimpleNamespace) -> None:
    run.manifests["score"]["metrics"]["tasks"][0]["p"] = 0.125
    found = figures(run)
    said = {f["about"]: f["text"] for f in found["verdict"]["findings"]}
    assert "none of 5 tasks measurably worse" in found["verdict"]["headline"]
    assert "p 0.12" in said["Perhaps worse"]
    assert "perhaps worse" in page(found)


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


def test_page_is_whole_and_needs_nothing_else(run: SimpleNamespace) -> None:
    text = page(figures(run))
    tags = Tags(text)
    assert tags.open == []
    for tag, attributes in tags.seen:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert sum(tag == "article" for tag, _ in tags.seen) == 20
    assert sum(a.get("class") == "marks" for _, a in tags.seen) == 20


def test_page_says_where_the_kv_cache_is_in_8_bit(run: SimpleNamespace) -> None:
    assert "in 8 bit" not in "".join(Tags(page(figures(run))).words)
    run.manifests["plan"]["metrics"]["kv_cache"]["kind"] = "kv8"
    run.manifests["serve"]["metrics"]["kv_cache"] = "v8"
    run.manifests["score"]["metrics"]["fidelity"]["kv_cache"] = "kv8"
    shown = "".join(Tags(page(figures(run))).words)
    assert "KV cache 47.2\u00a0MB with K and V in 8 bit, activations" in shown
    assert "KV cache with K and V in 8 bit, beside the weights" in shown
    assert "the compressed model's KV cache with V in 8 bit, the original's in 16 bit" in shown
    assert "as loaded from disk, its KV cache with K and V in 8 bit, as for the tasks" in shown


def test_text_of_a_model_is_shown_not_run(run: SimpleNamespace) -> None:
    text = page(figures(run))
    assert "<script" not in text
    assert "<img" not in text
    shown = "".join(Tags(text).words)
    assert f"Question 2: {EVIL}" in shown
    assert EVIL in shown
    assert 'quantize.keep = ["<b>"]' in shown


def test_page_shows_the_figures(run: SimpleNamespace) -> None:
    text = page(figures(run)).replace("\u00a0", " ")
    for wanted in (
        "269 MB",
        "180 MB",
        "0.0124",
        "94.31%",
        "29.41",
        "20.1 ms",
        "81.3 tok/s",
        "−17.5 to −2.5",
        "1 min 58 s",
        "Of quantize: search 12.5 s, writing 250 ms.",
        "from an earlier run",
        "24,576 tokens",
        "yarn",
        "2 threads, one request at a time, the two models by turns",
        "0.000310, over 6 layers that stand for all 48",
        "Paris &lt;i&gt;of course&lt;/i&gt;",
    ):
        assert wanted in text, wanted


@pytest.mark.parametrize("left_out", [*STAGES, "all"])
def test_every_stage_may_be_missing(tmp_path: Path, left_out: str) -> None:
    names = tuple(STAGES) if left_out == "all" else (left_out,)
    found = figures(fixture(tmp_path, *names))
    text = page(found)
    assert Tags(text).open == []
    for name in names:
        assert f"<code>{name}</code> was not run" in text
    assert short(found).startswith("# Fixture-135M: compression report\n\n**Fixture-135M")
    if left_out == "all":
        assert found["verdict"] == {
            "headline": "Fixture-135M: nothing was measured.",
            "findings": [],
        }
        assert found["bytes"]["before"] is None
        assert found["stages"] == []


def test_without_scores_the_quantizer_is_quoted(tmp_path: Path) -> None:
    said = {
        f["about"]: f["text"] for f in figures(fixture(tmp_path, "score"))["verdict"]["findings"]
    }
    assert said["Closeness"] == (
        "Held-out KL to the original was 0.0131 nats a token after quantization; "
        "the checkpoint itself was not scored."
    )


def test_stages_that_changed_nothing(run: SimpleNamespace) -> None:
    run.manifests["extend"]["metrics"] = {
        "method": None,
        "factor": 1.0,
        "window": {"before": 8192, "after": 8192},
        "kept": False,
        "notes": ["off"],
    }
    run.manifests["distill"]["metrics"] |= {"kept": False, "best_step": 0}
    run.manifests["plan"]["metrics"]["memory"] |= {"given": None, "fits": None}
    found = figures(run)
    text = page(found)
    assert "Left as it was: 8,192 positions." in text
    assert "It did not help, and was not kept." in text
    said = {f["about"]: f["text"] for f in found["verdict"]["findings"]}
    assert said["Memory"].endswith("No limit was given to compare it with.")
    assert said["Distillation"] == "Not kept: held-out KL stays at 0.0131."


def test_markdown_holds_verdict_and_tables(run: SimpleNamespace) -> None:
    text = short(figures(run)).replace("\u00a0", " ")
    assert "| weights | 269 MB | 180 MB |" in text
    assert "| time to first token, P99 | 138 ms | 106 ms |" in text
    row = "| knowledge | accuracy | 40 | 62.5 | 52.5 | −10.0 | −17.5 to −2.5 | 0 | 4 |"
    assert row in text
    assert "| plan | 3.70 s | 1.00 GB | 30.0 MB | from an earlier run |" in text
    assert "Of quantize: search 12.5 s, writing 250 ms." in text
    assert "<script" not in text


def test_seconds_by_part_of_a_stage_that_went_on_say_so(run: SimpleNamespace) -> None:
    found = figures(run)
    (row,) = (row for row in found["stages"] if row["seconds_by_part"])
    row["went_on"] = True
    for text in (short(found), page(found)):
        said = "Of quantize, since it went on: search 12.5 s, writing 250 ms."
        assert said in text.replace("\u00a0", " ")


def test_stage_writes_three_files(run: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    metrics = Report().run(run, out)
    assert sorted(f.name for f in out.iterdir()) == ["report.html", "report.json", "report.md"]
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(figures(run)))
    assert (out / "report.html").read_text(encoding="utf-8") == page(found)
    assert (out / "report.md").read_text(encoding="utf-8") == short(found)
    assert metrics == {"headline": found["verdict"]["headline"]}
