"""Our local kinds of task answer as lm-evaluation-harness does, item by item."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from compress import harness
from compress.errors import UserError
from compress.eval.answers import ask, score
from compress.eval.judge import questions
from compress.eval.own import read
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
    ((task, its),) = questions([read(tmp_path / "own.yaml")], ITEMS[folder], tokenizer, context)
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


def test_without_the_harness_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'compress-llm\[harness\]'"):
        harness.evaluate(Path("nowhere"), ["hellaswag"])
