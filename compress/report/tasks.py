"""What task scores show, and what this many items cannot show."""

from collections.abc import Mapping, Sequence
from math import inf, isinf
from typing import Any, Literal

from compress.eval.statistics import largest_loss, mcnemar
from compress.eval.tasks import RIGHT_OR_WRONG
from compress.report.words import count, p_value, paired, percent, several, significant

TOLD = 5
"""How many changes of one kind the verdict tells one by one."""
Task = Mapping[str, Any]
Change = Literal["better", "perhaps better", "unclear", "perhaps worse", "worse"]


def change(task: Task) -> Change:
    """What a task says of the difference between the two models.

    Better or worse: the paired 95% interval leaves out zero. Perhaps: it does, but the exact test
    on how many answers rose and fell (McNemar, `p`) does not reach 5%. With few answers the
    interval, made by the bootstrap, is too narrow; of grades the test does not see how far they go.
    One item has no interval.
    """
    low, high = task["ci95"]
    if low <= 0 <= high or task["n"] == 1:
        return "unclear"
    sure = task.get("p", 0.0) <= 0.05
    if high < 0:
        return "worse" if sure else "perhaps worse"
    return "better" if sure else "perhaps better"


def unseen_loss(task: Task) -> float | None:
    """The largest loss, in points of 100, that the answers do not rule out at 95%.

    Of right and wrong answers by exact bounds of how many are gained and lost, of graded ones the
    lower end of the interval; None where none of these got worse, since the interval cannot know of
    losses then. No score can lose more than it has.
    """
    if task["metric"] in RIGHT_OR_WRONG:
        return min(task["before"], largest_loss(task["n"], task["gained"], task["lost"]))
    return max(0.0, -task["ci95"][0]) if task["lost"] else None


def could_show(task: Task) -> float | None:
    """The smallest loss, in points of 100, that would have been called more than chance; None where
    that is none, as where it is more than the original's score.
    """
    loss = task["smallest_loss"]
    return None if loss is None or loss > task["before"] else loss


def shows_nothing(task: Task) -> bool:
    """Whether no loss could be called measurable here: the original scores nothing, the items are
    too few even if all were lost, or it would have to lose more than it scores.
    """
    if task["before"] == 0 or mcnemar(0, task["n"]) > 0.05:
        return True
    low, high = task["ci95"]
    can_differ = task["metric"] in RIGHT_OR_WRONG or low < high
    return could_show(task) is None and can_differ


def told(task: Task) -> dict[str, Any]:
    """The record of a task with what the pages say of it: `difference` in points, `change`, and
    `unseen_loss`.
    """
    return {
        **task,
        "difference": task["after"] - task["before"],
        "change": change(task),
        "unseen_loss": unseen_loss(task),
    }


def label(task: Task) -> str:
    """`short answers, exact match`."""
    return f"{task['name']}, {task['metric']}".replace("_", " ")


def unasked(task: Mapping[str, Any]) -> str:
    """That items of a task do not fit the models' window, in one sentence."""
    name, fit, of = task["name"].replace("_", " "), task["fit"], task["of"]
    window = f"the window of {count(task['context'])} tokens, prompt and answer together"
    taken = f"the {several(of, 'item')} taken"  # all that there are, or score.limit
    if not fit:
        none = f"{taken} does not fit" if of == 1 else f"none of {taken} fits"
        return f"{name} was not asked: {none} {window}."
    others = "the other does" if of - fit == 1 else "the others do"
    return f"{name} was asked {count(fit)} of {taken}: {others} not fit {window}."


def difference(task: Task) -> str:
    """Both scores, and the difference with its interval."""
    points, ends = paired(task["after"] - task["before"], task["ci95"])
    exact = f", {p_value(task['p'])}" if "p" in task else ""
    return (
        f"{label(task)} {significant(task['before'])} to {significant(task['after'])} "
        f"({points} points, 95% interval {ends}{exact}, {several(task['n'], 'item')})"
    )


def found(tasks: Sequence[Task], wanted: Change) -> str | None:
    """The tasks that changed so, in one sentence, or None; of many, those that changed most."""
    chosen = [task for task in tasks if change(task) == wanted]
    if not chosen:
        return None
    more = len(chosen) - TOLD
    if more > 1:
        chosen = sorted(chosen, key=lambda task: -abs(task["after"] - task["before"]))[:TOLD]
    texts = [difference(task) for task in chosen]
    if more > 1:
        texts.append(f"and {more} more, in the table of tasks")
    few = (
        " The interval leaves out zero, but by how many answers rose and how many fell the exact "
        "test does not call it more than chance."
        if wanted.startswith("perhaps")
        else ""
    )
    return f"{'; '.join(texts)}.{few}"


def rest(tasks: Sequence[Task]) -> str | None:
    """How many scores show no clear difference, and what chance alone does to so many."""
    unclear = sum(change(task) == "unclear" for task in tasks)
    if not unclear:
        return None
    if unclear == len(tasks):
        which = (
            "The one score does not differ" if unclear == 1 else f"None of {unclear} scores differs"
        )
        text = f"{which} by more than chance would explain."
    else:
        text = f"The other {unclear} of {len(tasks)} scores show no clear difference."
    if len(tasks) == 1:
        return text
    by_chance = percent(1 - 0.95 ** len(tasks), 0)
    return (
        f"{text} Of {len(tasks)} intervals at 95%, one or more leaves out zero by chance alone in "
        f"about {by_chance} of runs, were they independent."
    )


def blind(tasks: Sequence[Task]) -> str | None:
    """What the tasks cannot show: losses too small for the items, and tasks nobody can do."""
    sentences = []
    unclear = [t for t in tasks if change(t) == "unclear" and t["before"]]
    losses = [(loss, t) for t in unclear if (loss := _least_seen(t)) is not None]
    if losses:
        least, task = max(losses, key=lambda pair: pair[0])
        below = "" if isinf(least) else f" of less than {significant(least, 2)} points"
        sentences.append(
            f"No clear difference is not none: in {label(task)}, with "
            f"{several(task['n'], 'item')}, no loss{below} would have been called more than chance."
        )
    hopeless = [label(task) for task in tasks if task["before"] == 0]
    if hopeless:
        sentences.append(
            f"No loss could show where the original scores nothing: {'; '.join(hopeless)}."
        )
    return " ".join(sentences) or None


def _least_seen(task: Task) -> float | None:
    """The smallest loss that would have been called more than chance: infinite where no loss would,
    None of grades of which none differs.
    """
    graded = task["metric"] not in RIGHT_OR_WRONG
    return None if graded and task["smallest_loss"] is None else could_show(task) or inf
