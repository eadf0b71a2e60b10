"""The bundled suites as small typed things: what a model is asked, and what counts as right.

A suite is a JSONL file in eval/suites/, one item a line; to grow one, add lines. Every item has
`id` (unique in the file) and `lang`. Beside these,

    choice      the fields of its prompt, `choices` (continuations of the prompt), `gold` (index)
    generation  the fields of its prompt, `references` (or `answers`)
    boundary    `prompt`, `rules` (see eval/rules.py); `{filler}` in it becomes `filler` * `times`
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from compress.errors import UserError
from compress.eval.fidelity import adds_bos

SUITES = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class Task:
    """A suite and how it is put to a model.

    kind: `choice` picks the likeliest continuation; `generation` compares what the model writes
    with references; `boundary` checks it by rules. prompts: the prompt by language ("en" where
    there is none for the item's). metrics: names in eval/metrics.py; the first is the one by which
    items are ranked and flips are counted. chat: whether the prompt goes through the model's chat
    template, where it has one. per_character: whether likelihoods are divided by the length of the
    choice. max_new_tokens: longest answer. first_line: whether the answer ends with its first line.
    """

    name: str
    kind: Literal["choice", "generation", "boundary"]
    prompts: dict[str, str]
    metrics: tuple[str, ...]
    chat: bool = True
    per_character: bool = True
    max_new_tokens: int = 0
    first_line: bool = False

    @property
    def file(self) -> Path:
        return SUITES / f"{self.name}.jsonl"


# By example rather than by instruction, so that models with and without a chat template, and small
# ones, give the short form that exact match compares.
ENGLISH_EXAMPLES = """\
Question: What is the capital of Italy?
Answer: Rome

Question: How many wheels does a car have?
Answer: 4

Question: What is the opposite of big?
Answer: small

Question: {question}
Answer:"""
CHINESE_EXAMPLES = """\
问题：意大利的首都是哪里？
答案：罗马

问题：一辆汽车有几个轮子？
答案：4

问题：“大”的反义词是什么？
答案：小

问题：{question}
答案："""

TASKS = (
    Task(
        name="knowledge",
        kind="choice",
        prompts={"en": "Question: {question}\nAnswer:", "zh": "问题：{question}\n答案："},
        metrics=("accuracy",),
        chat=False,
    ),
    Task(
        name="commonsense",
        kind="choice",
        prompts={"en": "{context}"},
        metrics=("accuracy",),
        chat=False,
        # The choices are single words and short phrases of like length; divided by it, the longer
        # word wins too often.
        per_character=False,
    ),
    Task(
        name="short_answers",
        kind="generation",
        prompts={"en": ENGLISH_EXAMPLES, "zh": CHINESE_EXAMPLES},
        metrics=("exact_match", "contained"),
        chat=False,
        first_line=True,
        max_new_tokens=16,
    ),
    Task(
        name="summaries",
        kind="generation",
        prompts={
            "en": "Summarize this text in one sentence.\n\n{text}",
            "zh": "请用一句话概括这段文字。\n\n{text}",
        },
        metrics=("rougeL", "rouge1"),
        max_new_tokens=48,
    ),
    Task(
        name="translation",
        kind="generation",
        prompts={"en": "Translate into {target}: {source}"},
        metrics=("chrf", "bleu"),
        max_new_tokens=32,
    ),
    Task(
        name="boundary",
        kind="boundary",
        prompts={"en": "{prompt}"},
        metrics=("accuracy",),
        max_new_tokens=32,
    ),
)


@dataclass(frozen=True)
class Item:
    """One question: the prompt in words, and what is accepted as its answer.

    references: accepted answers; of a choice, the right one alone. choices: the continuations to
    pick from. rules: what an answer to a boundary case must keep to.
    """

    id: str
    prompt: str
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    rules: tuple[dict[str, Any], ...] = ()


def named(names: list[str]) -> list[Task]:
    """The tasks of these names, in the order of the list; UserError for one that there is not."""
    known = {task.name: task for task in TASKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"score.tasks: no suite called {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return [known[name] for name in names]


def shortened(task: Task, max_new_tokens: int | None) -> Task:
    """The task with answers of at most `max_new_tokens`, where that is less than its own limit."""
    if max_new_tokens is None:
        return task
    return replace(task, max_new_tokens=min(task.max_new_tokens, max_new_tokens))


def items(task: Task, limit: int | None = None) -> list[Item]:
    """The items of a task's file, the first `limit` of them."""
    lines = task.file.read_text(encoding="utf-8").splitlines()[:limit]
    return [_item(task, json.loads(line)) for line in lines]


def _item(task: Task, record: dict[str, Any]) -> Item:
    prompt = task.prompts.get(record["lang"], task.prompts["en"])
    # Replaced one by one, since prompts hold braces of their own (code, JSON).
    for field, value in record.items():
        if isinstance(value, str):
            times = record["times"] if field == "filler" else 1
            prompt = prompt.replace(f"{{{field}}}", value * times)
    if task.kind == "choice":
        choices = tuple(record["choices"])
        return Item(record["id"], prompt, (choices[record["gold"]],), choices)
    references = record.get("references") or record.get("answers") or ()
    return Item(record["id"], prompt, tuple(references), (), tuple(record.get("rules", ())))


def as_asked(task: Task, item: Item, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the model is given for `item`: through the chat template, or as it is."""
    if task.chat and tokenizer.chat_template:
        # A template may write the BOS token that a tokenizer adds: `generate` keeps it single.
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": item.prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # read by Qwen 3's template alone: no room to think in here
        )
    # A model cannot start from no token at all.
    return item.prompt or ("" if adds_bos(tokenizer) else tokenizer.eos_token)
