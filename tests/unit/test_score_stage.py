"""The score stage on a small random model and a disturbed copy of it: figures, files, resuming."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from compress.errors import ConfigError, UserError
from compress.eval import judge, sheet, written
from compress.eval.answers import Answer
from compress.eval.items import items
from compress.eval.own import named
from compress.model_path import Model
from compress.report.tasks import unasked
from compress.stage import Run
from compress.stages.score import Score
from compress.stages.serve import Serve
from compress.text.documents import Data

FEW = ["commonsense", "short_answers", "translation"]
SETTINGS = {"windows": 2, "window_tokens": 80, "limit": 2, "max_new_tokens": 4, "batch_size": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(dense, checkpoint): models of bytes with a context of 1024."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)} | {"</s>": 257}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>")
    for name in ("dense", "checkpoint"):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        with torch.no_grad():
            for weight in model.model.layers.parameters():
                weight += 0.1 * torch.randn(weight.shape)
    return root / "dense", root / "checkpoint"


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "held_out.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return str(file)


def run_of(folders, work: Path, kv_cache: str = "16") -> Run:
    work.mkdir(parents=True, exist_ok=True)
    config = SimpleNamespace(
        device="cpu", seed=0, data=Data(), model=Model(), serve=Serve(kv_cache=kv_cache)
    )
    dense, checkpoint = folders
    return Run(config, {"dense": dense, "checkpoint": checkpoint}, work, {})


@pytest.fixture
def loads(monkeypatch):
    """The models loaded, in order, by folder and dtype."""
    found, load = [], judge.load

    def counted(folder, **options):
        found.append((folder.name, options["dtype"]))
        return load(folder, **options)

    monkeypatch.setattr(judge, "load", counted)
    return found


def test_scores_and_outputs_are_written(folders, text, tmp_path, loads):
    scores = Score(text=text, **SETTINGS).run(run_of(folders, tmp_path / "work"), tmp_path)
    assert loads == [("dense", torch.float32), ("dense", None), ("checkpoint", None)]
    close = scores["fidelity"]
    assert close["kl"] > 0.01
    assert abs(close["kl_floor"]) < 1e-6  # stored in float32, so served in it
    assert close["kl_ci95"][0] <= close["kl"] <= close["kl_ci95"][1]
    assert 0 < close["top1"] < 1
    assert close["ppl"]["before"] != close["ppl"]["after"]
    assert (close["windows"], close["window_tokens"]) == (2, 80)
    assert close["text"] == "held_out.txt"
    assert len(close["by_window"]["kl"]) == 2
    worst = close["worst"]
    assert len(worst) == 8
    assert close["kl"] < worst[-1]["kl"] <= worst[0]["kl"]
    assert all(place["text"] + place["follows"] in Path(text).read_text() for place in worst)
    assert [(row["name"], row["metric"]) for row in scores["tasks"]] == [
        ("knowledge", "normalized_accuracy"),
        ("commonsense", "accuracy"),
        ("cloze", "accuracy"),
        ("cloze", "likelihood"),
        ("short_answers", "exact_match"),
        ("short_answers", "contained"),
        ("summaries", "rougeL"),
        ("summaries", "entities"),
        ("translation", "chrf"),
        ("translation", "bleu"),
        ("structured", "accuracy"),
        ("boundary", "accuracy"),
    ]
    for row in scores["tasks"]:
        assert 0 <= row["before"] <= 100
        assert row["ci95"][0] <= row["ci95"][1]
        assert row["gained"] + row["lost"] <= row["n"] <= 2
    assert json.loads((tmp_path / "scores.json").read_text()) == scores
    lines = (tmp_path / "outputs.jsonl").read_text(encoding="utf-8").splitlines()
    outputs = [json.loads(line) for line in lines]
    assert {o["task"] for o in outputs if o["why"] == "boundary case failed"} == {"boundary"}
    assert any(o["before"] != o["after"] for o in outputs)


def test_items_that_do_not_fit_the_window_are_counted(folders, text, tmp_path, caplog):
    # Less two of the prompt and the answer; the third items are not taken, see the limit.
    lengths = {"long": [1022, 2000, 9], "mixed": [1021, 1022, 9]}
    for name, sizes in lengths.items():
        records = [{"question": "x" * n, "choices": ["a", "b"], "gold": 0} for n in sizes]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        (tmp_path / f"{name}.yaml").write_text(
            f"kind: choice\nmetrics: [accuracy]\ndata: {name}.jsonl\nprompt: '{{question}} :'\n"
        )
    tasks = [str(tmp_path / f"{name}.yaml") for name in lengths]
    run = run_of(folders, tmp_path / "work")
    with caplog.at_level("INFO", logger="compress"):
        scores = Score(text=text, **SETTINGS, tasks=tasks).run(run, tmp_path)
    assert [(row["name"], row["n"]) for row in scores["tasks"]] == [("mixed", 1)]
    assert "mixed, accuracy: " in caplog.text
    assert " (1 item, " in caplog.text
    assert scores["unasked"] == [
        {"name": "long", "fit": 0, "of": 2, "context": 1024},
        {"name": "mixed", "fit": 1, "of": 2, "context": 1024},
    ]
    window = "the window of 1,024 tokens, prompt and answer together"
    assert [unasked(task) for task in scores["unasked"]] == [
        f"long was not asked: none of the 2 items taken fits {window}.",
        f"mixed was asked 1 of the 2 items taken: the other does not fit {window}.",
    ]
    assert all(f"  {unasked(task)}" in caplog.text for task in scores["unasked"])
    assert json.loads((tmp_path / "scores.json").read_text()) == scores


def test_what_changes_in_answers_beside_their_scores_is_counted():
    task = named(["summaries"])[0]
    before = [Answer("1", "Two words."), Answer("2", "no " * 20), Answer("3", "长度三")]
    after = [Answer("1", "Two words."), Answer("2", ""), Answer("3", "三")]
    (found,) = sheet.drift(task, before, after)
    assert (found["n"], found["same"]) == (3, 1)
    assert found["length"] == {"before": 25 / 3, "after": 1.0}
    assert found["loops"] == {"before": 1, "after": 0}
    assert sheet.drift(named(["cloze"])[0], before, after) == []


def test_a_model_beside_itself_has_lost_nothing(folders, text, tmp_path):
    dense, _ = folders
    run = run_of((dense, dense), tmp_path / "work")
    scores = Score(text=text, tasks=FEW, **SETTINGS).run(run, tmp_path)
    assert abs(scores["fidelity"]["kl"]) < 1e-6
    assert scores["fidelity"]["top1"] == 1.0
    for row in scores["tasks"]:
        assert row["before"] == row["after"]
        assert (row["gained"], row["lost"], row["p"], row["ci95"]) == (0, 0, 1.0, [0.0, 0.0])


def test_what_the_kv_cache_costs_is_scored(folders, tmp_path):
    dense, _ = folders
    file = tmp_path / "long.txt"
    file.write_text("".join(f"Line {i} of the held-out text.\n" for i in range(60)))
    settings = SETTINGS | {"window_tokens": 300}
    score = Score(text=str(file), tasks=FEW, **settings)
    found = score.run(run_of((dense, dense), tmp_path / "work", "kv8"), tmp_path)
    assert found["fidelity"]["kv_cache"] == "kv8"
    assert abs(found["fidelity"]["kl_floor"]) < 1e-7 < found["fidelity"]["kl"] < 1e-3


def test_a_killed_run_goes_on_and_ends_in_the_same_scores(
    folders, text, tmp_path, loads, monkeypatch
):
    score = Score(text=text, tasks=FEW, **SETTINGS)
    whole = score.run(run_of(folders, tmp_path / "whole"), tmp_path)
    work, ask, asked = tmp_path / "killed", judge.ask, []

    def killed(model, tokenizer, task, its, **options):
        asked.append(task.name)
        if len(asked) == 5:  # the compressed model's second task
            raise KeyboardInterrupt
        return ask(model, tokenizer, task, its, **options)

    monkeypatch.setattr(judge, "ask", killed)
    with pytest.raises(KeyboardInterrupt):
        score.run(run_of(folders, work), tmp_path)
    loads.clear()
    again = score.run(run_of(folders, work), tmp_path)
    assert asked == [*FEW, "commonsense", "short_answers", "short_answers", "translation"]
    assert loads == [("checkpoint", None)]
    assert again == whole


def test_what_was_kept_for_other_questions_is_not_used(folders, text, tmp_path, loads):
    run = run_of(folders, tmp_path / "work")
    Score(text=text, **SETTINGS, tasks=["knowledge"]).run(run, tmp_path)
    loads.clear()
    Score(text=text, **(SETTINGS | {"limit": 1}), tasks=["knowledge"]).run(run, tmp_path)
    assert len(loads) == 3


def test_what_the_original_answered_serves_other_runs_of_it(folders, text, tmp_path, loads):
    _, checkpoint = folders
    kept = tmp_path / "originals"
    score = Score(text=text, originals=str(kept), **SETTINGS)
    first = score.run(run_of(folders, tmp_path / "first"), tmp_path)
    del loads[:]
    assert score.run(run_of(folders, tmp_path / "second"), tmp_path) == first
    assert loads == [("checkpoint", None)]
    del loads[:]
    # Another original, and other questions, are asked anew.
    score.run(run_of((checkpoint, checkpoint), tmp_path / "third"), tmp_path)
    score = Score(text=text, originals=str(kept), **SETTINGS | {"limit": 1})
    score.run(run_of(folders, tmp_path / "fourth"), tmp_path)
    assert loads == [
        *[("checkpoint", dtype) for dtype in (torch.float32, None, None)],
        ("dense", torch.float32), ("dense", None), ("checkpoint", None),
    ]  # fmt: skip
    assert len(list(kept.rglob("reference.safetensors"))) == 3


def test_windows_that_do_not_fit_are_shortened_in_words(folders, text, tmp_path, caplog):
    score = Score(text=text, tasks=["translation"], limit=1, max_new_tokens=2, windows=5)
    with caplog.at_level("INFO", logger="compress"):
        found = score.run(run_of(folders, tmp_path / "work"), tmp_path)["fidelity"]
    assert (found["windows"], found["window_tokens"]) == (1, 900)
    assert "1 window of 900 tokens instead of 5 of 1024, since the text is shorter" in caplog.text


def test_the_datas_held_out_part_is_the_default(folders, tmp_path):
    score = Score(tasks=["translation"], limit=1, max_new_tokens=2, windows=1, window_tokens=64)
    found = score.run(run_of(folders, tmp_path / "work"), tmp_path)["fidelity"]
    assert "documentation in Python" in found["text"]


def test_bad_input_is_told_in_one_line(folders, tmp_path):
    run = run_of(folders, tmp_path / "work")
    with pytest.raises(UserError, match=r"score\.text=missing\.txt: cannot be read"):
        Score(text="missing.txt").run(run, tmp_path)
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(UserError, match="at least one window of 64 tokens"):
        Score(text=str(tmp_path / "short.txt")).run(run, tmp_path)


def test_all_wrong_fields_are_told_together():
    with pytest.raises(ConfigError) as error:
        Score(windows=0, limit=0, window_tokens=32, tasks=["trivia"])
    assert error.value.problems == [
        "score.windows is 0; wanted at least 1",
        "score.window_tokens is 32; wanted at least 64",
        "score.limit is 0; wanted at least 1",
        "score.tasks: no suite called trivia; there are knowledge, commonsense, cloze, "
        "short_answers, summaries, translation, structured, boundary, and a task of your own is "
        "named by its .yaml file",
    ]


def test_a_task_of_ones_own_is_scored_beside_the_bundled(folders, text, tmp_path):
    (tmp_path / "wines.yaml").write_text("data: wines.jsonl\nkind: cloze\nprompt: '{text}'\n")
    (tmp_path / "wines.jsonl").write_text('{"text": "Red or", "references": "white"}\n')
    score = Score(text=text, tasks=["knowledge", str(tmp_path / "wines.yaml")], **SETTINGS)
    found = score.run(run_of(folders, tmp_path / "work"), tmp_path)
    assert [(row["name"], row["n"]) for row in found["tasks"]] == [("knowledge", 2), ("wines", 1)]


def test_the_kl_along_an_answer_is_that_of_both_models_reading_it(folders, text, tmp_path):
    score = Score(text=text, tasks=["knowledge", "short_answers"], **SETTINGS)
    score.run(run_of(folders, tmp_path / "work"), tmp_path)
    lines = (tmp_path / "outputs.jsonl").read_text(encoding="utf-8").splitlines()
    outputs = {(o["task"], o["id"]): o for o in map(json.loads, lines)}
    assert {o["kl"] for (task, _), o in outputs.items() if task == "knowledge"} == {None}
    (task,) = named(["short_answers"])
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    for item in items(task, 2):
        output = outputs["short_answers", item.id]
        prompt, answer = (tokenizer(t).input_ids for t in (item.prompt, output["before"]))
        with torch.no_grad():
            p, q = (
                model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :].log_softmax(-1)
                for model in models
            )
        assert output["before"] != output["after"]
        assert len(p) == len(answer) + 1
        assert output["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)


def test_of_many_answers_some_are_read(folders, text, tmp_path, monkeypatch):
    monkeypatch.setattr(written, "MOST", 2)
    score = Score(text=text, tasks=["short_answers"], outputs=9, **SETTINGS | {"limit": 7})
    score.run(run_of(folders, tmp_path / "work"), tmp_path)
    lines = (tmp_path / "outputs.jsonl").read_text(encoding="utf-8").splitlines()
    outputs = {o["id"]: o for o in map(json.loads, lines)}
    ids = [item.id for item in items(named(["short_answers"])[0], 7)]
    differ = [i for i in ids if outputs[i]["before"] != outputs[i]["after"]]
    assert len(differ) > 3
    known = [i for i in ids if outputs[i]["kl"] is not None]
    assert known == [differ[0], differ[len(differ) // 2]]


def test_models_that_write_the_same_are_not_loaded_again(folders, text, tmp_path, monkeypatch):
    monkeypatch.setattr(written, "load", lambda *_, **__: pytest.fail("loaded"))
    dense, _ = folders
    score = Score(text=text, tasks=["short_answers"], **SETTINGS)
    score.run(run_of((dense, dense), tmp_path / "work"), tmp_path)


def record(name, before, after, change=0.0, broken=(), kl=None):
    return {
        "id": name,
        "task": "boundary" if broken else "summaries",
        "before": before,
        "after": after,
        "score_before": 50.0,
        "score_after": 50.0 + change,
        "broken_before": [],
        "broken_after": list(broken),
        "kl": kl,
    }


def test_the_sheet_shows_failures_differences_the_largest_kl_and_a_draw():
    records = [record(f"same-{i}", "a", "a") for i in range(30)]
    records += [record("worse", "a", "b", -40.0, kl=3.0), record("better", "a", "b", 20.0, kl=9.0)]
    records += [record("worst", "a", "b", kl=float("nan")), record("far", "a", "b", kl=2.0)]
    records += [record("near", "a", "b", kl=0.1), record("failed", "a", "", broken=["not_empty"])]
    records += [record("slightly", "a", "b", 1.0, kl=0.01)]
    found = sheet.select(records, 8, seed=0)
    assert [(o["why"], o["id"]) for o in found[:5]] == [
        ("boundary case failed", "failed"),
        ("largest difference", "worse"),
        ("largest difference", "better"),
        ("largest KL", "worst"),
        ("largest KL", "far"),
    ]
    assert [o["why"] for o in found[5:]] == ["drawn by chance"] * 4
    assert len({o["id"] for o in found}) == 9
    assert found == sheet.select(records, 8, seed=0)
    drawn = [o["id"] for o in sheet.select(records, 8, seed=1) if o["why"] == "drawn by chance"]
    assert drawn != [o["id"] for o in found[5:]]
