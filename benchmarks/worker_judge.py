"""Judge checkpoints beside their original: fidelity on a text, accuracy on four tasks.

.venv/bin/python benchmarks/worker_judge.py REQUEST.json

Started by fidelity.py, for which see there. Every checkpoint, whoever made it, is loaded from disk
by our runtime. The answer to each is a file, written as soon as it is known.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from compress.artifact import write_json
from compress.eval import fidelity
from compress.eval.answers import ask
from compress.eval.fidelity import Reference
from compress.eval.items import Item
from compress.eval.likelihood import encode, spaced
from compress.eval.tasks import Task
from compress.log import progress
from compress.runtime.loader import load

ACCURACY, NORMALIZED = ("accuracy",), ("normalized_accuracy",)
# As lm-evaluation-harness asks them, with no examples; where its usual figure is normalized by the
# length of the choice (acc_norm), so is this one.
QUESTION = "Question: {query}\nAnswer:"
HELLASWAG = Task("hellaswag", "choice", {"en": "{query}"}, NORMALIZED, Path("hellaswag_val.jsonl"))
ARC_EASY = Task("arc_easy", "choice", {"en": QUESTION}, NORMALIZED, Path("arc_easy_test.jsonl"))
LAMBADA = Task("lambada", "cloze", {"en": "{context}"}, ACCURACY, Path("lambada_openai_test.jsonl"))
BLIMP = Task("blimp", "choice", {"en": ""}, ACCURACY, Path("blimp.jsonl"))
TASKS = tuple(replace(task, chat=False) for task in (HELLASWAG, ARC_EASY, LAMBADA, BLIMP))


def items(task: Task, file: Path, count: int) -> list[Item]:
    """`count` items of a task's file, or all where it has fewer, spread evenly over it.

    The files are in an order: BLiMP's by phenomenon, HellaSwag's by activity.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    count = min(count, len(lines))
    chosen = [lines[i * len(lines) // count] for i in range(count)]
    return [item(task, json.loads(line)) for line in chosen]


def item(task: Task, record: dict[str, Any]) -> Item:
    """One record of a task's file. A minimal pair is a choice of which the first is right."""
    prompt = task.prompts["en"].format_map(record)
    if task.name == "lambada":
        return Item(record["id"], prompt, (record["target"],))
    choices = tuple(record.get("choices") or (record["good"], record["bad"]))
    return Item(record["id"], prompt, (choices[record.get("gold", 0)],), choices)


def correct(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    its: list[Item],
    batch_size: int,
) -> list[bool]:
    """Whether the model gets each item right."""
    if task.kind == "cloze":
        bar = progress(its, task.name, "item")
        return [writes(model, tokenizer, i.prompt, spaced(i.prompt, i.references[0])) for i in bar]
    answers = ask(model, tokenizer, task, its, batch_size=batch_size)
    return [answer.text in i.references for answer, i in zip(answers, its, strict=True)]


@torch.inference_mode()
def writes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, continuation: str
) -> bool:
    """Whether greedy decoding after `prompt` gives exactly `continuation`.

    One forward shows it: where every token of the continuation is the likeliest after those before
    it, decoding would have written them.
    """
    tokens, start = encode(prompt, continuation, tokenizer)
    ids = torch.tensor([tokens], device=model.device)
    said = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].argmax(-1)
    return said.tolist() == tokens[start:]


def close_to(folder: Path, reference: Reference, request: dict[str, Any]) -> dict[str, Any]:
    """How far the predictions in float32 are from the original's; a value a window."""
    model = load(folder, dtype=torch.float32)
    close = fidelity.compare_to(reference, model, torch.tensor(request["windows"]))
    return {"kl": close.kl, "top1": close.top1, "nll": close.nll_after}


def right(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What the model gets right of each task, in the dtype asked for; a digit an item."""
    model = load(folder, dtype=getattr(torch, request["task_dtype"]))
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    found = {}
    for task in TASKS:
        its = items(task, Path(request["data"], task.file), request["items"])
        each = correct(model, tokenizer, task, its, request["batch_size"])
        found[task.name] = "".join(str(int(is_right)) for is_right in each)
    return {"correct": found}


def main(request_file: str) -> None:
    """Answer what the request wants: for each part, folders with the file of the answer."""
    request = json.loads(Path(request_file).read_text())
    wanted = request["wanted"]
    if wanted["fidelity"]:
        original = load(Path(request["model"]), dtype=torch.float32)
        reference = fidelity.remember(original, torch.tensor(request["windows"]))
        del original
        gc.collect()
    for folder, file in wanted["fidelity"].items():
        print(f"text: {folder}", file=sys.stderr, flush=True)
        write_json(Path(file), close_to(Path(folder), reference, request))
    for folder, file in wanted["tasks"].items():
        print(f"tasks: {folder}", file=sys.stderr, flush=True)
        write_json(Path(file), right(Path(folder), request))


if __name__ == "__main__":
    main(*sys.argv[1:])
