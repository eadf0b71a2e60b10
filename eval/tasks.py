"""The bundled suites, and a user's own tasks, as small typed things: what is asked, and how."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

SUITES = Path(__file__).parent / "suites"

Kind = Literal["choice", "cloze", "generation", "perplexity", "retrieval", "rules"]

WRITTEN = (
    *("exact_match", "contained", "f1", "rouge1", "rouge2", "rougeL", "bleu", "chrf"),
    *("entities", "json", "python", "no_loop"),
)
KINDS: dict[str, tuple[str, ...]] = {
    "choice": ("accuracy", "normalized_accuracy"),
    "cloze": ("accuracy", "likelihood"),
    "generation": WRITTEN,
    "perplexity": ("likelihood",),
    "retrieval": ("contained", *(name for name in WRITTEN if name != "contained")),
    "rules": ("accuracy",),
}
"""The metrics that a task of each kind can have; the first is taken where none is named."""

RIGHT_OR_WRONG = (
    *("accuracy", "normalized_accuracy", "exact_match", "contained"),
    *("json", "python", "no_loop"),
)
"""Metrics by which an answer is either right or wrong; the others grade it."""


@dataclass(frozen=True)
class Task:
    """Questions, and how they are put to a model.

    kind: `choice` picks the likeliest continuation of the prompt; `cloze` asks whether the
    continuation is the likeliest there is, token by token; `generation` compares what the model
    writes with references; `perplexity` reads a text; `retrieval` asks for a sentence (the needle)
    hidden in a long text; `rules` checks what the model writes without references.
    prompts: the prompt by language ("en" where there is none for the item's).
    metrics: of KINDS; the first is the one by which items are ranked, flips are counted and gates
    judge. file: the questions (see eval/items.py). fields: where the file has other names: ours,
    and theirs.
    chat: whether the prompt goes through the model's chat template, where it has one.
    max_new_tokens: longest answer. first_line: whether the answer ends with its first line.
    window: tokens that `perplexity` reads at a time. haystack, lengths, depths: of `retrieval`, the
    file that hides the needle, how much of it, in tokens, and how deep, 0 (the beginning) to 1.
    """

    name: str
    kind: Kind
    prompts: dict[str, str]
    metrics: tuple[str, ...]
    file: Path
    fields: tuple[tuple[str, str], ...] = ()
    chat: bool = True
    max_new_tokens: int = 0
    first_line: bool = False
    window: int = 1024
    haystack: Path | None = None
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = ()

    @property
    def files(self) -> list[Path]:
        """The files that the questions are made from."""
        return [file for file in (self.file, self.haystack) if file is not None]


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
        file=SUITES / "knowledge.jsonl",
        prompts={"en": "Question: {question}\nAnswer:", "zh": "问题：{question}\n答案："},
        metrics=("normalized_accuracy",),
        chat=False,
    ),
    Task(
        name="commonsense",
        kind="choice",
        file=SUITES / "commonsense.jsonl",
        prompts={"en": "{context}"},
        # The choices are single words and short phrases of like length; divided by it, the longer
        # word wins too often.
        metrics=("accuracy",),
        chat=False,
    ),
    Task(
        name="cloze",
        kind="cloze",
        file=SUITES / "cloze.jsonl",
        prompts={"en": "{text}"},
        metrics=("accuracy", "likelihood"),
        chat=False,
    ),
    Task(
        name="short_answers",
        kind="generation",
        file=SUITES / "short_answers.jsonl",
        prompts={"en": ENGLISH_EXAMPLES, "zh": CHINESE_EXAMPLES},
        metrics=("exact_match", "contained"),
        chat=False,
        first_line=True,
        max_new_tokens=16,
    ),
    Task(
        name="summaries",
        kind="generation",
        file=SUITES / "summaries.jsonl",
        prompts={
            "en": "Summarize this text in one sentence.\n\n{text}",
            "zh": "请用一句话概括这段文字。\n\n{text}",
        },
        metrics=("rougeL", "entities"),
        max_new_tokens=48,
    ),
    Task(
        name="translation",
        kind="generation",
        file=SUITES / "translation.jsonl",
        prompts={"en": "Translate into {target}: {source}", "zh": "翻译成{target}：{source}"},
        metrics=("chrf", "bleu"),
        max_new_tokens=32,
    ),
    Task(
        name="structured",
        kind="rules",
        file=SUITES / "structured.jsonl",
        prompts={"en": "{prompt}"},
        metrics=("accuracy",),
        max_new_tokens=64,
    ),
    Task(
        name="boundary",
        kind="rules",
        file=SUITES / "boundary.jsonl",
        prompts={"en": "{prompt}"},
        metrics=("accuracy",),
        max_new_tokens=32,
    ),
)


def shortened(task: Task, max_new_tokens: int | None) -> Task:
    """The task with answers of at most `max_new_tokens`, where that is less than its own limit."""
    if max_new_tokens is None:
        return task
    return replace(task, max_new_tokens=min(task.max_new_tokens, max_new_tokens))
