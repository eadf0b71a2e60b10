"""The verdict says in words what the figures show, and what they cannot show."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_run import fixture

from compress.eval.gate import Gate
from compress.report.card import model_card
from compress.report.figures import figures
from compress.report.pages import page, short
from compress.report.tasks import blind, change, label, unseen_loss
from compress.report.tasks import found as changed
from compress.report.verdict import verdict


@pytest.fixture
def run(tmp_path: Path) -> SimpleNamespace:
    return fixture(tmp_path)


def test_speed_is_claimed_only_where_the_requests_tell(run: SimpleNamespace) -> None:
    latency = figures(run)["latency"]
    for ends, said, tone in (
        ([0.5, 0.7], "decode 1.63×\u00a0faster", "good"),
        ([0.5, 1.1], "decode not measurably changed", "plain"),
        ([0.0, None], "decode not measurably changed", "plain"),
    ):
        latency["time_ratio"] = {"tpot": ends, "ttft": [0.6, 0.8]}
        found = verdict({**figures(run), "latency": latency})
        assert said in found["headline"]
        (speed,) = (f for f in found["findings"] if f["about"] == "Speed")
        assert speed["tone"] == tone
        assert "(1.30×\u00a0faster); the first token" in speed["text"]


@pytest.mark.parametrize(
    ("measured", "about", "serving", "left"),
    [
        (0.3, "It fits", "344", "1.66\u00a0GB of the given 2.00\u00a0GB stay free"),
        (0.8, "It fits", "at least 344", "1.20\u00a0GB of the given 2.00\u00a0GB stay free"),
        (2.1, "It does not fit", "at least 344", "were given, 100\u00a0MB too few"),
    ],
)
def test_memory_that_was_measured_counts_where_it_is_more_than_the_plans(
    run: SimpleNamespace, measured: float, about: str, serving: str, left: str
) -> None:
    latency = figures(run)["latency"]
    latency["after"]["peak_rss_bytes"] = round(measured * 1e9)
    found = verdict({**figures(run), "latency": latency})
    (text,) = (f["text"] for f in found["findings"] if f["about"] == about)
    assert text.startswith(f"Serving takes {serving}")
    assert text.endswith(f"{left}.")


def test_no_speed_is_claimed_of_a_busy_machine(run: SimpleNamespace) -> None:
    latency = figures(run)["latency"]
    latency["time_ratio"] = {"tpot": [0.5, 0.7], "ttft": [0.6, 0.8]}
    for slow, said, busy in ((1.9, "1.63×\u00a0faster", False), (9.8, "not measurably", True)):
        latency["before"]["tpot_ms"]["p95"] = slow * latency["before"]["tpot_ms"]["p50"]
        found = verdict({**figures(run), "latency": latency})
        assert f"decode {said}" in found["headline"]
        (speed,) = (f["text"] for f in found["findings"] if f["about"] == "Speed")
        assert ("busy meanwhile, its slow steps (P95) 9.8 times as long" in speed) is busy


def test_verdict_says_it_in_words(run: SimpleNamespace) -> None:
    verdict = figures(run)["verdict"]
    said = {f["about"]: f["text"] for f in verdict["findings"]}
    assert verdict["headline"] == (
        "Fixture-135M in W8A8: 33% smaller, decode 1.63×\u00a0faster, "
        "KL 0.012, 1 of 5 tasks measurably worse."
    )
    assert "1.26\u00a0GB of the given 2.00\u00a0GB stay free" in said["It fits"]
    assert (
        "Measured, at one request of 128 and 64 tokens: 742\u00a0MB of the whole process."
        in said["It fits"]
    )
    assert "269\u00a0MB to 180\u00a0MB on disk, 33% smaller" in said["Size"]
    assert "49.8\u00a0tok/s to 81.3\u00a0tok/s (1.63×\u00a0faster)" in said["Speed"]
    assert "0.0124 nats" in said["Closeness"]
    assert "29.22 to 29.41 (+0.7%)" in said["Closeness"]
    assert "knowledge, accuracy 62.5 to 52.5 (−10.0 points" in said["Measurably worse"]
    assert "translation, chrf" in said["Measurably better"]
    assert "3 of 5 scores show no clear difference" in said["Tasks"]
    assert said["What this cannot show"] == (
        "No clear difference is not none: in commonsense, accuracy, with 40 items, no loss of less "
        "than 22 points would have been called more than chance."
    )


def test_small_differences_are_told_with_their_ends(tmp_path: Path) -> None:
    run = fixture(tmp_path)
    row = run.manifests["score"]["metrics"]["tasks"][4]
    row |= {"before": 0.0012, "after": 0.00181, "ci95": [0.00012, 0.00118]}
    found = figures(run)
    said = {f["about"]: f["text"] for f in found["verdict"]["findings"]}
    assert said["Measurably better"] == (
        "translation, chrf 0.00120 to 0.00181 (+0.0006 points, 95% interval +0.0001 to +0.0012, "
        "20 items)."
    )
    card = model_card("r", "m", {"score": found}, found)
    for text in (page(found), card):
        assert "+0.0006 (+0.0001 to +0.0012)" in text
    assert "| +0.0006 | +0.0001 to +0.0012 |" in short(found)


def test_steps_that_are_not_the_same_are_told(run: SimpleNamespace) -> None:
    served = run.manifests["serve"]["metrics"]
    served["before"]["step"], served["after"]["step"] = "without modules", "as its modules are"
    served["kv_cache"] = "v8"
    said = {f["about"]: f["text"] for f in figures(run)["verdict"]["findings"]}
    assert said["Speed"].endswith(
        "(medians). The original decodes without modules, the compressed model as its modules are, "
        "since its KV cache has V in 8 bit: a part of the difference is that."
    )


TASK = {"name": "knowledge", "metric": "accuracy", "n": 30, "before": 50.0, "after": 50.0}


@pytest.mark.parametrize(
    ("row", "said", "unseen"),
    [
        ({"ci95": [-5.0, -1.0], "gained": 1, "lost": 4}, "worse", 30.637),
        ({"ci95": [-5.0, -1.0], "gained": 0, "lost": 4, "p": 0.125}, "perhaps worse", 30.722),
        ({"ci95": [-9.0, -2.0], "gained": 0, "lost": 8, "p": 0.008}, "worse", 45.889),
        ({"ci95": [-9.0, -2.0], "gained": 0, "lost": 20, "p": 0.008}, "worse", 50.0),
        ({"ci95": [1.0, 5.0], "gained": 4, "lost": 1, "p": 0.03}, "better", 13.461),
        ({"ci95": [1.0, 5.0], "gained": 3, "lost": 1, "p": 0.6}, "perhaps better", 15.105),
        ({"ci95": [1.0, 5.0], "gained": 20, "lost": 1, "p": 0.01}, "better", 0.0),
        ({"ci95": [-2.0, 3.0], "gained": 2, "lost": 2}, "unclear", 21.255),
        ({"ci95": [-5.0, 0.0], "gained": 0, "lost": 1}, "unclear", 17.217),
        ({"ci95": [0.0, 0.0], "gained": 0, "lost": 0}, "unclear", 11.570),
        ({"ci95": [0.0, 0.0], "gained": 0, "lost": 0, "n": 1}, "unclear", 50.0),
        ({"ci95": [-1.0, -1.0], "gained": 0, "lost": 1, "n": 1, "metric": "f1"}, "unclear", 1.0),
        ({"ci95": [0.0, 9.0], "gained": 1, "lost": 0, "metric": "rougeL"}, "unclear", None),
        ({"ci95": [-4.0, 9.0], "gained": 3, "lost": 2, "metric": "rougeL"}, "unclear", 4.0),
        ({"ci95": [1.0, 9.0], "gained": 9, "lost": 2, "metric": "rougeL"}, "better", 0.0),
    ],
)
def test_what_an_interval_says(row: dict[str, Any], said: str, unseen: float | None) -> None:
    task = TASK | row
    assert change(task) == said
    assert unseen_loss(task) == (None if unseen is None else pytest.approx(unseen, abs=1e-3))


def test_a_task_that_the_original_cannot_do_shows_no_loss() -> None:
    row = TASK | {"ci95": [0.0, 0.0], "gained": 0, "lost": 0, "before": 0.0, "after": 0.0}
    assert blind([row, row | {"name": "big_words", "metric": "exact_match"}]) == (
        "No loss could show where the original scores nothing: knowledge, accuracy; big words, "
        "exact match."
    )
    assert blind([]) is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"smallest_loss": 11.06}, "no loss of less than 11 points"),
        ({"n": 3, "smallest_loss": None}, "no loss"),
        ({"before": 10.0, "smallest_loss": 10.0}, "no loss of less than 10 points"),
        ({"before": 10.0, "smallest_loss": 22.5}, "no loss"),
        ({"before": 3.0, "metric": "rougeL", "smallest_loss": 3.41}, "no loss"),
        ({"metric": "rougeL", "smallest_loss": 3.41}, "no loss of less than 3.4 points"),
        ({"metric": "rougeL", "smallest_loss": None}, None),
        ({"ci95": [-9.0, -2.0], "smallest_loss": 11.06}, None),
    ],
)
def test_what_cannot_show_is_the_loss_that_the_table_has(
    row: dict[str, Any], said: str | None
) -> None:
    task = TASK | {"ci95": [-5.6, 3.0], "gained": 1, "lost": 2} | row
    items = f"{task['n']} items"
    assert blind([task]) == (
        said
        and f"No clear difference is not none: in {label(task)}, with {items}, {said} would have "
        "been called more than chance."
    )


def test_a_loss_larger_than_the_score_is_none_that_could_show(run: SimpleNamespace) -> None:
    row = run.manifests["score"]["metrics"]["tasks"][2]
    for before, shown, listed in ((15.0, "−15", "15"), (14.0, "–", "–")):
        row |= {"before": before, "after": before, "smallest_loss": 15.0}
        found = figures(run)
        cells = [line for line in page(found).splitlines() if "<td>short answers" in line]
        assert re.findall(r'<td class="n">([^<]*)</td>', cells[0])[-2] == shown
        (line,) = (line for line in short(found).splitlines() if line.startswith("| short answers"))
        assert line.split(" | ")[-1] == f"{listed} |"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{}], "the one task not measurably worse."),
        ([{"ci95": [-9.0, -2.0], "p": 0.01}], "the one task measurably worse."),
        ([{"n": 1, "ci95": [-1.0, -1.0]}], "the one task unable to show a loss."),
        ([{"n": 2, "metric": "f1", "smallest_loss": 9.0}], "the one task unable to show a loss."),
        ([{"before": 0.0}], "the one task unable to show a loss."),
        ([{"smallest_loss": None}], "the one task unable to show a loss."),
        (
            [{"n": 2, "metric": "f1", "ci95": [-26.0, -18.0], "p": 0.5, "smallest_loss": None}],
            "the one task perhaps worse.",
        ),
        ([{"smallest_loss": None, "metric": "f1"}], "the one task unable to show a loss."),
        (
            [{"smallest_loss": None, "metric": "f1", "ci95": [0.0, 0.0]}],
            "the one task not measurably worse.",
        ),
        ([{"n": 5}, {"n": 5, "name": "more"}], "none of 2 tasks able to show a loss."),
        (
            [{}, {"n": 5, "name": "more"}],
            "none of 2 tasks measurably worse (1 unable to show a loss).",
        ),
        ([{}, {"metric": "f1", "smallest_loss": None}], "the one task not measurably worse."),
    ],
)
def test_a_task_that_could_show_no_loss_does_not_reassure(
    run: SimpleNamespace, rows: list[dict[str, Any]], said: str
) -> None:
    row = TASK | {"ci95": [-5.0, 5.0], "gained": 1, "lost": 1, "p": 1.0, "smallest_loss": 20.0}
    run.manifests["score"]["metrics"]["tasks"] = [row | more for more in rows]
    run.config.score.gate = Gate()
    assert figures(run)["verdict"]["headline"].endswith(f"KL 0.012, {said}")


@pytest.mark.parametrize(("number", "told", "more"), [(5, 5, 0), (6, 6, 0), (9, 5, 4)])
def test_of_many_tasks_that_are_worse_those_that_lost_most_are_told(
    number: int, told: int, more: int
) -> None:
    rows = [
        TASK | {"name": f"t{i}", "after": 50.0 - i, "ci95": [-i - 2.0, -1.0], "p": 1e-9}
        for i in range(1, 1 + number)
    ]
    text = changed(rows, "worse")
    assert text is not None
    parts = text.removesuffix(".").split("; ")
    assert len(parts) == told + (more > 0)
    assert parts[0].startswith(f"t{9 if more else 1}, accuracy 50.0 to ")
    assert parts[0].endswith("p < 0.0001, 30 items)")
    assert (parts[-1] == f"and {more} more, in the table of tasks") == (more > 0)


def test_faults_are_in_the_headline(run: SimpleNamespace) -> None:
    scores = run.manifests["score"]["metrics"]
    assert " fault" not in figures(run)["verdict"]["headline"]
    scores["faults"] = [{"name": "EOS", "text": "EOS is missing."}]
    assert ", 1 fault found" in figures(run)["verdict"]["headline"]


def test_outputs_that_are_not_numbers_are_said_first(run: SimpleNamespace) -> None:
    scores, nan = run.manifests["score"]["metrics"], float("nan")
    scores["fidelity"] |= {"kl": nan, "kl_ci95": [nan, nan]}
    scores["fidelity"]["ppl"]["after"] = nan
    for row, number in zip(scores["tasks"], (40, 1), strict=False):
        row["not_numbers"] = {"before": 0, "after": number}
    found = figures(run)["verdict"]
    assert found["headline"] == (
        "Fixture-135M in W8A8: its outputs are not numbers, 33% smaller, decode 1.63×\u00a0faster, "
        "1 of 5 tasks measurably worse, the recipe's gate is broken."
    )
    assert found["findings"][0] == {
        "about": "Not numbers",
        "text": (
            "The compressed model gives outputs that are not finite numbers: the KL on held-out "
            "text, 40 of 40 answers of knowledge and 1 of 40 answers of commonsense. Answers of "
            "such likelihoods count as wrong; no other figure says that it can be used."
        ),
        "tone": "bad",
    }
    said = {f["about"]: f["text"] for f in found["findings"]}["Closeness"]
    assert said.startswith("KL to the original is not a finite number; the original as served is")
    assert said.endswith("Perplexity was 29.22 and is not a finite number any more.")

    scores["tasks"] = scores["tasks"][1:]
    found = figures(run)["verdict"]
    assert "its outputs are not numbers" in found["headline"]
    assert "measurably worse" not in found["headline"]


def test_few_answers_are_called_perhaps(run: SimpleNamespace) -> None:
    run.manifests["score"]["metrics"]["tasks"][0]["p"] = 0.125
    found = figures(run)
    said = {f["about"]: f["text"] for f in found["verdict"]["findings"]}
    assert "none of 5 tasks measurably worse (1 perhaps" in found["verdict"]["headline"]
    assert "p 0.12" in said["Perhaps worse"]
    assert "perhaps worse" in page(found)


def test_a_broken_gate_is_said_first(run: SimpleNamespace) -> None:
    said = figures(run)["verdict"]["findings"][0]
    assert said == {
        "about": "It passes the recipe's gate",
        "text": "KL at most 0.05 nats a token; knowledge, accuracy at most 12 points lower.",
        "tone": "good",
    }
    run.config.score.gate = Gate(token_ms=200.0)
    said = figures(run)["verdict"]["findings"][0]
    assert said["text"].endswith("a token, at most 200 ms allowed. No limit is set on quality.")
    assert said["tone"] == "plain"
    run.config.score.gate = Gate(kl=0.012, tasks={"knowledge": 12.0})
    found = figures(run)
    assert found["gate"] == {
        "kl": 0.012,
        "tasks": {"knowledge": 12.0},
        "token_ms": None,
        "faults": None,
        "broken": ["KL 0.0124 nats a token, at most 0.012 allowed"],
    }
    assert found["verdict"]["findings"][0]["tone"] == "bad"
    assert found["verdict"]["headline"].endswith("the recipe's gate is broken.")
    assert "KL 0.0124 nats a token, at most 0.012 allowed." in page(found)


def test_the_time_of_a_token_is_said_beside_its_limit(run: SimpleNamespace) -> None:
    run.config.score.gate.token_ms = 200
    found = figures(run)
    assert found["gate"]["token_ms"] == 200
    assert found["gate"]["broken"] == []
    passed = (
        "knowledge, accuracy at most 12 points lower; 12.3\u00a0ms a token, at most 200 ms allowed."
    )
    assert found["verdict"]["findings"][0]["text"].endswith(passed)
    assert all(passed in text(found) for text in (page, short))

    run.config.score.gate.token_ms = 12
    found = figures(run)
    reason = "12.3 ms a token, at most 12 allowed"
    assert found["gate"]["broken"] == [reason]
    first = {"about": "It fails the recipe's gate", "text": f"{reason}.", "tone": "bad"}
    assert found["verdict"]["findings"][0] == first
    assert found["verdict"]["headline"].endswith("the recipe's gate is broken.")
    assert all(f"{reason}." in text(found) for text in (page, short))


def test_without_scores_the_time_of_a_token_alone_is_checked(tmp_path: Path) -> None:
    run = fixture(tmp_path, "score")
    run.config.score.gate.token_ms = 200
    found = figures(run)
    assert found["gate"] == {
        "kl": None,
        "tasks": {},
        "token_ms": 200,
        "faults": None,
        "broken": [],
    }
    first = found["verdict"]["findings"][0]
    assert (
        first["text"] == "12.3\u00a0ms a token, at most 200 ms allowed. No limit is set on quality."
    )


def test_a_fault_that_was_found_is_named_first(run: SimpleNamespace) -> None:
    fault = {"name": "RoPE", "text": "The checkpoint's RoPE is wrong: factor is 2, should be 1."}
    run.manifests["score"]["metrics"]["faults"] = [fault]
    found = figures(run)
    first = {"about": "Fault found: RoPE", "text": fault["text"], "tone": "bad"}
    assert found["verdict"]["findings"][0] == first


def test_without_limits_or_scores_nothing_is_said_of_a_gate(tmp_path: Path) -> None:
    run = fixture(tmp_path)
    run.config.score.gate = Gate()
    for found in (figures(run), figures(fixture(tmp_path, "score"))):
        assert found["gate"] is None
        assert not any("gate" in f["about"] for f in found["verdict"]["findings"])


def test_without_scores_the_quantizer_is_quoted(tmp_path: Path) -> None:
    said = {
        f["about"]: f["text"] for f in figures(fixture(tmp_path, "score"))["verdict"]["findings"]
    }
    assert said["Closeness"] == (
        "Held-out KL to the original was 0.0131 nats a token after quantization; "
        "the checkpoint itself was not scored."
    )
