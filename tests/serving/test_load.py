"""The load bench: what it asks, how it counts, what it says."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compress import bench
from compress.errors import UserError
from compress.runtime.load import figures
from compress.runtime.load.drive import Course, continuous, static
from compress.runtime.load.workload import MIXES, LoadRequest, arrivals, requests
from compress.runtime.loader import load
from compress.runtime.server.limits import Limits


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def written(folder: Path, *rows: Any) -> str:
    file = folder / "asked.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def test_arrivals_are_a_poisson_process() -> None:
    came = arrivals(4000, 5.0, seed=1)
    gaps = np.diff(came)
    assert came[0] == 0
    assert came == arrivals(4000, 5.0, seed=1) != arrivals(4000, 5.0, seed=2)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.1)  # of an exponential: its mean


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_has_its_medians(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    made = requests(name, 600, tokenizer, 1 << 20, seed=0)
    assert made == requests(name, 600, tokenizer, 1 << 20, seed=0)
    mix = MIXES[name]
    prompts, answers = [len(r.prompt) for r in made], [r.new_tokens for r in made]
    assert np.median(prompts) == pytest.approx(mix.prompt.median, rel=0.15)
    assert np.median(answers) == pytest.approx(mix.answer.median, rel=0.15)
    assert max(max(r.prompt) for r in made) < len(tokenizer)
    whole = requests(name, 100, tokenizer, 1 << 20, seed=0)
    for long, short in zip(whole, requests(name, 100, tokenizer, 64, seed=0), strict=True):
        assert len(short.prompt) + short.new_tokens <= 64
        assert short.cut == (len(long.prompt) + long.new_tokens > 64)
        assert short.new_tokens <= 32 if short.cut else short == long


def test_a_line_that_does_not_fit_is_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    file = written(tmp_path, {"prompt_tokens": 60, "new_tokens": 5})
    assert requests(file, 2, tokenizer, 65, seed=0)[0].new_tokens == 5
    message = "line 1: the prompt has 60 tokens and the answer 5; wanted at most 64 together, the"
    with pytest.raises(UserError, match=message):
        requests(file, 2, tokenizer, 64, seed=0)


def test_how_many_are_cut_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "compress")
    words = [f"checkpoint={folder}", "workload=chat", "requests=3", "kv_tokens=64", "device=cpu"]
    bench.main([*words, "seed=1", "rate=50", f"out={tmp_path}"])
    cut = json.loads((tmp_path / "load.json").read_text())["cut"]
    assert cut > 0
    assert f"{cut} of 3 requests are cut to the context of 64 tokens" in caplog.messages
    assert f"{cut} of 3 did not fit into the context and were cut." in (
        (tmp_path / "load.html").read_text()
    )


def test_a_file_of_real_requests_is_read(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ids = tokenizer("Once upon a time").input_ids
    answer = tokenizer(" there was a dog", add_special_tokens=False).input_ids
    turns = [
        {"role": "user", "content": "Once upon a"},
        {"role": "assistant", "content": " there was a dog"},
    ]
    for row, prompt, new in (
        ({"prompt_tokens": 7, "new_tokens": 3}, None, 3),
        ({"prompt": "Once upon a time", "answer": " there was a dog"}, ids, len(answer)),
        ({"prompt": "Once upon a time", "new_tokens": 9}, ids, 9),
        ({"messages": turns}, tokenizer("Once upon a ").input_ids, len(answer)),
    ):
        (first, again) = requests(written(tmp_path, row), 2, tokenizer, 512, seed=0)
        assert (first.new_tokens, again.new_tokens) == (new, new)
        assert len(first.prompt) == 7 if prompt is None else first.prompt == prompt
    rows = [{"prompt_tokens": n, "new_tokens": 2} for n in range(1, 21)]
    drawn = requests(written(tmp_path, *rows), 20, tokenizer, 512, seed=0)
    assert sorted(len(request.prompt) for request in drawn) == list(range(1, 21))


def test_answers_of_one_token_are_measured_beside_longer_ones(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    one, two = ({"prompt_tokens": 4, "new_tokens": n} for n in (1, 2))
    found = requests(written(tmp_path, one, two, one), 3, tokenizer, 512, seed=0)
    assert sorted(request.new_tokens for request in found) == [1, 1, 2]
    with pytest.raises(UserError, match="all answers have one token; wanted one of 2 at least"):
        requests(written(tmp_path, one, one), 2, tokenizer, 512, seed=0)
    empty = {"prompt_tokens": 4, "answer": ""}
    found = requests(written(tmp_path, empty, two), 2, tokenizer, 512, seed=0)
    assert sorted(request.new_tokens for request in found) == [1, 2]
    with pytest.raises(UserError, match="the prompt has 600 tokens and the answer 1; wanted"):
        requests(written(tmp_path, {**one, "prompt_tokens": 600}), 2, tokenizer, 512, seed=0)


@pytest.mark.parametrize("row", [{}, [], {"prompt": "a"}, {"prompt": "", "new_tokens": 4}, "{"])
def test_a_line_that_says_too_little_is_named(
    row: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"asked.jsonl, line 1: wanted prompt \(text\) or"):
        requests(written(tmp_path, row), 2, tokenizer, 512, seed=0)
    (tmp_path / "asked.jsonl").write_text("\n{")
    with pytest.raises(UserError, match=r"asked.jsonl, line 2: no JSON: Expecting"):
        requests(str(tmp_path / "asked.jsonl"), 2, tokenizer, 512, seed=0)
    (tmp_path / "asked.jsonl").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"asked.jsonl: no UTF-8 text"):
        requests(str(tmp_path / "asked.jsonl"), 2, tokenizer, 512, seed=0)
    turn = {"role": "assistant", "content": "a"}
    with pytest.raises(UserError, match="line 1: the chat template refuses it: ends with"):
        requests(written(tmp_path, {"messages": [turn, turn]}), 2, tokenizer, 512, seed=0)
    (tmp_path / "asked.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"asked.jsonl: no requests in it"):
        requests(str(tmp_path / "asked.jsonl"), 2, tokenizer, 512, seed=0)
    with pytest.raises(UserError, match="workload=chats: no such file; wanted a JSONL file, or "):
        requests("chats", 2, tokenizer, 512, seed=0)


def test_latencies_are_counted_from_the_arrival() -> None:
    courses = [Course(1.0, [1.5, 1.6, 1.8]), Course(2.0, [2.1, 2.2])]
    found = figures.latencies(courses)
    assert found["ttft_ms"]["p50"] == pytest.approx(300)
    assert found["tpot_ms"]["mean"] == pytest.approx(400 / 3)
    assert found["tpot_ms"]["p99"] == pytest.approx(198)
    assert found["whole_ms"]["p50"] == pytest.approx(500)


@pytest.mark.parametrize(
    ("prefill_s", "compute", "memory", "headline", "reason"),
    [
        (3.0, 0.8, 0.1, "Prefill takes 75% of this load's time", "80% of .* Arithmetic bounds it"),
        (0.2, 0.1, 0.7, "Decode takes 83% of this load's time", "70% of .* Reading the weights"),
        (0.2, 0.3, 0.2, "Decode takes 83% of this load's time", "Neither bounds it"),
    ],
)
def test_the_verdict_names_the_longer_half(
    prefill_s: float, compute: float, memory: float, headline: str, reason: str
) -> None:
    shares = {"compute_share": compute, "memory_share": memory}
    halves = {"prefill": {"seconds": prefill_s} | shares, "decode": {"seconds": 1.0} | shares}
    found = figures.verdict(halves)
    assert found[0] == headline
    assert re.search(reason, found[1])


def test_a_load_gets_every_token_and_leaves_the_model_as_it_was(folder: Path) -> None:
    model = load(folder)
    ids = torch.arange(3, 23).unsqueeze(0)
    before = model(input_ids=ids).logits
    asked = [
        LoadRequest(list(range(5, 5 + n)), new) for n, new in ((3, 9), (30, 2), (11, 5), (2, 12))
    ]
    limits = Limits(running=2, waiting=4, kv_tokens=256)
    drive = continuous(model, asked, limits, arrivals=[0.0, 0.0, 0.1, 0.2])
    assert [len(course.tokens) for course in drive.courses] == [9, 2, 5, 12]
    # Tokens that came while the event loop was busy come together.
    assert all(course.ttft > 0 and min(course.gaps) >= 0 for course in drive.courses)
    assert drive.courses[3].arrival == 0.2 < drive.courses[3].tokens[0] <= drive.seconds
    assert 12 <= drive.forwards <= 28
    # On a busy machine one may be over before the next has come; never are there more.
    assert 32 <= drive.kv_tokens_most <= 128
    assert 1 <= max(moment.running for moment in drive.moments) <= 2
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_static_batch_makes_every_token_past_the_end_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    generate, made = model.generate, []

    def counted(**arguments: Any) -> torch.Tensor:
        tokens = generate(**arguments)
        made.append(tokens[:, arguments["input_ids"].shape[1] :])
        return tokens

    monkeypatch.setattr(model, "generate", counted)
    asked = [LoadRequest([5, 6, 7], 9), LoadRequest([8], 4), LoadRequest([9, 10], 6)]
    static(model, asked, 2)
    assert [tuple(tokens.shape) for tokens in made] == [(2, 9), (1, 6)]
    model.generation_config.eos_token_id = int(made[1][0, 1])
    static(model, asked, 2)
    assert [tuple(tokens.shape) for tokens in made[2:]] == [(2, 9), (1, 6)]


def test_the_command_writes_a_page_and_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt_tokens": 5, "new_tokens": 4}, {"prompt_tokens": 20, "new_tokens": 9}]
    words = [f"checkpoint={folder}", f"workload={written(tmp_path, *rows)}", "requests=4"]
    bench.main([*words, "rounds=2", "running=2", "rate=50", f"out={tmp_path}", "device=cpu"])
    found = json.loads((tmp_path / "load.json").read_text())
    assert found["lengths"]["prompt_tokens"]["total"] == 2 * 25
    batching, opened, halves = found["batching"], found["open_loop"], found["halves"]
    assert batching["ratio"] == pytest.approx(
        batching["continuous"]["tokens_per_s"] / batching["static"]["tokens_per_s"]
    )
    assert len(batching["rounds"]) == 2
    cpu = {
        way: median(turn[f"{way}_cpu_s"] for turn in batching["rounds"])
        for way in ("static", "continuous")
    }
    assert batching["cpu_ratio"] == pytest.approx(cpu["static"] / cpu["continuous"])
    assert opened["rate"] == 50
    assert found["cut"] == 0
    assert "were cut" not in (tmp_path / "load.html").read_text()
    assert found["attention"] == "SDPA, the heads of a group together"
    assert [set(r) for r in opened["requests"]] == [{"arrival_s", "ttft_s", "whole_s"}] * 4
    assert halves["prefill"]["tokens"] == 50
    assert halves["decode"]["tokens"] == 2 * (4 + 9) - 4
    assert halves["prefill"]["forwards"] <= 4 < halves["decode"]["forwards"]
    page = (tmp_path / "load.html").read_text()
    assert found["verdict"]["headline"].replace("'", "&#39;") in page
    assert page.count("<svg") > 3
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "times static" in capsys.readouterr().out


def test_a_mistake_in_the_options_is_one_line_and_leaves_no_folder(
    folder: Path, tmp_path: Path
) -> None:
    for words, message in (
        (["checkpoint=a", "requests=1"], "requests is 1; wanted at least 2"),
        (["checkpoint=a", "rate=0"], "rate is 0.0; wanted above 0, or null"),
        (["checkpoint=a", "rate=nan"], "rate is nan; wanted above 0, or null"),
        (["checkpoint=a", "running=0"], "running is 0; wanted at least 1"),
        (["checkpoint=nowhere"], "nowhere: no config.json there"),
        (["checkpoint=~/nowhere"], f"{Path.home()}/nowhere: no config.json there"),
        (["checkpoint=~no-user/x"], "~no-user/x: no config.json there"),
        ([f"checkpoint={folder}", "workload=chats"], "workload=chats: no such file"),
        ([f"checkpoint={folder}", "workload=~no-user/x"], "workload=~no-user/x: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            bench.main([f"out={tmp_path / 'runs' / 'load'}", *words])
    assert not (tmp_path / "runs").exists()
