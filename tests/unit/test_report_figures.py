"""report.json holds what the stages said, and the stage writes all three files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_run import STAGES, fixture, score, serve

from compress.report.figures import figures
from compress.report.pages import page, short
from compress.stages.report import Report


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
    row = found["tasks"][0]
    added = {"difference": -10.0, "change": "worse", "unseen_loss": pytest.approx(23.664, abs=1e-3)}
    assert row == score()["tasks"][0] | added
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
    run.manifests["score"]["metrics"]["blocks"] |= {"error": [0.1, float("nan")]}
    run.manifests["score"]["metrics"]["blocks"] |= {"error_floor": [0.01, 0.01]}
    run.manifests["score"]["metrics"]["fidelity"]["kl_ci95"] = [float("nan"), float("nan")]
    found = figures(run)
    assert found["fidelity"]["ppl"]["after"] is None
    assert found["not_finite"] == [
        *("fidelity.kl_ci95[0]", "fidelity.kl_ci95[1]", "fidelity.ppl.after", "blocks.error[1]"),
        *("quantize.layers[3].error", "distill.curve[1].kl"),
    ]
    json.loads(json.dumps(found, allow_nan=False))
    assert found["verdict"]["findings"][0]["tone"] == "bad"
    assert "fidelity.ppl.after" in page(found)
    assert "fidelity.ppl.after" in short(found)


def test_stage_writes_the_report_and_the_card(run: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    metrics = Report().run(run, out)
    assert sorted(f.name for f in out.iterdir()) == [
        "card.md",
        "report.html",
        "report.json",
        "report.md",
        "report.outputs.csv",
    ]
    found = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(figures(run)))
    assert (out / "report.html").read_text(encoding="utf-8") == page(found)
    assert (out / "report.md").read_text(encoding="utf-8") == short(found)
    assert (out / "card.md").read_text(encoding="utf-8").startswith("---\n")
    assert metrics == {"headline": found["verdict"]["headline"]}
