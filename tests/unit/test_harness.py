"""Our local kinds of task answer as lm-evaluation-harness does, item by item."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from compress import harness
from compress.errors import UserError
from compress.eval.answers import ask, score
from compress.eval.judge import questions
from compress.eval.own import read
from compress.report.tasks import change, label
from compress.runtime.loader import load

ITEMS = {"stories260k": 100, "smollm2": 30}
"""So many of each set, by model: the larger answers a few a second."""

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is not installed (pip install '.[harness]')"
)

OURS = {
    "hellaswag": "data: {data}\nkind: choice\nprompt: '{{query}}'\n"
    "metrics: [accuracy, normalized_accuracy]\n",
    "lambada": "data: {data}\nkind: cloze\nprompt: '{{context}}'\nfields: {{references: target}}\n",
}
THEIRS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{gold}}",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "lambada": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' '+target}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
}
FILES = {"hellaswag": "hellaswag_val.jsonl", "lambada": "lambada_openai_test.jsonl"}
COARSE = {"hellaswag": 1.0, "lambada": 0.25}
"""Nats that bfloat16 may move a likelihood by. A logit above 16 has steps of 1/8; the harness reads
a context with each ending, we once, and either way SmolLM2's endings are 0.2 nats off those of
float32 (root mean square)."""
METRICS = {
    "hellaswag": {"acc": "accuracy", "acc_norm": "normalized_accuracy"},
    "lambada": {"acc": "accuracy"},
}


@needs_harness
@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("folder", ITEMS)
def test_every_item_is_judged_as_the_harness_does(
    folder: str, name: str, shared_data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    original: Path = request.getfixturevalue(folder)
    data = shared_data / FILES[name]
    (tmp_path / "own.yaml").write_text(OURS[name].format(data=data))
    tokenizer = AutoTokenizer.from_pretrained(original)
    model = load(original)
    context = model.config.max_position_embeddings
    (((task, its),), _) = questions(
        [read(tmp_path / "own.yaml")], ITEMS[folder], tokenizer, context
    )
    answers = ask(model, tokenizer, task, its, batch_size=1)
    rows = score(task, its, answers)
    local = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    config = {"task": name, "test_split": "test", **local, **THEIRS[name]}
    found = harness.evaluate(original, [config], limit=ITEMS[folder], batch_size=1)
    samples = {sample["doc"]["id"]: sample for sample in found["samples"][name]}
    for theirs, ours in METRICS[name].items():
        wanted = [samples[item.id][theirs] for item in its]
        assert rows[ours][:, 0].tolist() == wanted
        assert sum(wanted) > 0 or (folder, name) == ("stories260k", "lambada")  # too hard for it
    for answer in answers:
        likelihoods = [response[0] for response in samples[answer.id]["filtered_resps"]]
        exact = model.dtype == torch.float32
        close = {"rel": 1e-4} if exact else {"rel": 1e-2, "abs": COARSE[name]}
        assert answer.likelihoods == pytest.approx(likelihoods, **close)


def sample(item: int, **metrics: Any) -> dict[str, Any]:
    return {"doc_id": item, "filter": "none", "metrics": list(metrics), **metrics}


def test_items_of_two_results_are_compared_one_by_one() -> None:
    sides = {"before": [1.0, 1.0, 1.0, 0.0], "after": [0.0, 1.0, 1.0, 1.0]}
    results = {
        when: {
            "samples": {
                "quiz": [
                    sample(item, acc=right, f1=0.5 * right, perplexity=(-3.0, 2))
                    for item, right in enumerate(values)
                ][:: 1 if when == "before" else -1]  # in whatever order
            }
        }
        for when, values in sides.items()
    }
    accuracy, f1 = harness.paired(results["before"], results["after"])
    assert (accuracy["name"], accuracy["metric"], f1["metric"]) == ("quiz", "acc", "f1")
    assert (accuracy["n"], accuracy["before"], accuracy["after"]) == (4, 75.0, 75.0)
    assert (accuracy["gained"], accuracy["lost"], accuracy["p"]) == (1, 1, 1.0)
    assert accuracy["smallest_loss"] is None  # four items cannot show any
    assert (f1["before"], f1["ci95"]) == (37.5, [-37.5, 37.5])
    assert label(f1) == "quiz, f1"
    assert change(f1) == "unclear"


def test_answers_that_are_read_in_two_ways_are_two_metrics() -> None:
    results = {
        "samples": {
            "sums": [
                {**sample(0, exact_match=1.0), "filter": "strict-match"},
                {**sample(0, exact_match=0.0), "filter": "flexible-extract"},
            ]
        }
    }
    found = {row["metric"]: row["before"] for row in harness.paired(results, results)}
    assert found == {"exact_match, strict-match": 100.0, "exact_match, flexible-extract": 0.0}


@needs_harness
@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
def test_the_command_sets_a_model_beside_its_original(
    stories260k: Path, shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"task": "local_hellaswag", "test_split": "test", "dataset_path": "json"}
    config |= {"dataset_kwargs": {"data_files": {"test": str(shared_data / FILES["hellaswag"])}}}
    (tmp_path / "local.yaml").write_text(yaml.safe_dump(config | THEIRS["hellaswag"]))
    words = [f"folder={stories260k}", f"original={stories260k}", "limit=4", "shots=0"]
    harness.main([*words, f"tasks={tmp_path / 'local.yaml'}", f"out={tmp_path / 'out.json'}"])
    said = capsys.readouterr().out
    rows = json.loads(said[said.index("[\n") :])
    assert {(row["metric"], row["n"], row["gained"], row["lost"]) for row in rows} == {
        ("acc", 4, 0, 0),
        ("acc_norm", 4, 0, 0),
    }
    assert json.loads((tmp_path / "out.json").read_text()).keys() == {"before", "after", "paired"}


def test_where_the_result_goes_is_settled_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Path] = []

    def evaluate(folder: Path, tasks: list[str], **_: object) -> dict[str, Any]:
        measured.append(folder)
        return {"results": {tasks[0]: {"acc": 0.5}}}

    monkeypatch.setattr(harness, "evaluate", evaluate)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    words = ["folder=~no-user/m", "tasks=sums"]
    for out, said in (
        (".", r"^out=\.: a folder; wanted a file in it$"),
        ("file/x.json", r"^out=file: cannot be written \(File exists\); give another folder$"),
    ):
        with pytest.raises(UserError, match=said):
            harness.main([*words, f"out={out}"])
    assert measured == []
    harness.main([*words, "out=~no-user/x.json"])
    assert measured == [Path("~no-user/m")]
    written = json.loads((tmp_path / "~no-user/x.json").read_text())
    assert written == {"results": {"sums": {"acc": 0.5}}}
    assert json.loads(capsys.readouterr().out) == {"sums": {"acc": 0.5}}


def test_without_the_harness_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'compress-llm\[harness\]'"):
        harness.evaluate(Path("nowhere"), ["hellaswag"])
