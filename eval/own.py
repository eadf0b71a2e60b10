"""A task of the user's own: a few lines of YAML beside a JSONL file of questions."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from compress.errors import UserError
from compress.eval.items import OF_KIND, OPTIONAL, PLACE, records
from compress.eval.tasks import KINDS, TASKS, Task

PROMPTS = {"perplexity": "{text}", "retrieval": "{text}\n\n{question}"}
"""Prompts that a kind has where the file gives none."""

PART = re.compile(r"\{[^\W\d]\w*[.\[][^{}]*\}")
"""A part of a field, as in Python's own formats, which would stand in the prompt as it is."""

MEASURES = ("fidelity", "blocks")
"""What both models are judged by beside tasks."""


class _EachKeyOnce(yaml.SafeLoader):
    """YAML in which a key that is given twice is a mistake, not the later of the two."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for i, key in enumerate(keys):
            if key.value in names[:i]:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} is given twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)


def named(names: list[str], option: str = "score.tasks") -> list[Task]:
    """The tasks of these names, in the order of the list: a bundled suite, or a .yaml file.

    option: the field that names them. Raises UserError for one that there is not, and for what is
    wrong with a file or its data.
    """
    known = {task.name: task for task in TASKS}
    unknown = [name for name in names if name not in known and not is_file(name)]
    if unknown:
        raise UserError(
            f"{option}: no suite called {', '.join(unknown)}; there are {', '.join(known)}, and "
            "a task of your own is named by its .yaml file"
        )
    tasks = [known[name] if name in known else read(Path(name).expanduser()) for name in names]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise UserError(f"{option} names {', '.join(twice)} twice; wanted each once")
    for i, task in enumerate(tasks):
        taken = (*known, *MEASURES, *(t.name for t in tasks[:i]))
        if is_file(names[i]) and task.name in taken:
            raise UserError(
                f"{option}: {names[i]} has a name that is taken, {task.name}; name the file "
                "otherwise"
            )
    return tasks


def is_file(name: str) -> bool:
    """Whether `name` in a list of tasks means a file, not a bundled suite."""
    return name.endswith((".yaml", ".yml"))


def read(file: Path) -> Task:
    """The task that a YAML file describes, its data checked.

    data: the JSONL, beside the file unless a whole path. kind: one of KINDS. prompt: a text with
    `{name}` for fields of a line, or one by language; it ends where its last line does. The other
    keys are fields of Task. Raises UserError for a wrong key or value, and for data as
    `compress.eval.items.records` does.
    """
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Loader=_EachKeyOnce)
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{file}{line}: cannot be read as YAML: {error.problem}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: of dates, and not UTF-8
        said = " ".join(str(error).split())
        raise UserError(f"{file}: cannot be read as YAML: {said}") from error
    problems = _problems(found)
    if problems:
        raise UserError(f"{file}: {'; '.join(problems)}")
    kind, prompt = found["kind"], found.get("prompt", PROMPTS.get(found["kind"]))
    by_language = {"en": prompt} if isinstance(prompt, str) else prompt
    task = Task(
        name=file.stem,
        kind=kind,
        file=file.parent / Path(found["data"]).expanduser(),
        # YAML's block style (|) ends with a line break that nobody means as part of a prompt.
        prompts={language: text.rstrip("\n") for language, text in by_language.items()},
        metrics=tuple(found.get("metrics", KINDS[kind][:1])),
        fields=tuple(found.get("fields", {}).items()),
        chat=found.get("chat", kind in ("generation", "retrieval", "rules")),
        first_line=found.get("first_line", False),
        max_new_tokens=found.get("max_new_tokens", 32),
        window=found.get("window", 1024),
        **_retrieval(found, file),
    )
    records(task)
    return task


def _retrieval(found: dict[str, Any], file: Path) -> dict[str, Any]:
    if found["kind"] != "retrieval":
        return {}
    haystack = file.parent / Path(found["haystack"]).expanduser()
    try:
        empty = not haystack.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path
        raise UserError(f"{file}: haystack {haystack}: cannot be read as text: {error}") from error
    if empty:
        raise UserError(f"{file}: haystack {haystack} is empty; wanted a text to hide needles in")
    return {
        "haystack": haystack,
        "lengths": tuple(found.get("lengths", (512, 1024, 2048))),
        "depths": tuple(found.get("depths", (0.0, 0.5, 1.0))),
    }


def _problems(found: Any) -> list[str]:
    """What is wrong with the keys and values of a task's YAML, in words."""
    if not isinstance(found, dict):
        return [f"wanted keys and values: {', '.join(KEYS)}"]
    unknown = [repr(key) for key in found if key not in KEYS]
    problems = [f"no key {' or '.join(unknown)}; there are {', '.join(KEYS)}"] if unknown else []
    kind = found.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return [*problems, f"kind is {kind!r}; wanted one of {', '.join(KINDS)}"]
    needed = ["data", *(["prompt"] if kind not in PROMPTS else [])]
    needed += ["haystack"] if kind == "retrieval" else []
    problems += [f"{key} is missing" for key in needed if found.get(key) is None]
    problems += [
        f"{key} is {found[key]!r}; wanted {wanted}"
        for key, (wanted, is_right) in VALUES.items()
        if key in found and not is_right(found[key])
    ]
    prompt: Any = found.get("prompt", PROMPTS.get(kind))
    if _is_prompt(prompt):
        texts = list(prompt.values()) if isinstance(prompt, dict) else [prompt]
        problems += [problem for text in texts for problem in _prompt_problems(kind, text)]
        if _are_texts(found.get("fields", {})):
            problems += _unread(kind, texts, found.get("fields", {}))
    if "metrics" in found and not _is_list(found["metrics"], lambda name: name in KINDS[kind]):
        known = ", ".join(KINDS[kind])
        problems.append(f"metrics is {found['metrics']!r}; wanted a list of, for {kind}, {known}")
    elif len(set(found.get("metrics", []))) < len(found.get("metrics", [])):
        problems.append(f"metrics is {found['metrics']!r}; wanted each once")
    return problems


def _unread(kind: str, prompts: list[str], fields: dict[str, str]) -> Iterator[str]:
    """That `fields` gives a name to what nothing reads, in words."""
    read = [*OF_KIND[kind], *(name for text in prompts for name in PLACE.findall(text))]
    for name in fields:
        if name not in (*read, *OPTIONAL):
            there = ", ".join(dict.fromkeys(read))
            yield f"fields has {name}, which nothing reads; there are {there}"


def _prompt_problems(kind: str, prompt: str) -> Iterator[str]:
    """What is wrong with a prompt. An empty one asks for the likelihood of choices alone."""
    if part := PART.search(prompt):
        yield f"prompt has {part[0]}; wanted a field of a line alone, such as {{text}}"
    elif not PLACE.search(prompt) and (prompt or kind not in ("choice", "cloze")):
        yield (
            f"prompt is {prompt!r}, the same for every line; wanted fields of a line in it, such "
            "as {text}"
        )


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(holds, value))


def _is_number(value: Any, least: float, most: float, *, whole: bool = False) -> bool:
    numbers = (int,) if whole else (int, float)
    return type(value) in numbers and least <= value <= most  # not true or false


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, dict):
        return "en" in value and _are_texts(value)
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )


VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "data": ("the name of a file", _is_text),
    "prompt": ("a text, or one by language with 'en', which the others fall back on", _is_prompt),
    "fields": ("ours: theirs, a line each", _are_texts),
    "chat": ("true or false", _is_flag),
    "first_line": ("true or false", _is_flag),
    "max_new_tokens": (
        "a whole number, at least 1",
        lambda value: _is_number(value, 1, 10**9, whole=True),
    ),
    "window": (
        "a whole number, at least 2",
        lambda value: _is_number(value, 2, 10**9, whole=True),
    ),
    "haystack": ("the name of a file", _is_text),
    "lengths": (
        "a list of numbers of tokens, at least 1",
        lambda value: _is_list(value, lambda n: _is_number(n, 1, 10**9, whole=True)),
    ),
    "depths": (
        "a list of numbers, 0 to 1",
        lambda value: _is_list(value, lambda n: _is_number(n, 0, 1)),
    ),
}
"""Of each key: what is wanted, in words, and whether a value is that."""

KEYS = ("data", "kind", "prompt", "metrics", *(k for k in VALUES if k not in ("data", "prompt")))
