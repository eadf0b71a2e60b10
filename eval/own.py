"""A task of the user's own: a few lines of YAML beside a JSONL file of questions."""

from pathlib import Path
from typing import Any

import yaml

from compress.errors import UserError
from compress.eval.items import records
from compress.eval.tasks import KINDS, TASKS, Task

PROMPTS = {"perplexity": "{text}", "retrieval": "{text}\n\n{question}"}
"""Prompts that a kind has where the file gives none."""

KEYS = (
    *("data", "kind", "prompt", "metrics", "fields", "chat", "max_new_tokens", "first_line"),
    *("window", "haystack", "lengths", "depths"),
)
MEASURES = ("fidelity", "blocks")
"""What both models are judged by beside tasks."""

NUMBERS = {"max_new_tokens": 32, "window": 1024}


def named(names: list[str]) -> list[Task]:
    """The tasks of these names, in the order of the list: a bundled suite, or a .yaml file.

    Raises UserError for one that there is not, and for what is wrong with a file or its data.
    """
    known = {task.name: task for task in TASKS}
    unknown = [name for name in names if name not in known and not is_file(name)]
    if unknown:
        raise UserError(
            f"score.tasks: no suite called {', '.join(unknown)}; there are {', '.join(known)}, and "
            "a task of your own is named by its .yaml file"
        )
    tasks = [known[name] if name in known else read(Path(name).expanduser()) for name in names]
    for i, task in enumerate(tasks):
        taken = (*known, *MEASURES, *(t.name for t in tasks[:i]))
        if is_file(names[i]) and task.name in taken:
            raise UserError(
                f"score.tasks: {names[i]} has a name that is taken, {task.name}; name the file "
                "otherwise"
            )
    return tasks


def is_file(name: str) -> bool:
    """Whether `name` in score.tasks means a file, not a bundled suite."""
    return name.endswith((".yaml", ".yml"))


def read(file: Path) -> Task:
    """The task that a YAML file describes, its data checked.

    data: the JSONL, beside the file unless a whole path. kind: one of KINDS. prompt: a text with
    `{name}` for fields of a line, or one by language. The other keys are fields of Task.
    Raises UserError for a wrong key or value, and for data as `compress.eval.items.records` does.
    """
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read as YAML: {said}") from error
    problems = _problems(found)
    if problems:
        raise UserError(f"{file}: {'; '.join(problems)}")
    kind, prompt = found["kind"], found.get("prompt", PROMPTS.get(found["kind"]))
    task = Task(
        name=file.stem,
        kind=kind,
        file=file.parent / Path(found["data"]).expanduser(),
        prompts={"en": prompt} if isinstance(prompt, str) else prompt,
        metrics=tuple(found.get("metrics", KINDS[kind][:1])),
        fields=tuple(found.get("fields", {}).items()),
        chat=found.get("chat", kind in ("generation", "retrieval", "rules")),
        first_line=found.get("first_line", False),
        **{name: found.get(name, value) for name, value in NUMBERS.items()},
        **_retrieval(found, file.parent),
    )
    if task.haystack is not None and not task.haystack.is_file():
        raise UserError(f"{file}: haystack {task.haystack}: no such file")
    records(task)
    return task


def _retrieval(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    if found["kind"] != "retrieval":
        return {}
    return {
        "haystack": folder / Path(found["haystack"]).expanduser(),
        "lengths": tuple(found.get("lengths", (512, 1024, 2048))),
        "depths": tuple(found.get("depths", (0.0, 0.5, 1.0))),
    }


def _problems(found: Any) -> list[str]:
    """What is wrong with the keys and values of a task's YAML, in words."""
    if not isinstance(found, dict):
        return [f"wanted keys and values: {', '.join(KEYS)}"]
    problems = [f"no key {key!r}; there are {', '.join(KEYS)}" for key in found if key not in KEYS]
    kind = found.get("kind")
    if kind not in KINDS:
        return [*problems, f"kind is {kind!r}; wanted one of {', '.join(KINDS)}"]
    needed = ["data", *(["prompt"] if kind not in PROMPTS else [])]
    needed += ["haystack"] if kind == "retrieval" else []
    problems += [f"{key} is missing" for key in needed if not found.get(key)]
    prompt = found.get("prompt", "")
    if isinstance(prompt, dict) and "en" not in prompt:
        problems.append("prompt by language has no 'en', which the others fall back on")
    metrics = found.get("metrics", KINDS[kind][:1])
    wrong = [name for name in metrics if name not in KINDS[kind]]
    if wrong or not isinstance(metrics, list | tuple) or not metrics:
        known = ", ".join(KINDS[kind])
        problems.append(f"metrics is {metrics!r}; wanted a list of, for {kind}, {known}")
    for name in (n for n in NUMBERS if n in found):
        if not isinstance(found[name], int) or found[name] < 1:
            problems.append(f"{name} is {found[name]!r}; wanted a whole number, at least 1")
    for name, kind_of, least, most in (("lengths", int, 1, 10**9), ("depths", int | float, 0, 1)):
        values = found.get(name, [least])
        if not isinstance(values, list) or not all(
            isinstance(value, kind_of) and least <= value <= most for value in values
        ):
            problems.append(f"{name} is {values!r}; wanted a list of numbers, {least} to {most}")
    if not isinstance(found.get("fields", {}), dict):
        problems.append(f"fields is {found['fields']!r}; wanted ours: theirs, a line each")
    return problems
