"""Score: the compressed model beside its original, both loaded from disk as they are served."""

import json
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from compress.errors import ConfigError, UserError
from compress.eval.fidelity import LEAST_WINDOW, windows
from compress.eval.gate import Gate
from compress.eval.own import named
from compress.eval.tasks import TASKS, shortened
from compress.log import logger
from compress.model_path import home
from compress.report.words import several, significant
from compress.source import shortest_window
from compress.stage import Run
from compress.text.documents import Data, heldout_text


@dataclass(kw_only=True)
class Score:
    """What was lost, measured on what ships.

    text: a file of held-out text to measure KL and perplexity on; null: the data's held-out part.
    windows, window_tokens: how much of it. tasks: names of bundled suites, and .yaml files of tasks
    of one's own (docs/eval.md). limit: items a task; null: all. max_new_tokens: cuts the tasks' own
    limits on the length of an answer; null: leaves them. batch_size: prompts at a time. originals:
    a folder where what the original answered is kept for other runs; null: for this one. outputs:
    answers shown side by side, beside all boundary cases that failed. gate: limits on what may be
    lost, and on the time of a token that serve measured; a run that breaks one writes everything
    and ends with status 3. The compressed model keeps keys and values as serve.kv_cache has it.
    """

    name: ClassVar[str] = "score"
    version: ClassVar[int] = 5
    needs: ClassVar[tuple[str, ...]] = ("dense", "checkpoint")
    gives: ClassVar[str | None] = "scores"
    shares: ClassVar[tuple[str, ...]] = (
        "model",
        "data",
        "device",
        "seed",
        "score_text",
        "score_tasks",
        "kv_cache",
    )

    text: str | None = None
    windows: int = 8
    window_tokens: int = 1024
    tasks: list[str] = field(default_factory=lambda: [task.name for task in TASKS])
    limit: int | None = None
    max_new_tokens: int | None = None
    batch_size: int = 8
    originals: str | None = None
    outputs: int = 20
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        least = {"windows": 1, "window_tokens": LEAST_WINDOW, "batch_size": 1}
        least |= {"limit": 1, "max_new_tokens": 1, "outputs": 0}
        found = {name: getattr(self, name) for name in least}
        problems = [
            f"score.{name} is {value}; wanted at least {least[name]}"
            for name, value in found.items()
            if value is not None and value < least[name]
        ]
        try:
            problems += self.gate.problems([task.name for task in named(self.tasks)])
        except UserError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError(problems)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        """Write scores.json and outputs.jsonl (answers side by side), and return the scores."""
        # Here, since `evaluate` alone takes seconds to import.
        from compress.eval import sheet, written
        from compress.eval.judge import Judge, questions

        dense, seed = run.original, run.config.seed
        trust = run.config.model.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(dense, trust_remote_code=trust)
        # The shorter one, so that both answer the same questions.
        context = shortest_window((dense, run.artifacts["checkpoint"]), trust)
        text, source = self.heldout(run.config.data)
        tasks = [shortened(task, self.max_new_tokens) for task in named(self.tasks)]
        asked, unasked = questions(tasks, self.limit, tokenizer, context)
        judge = Judge(
            tokenizer=tokenizer,
            windows=self._windows(text, tokenizer, context),
            asked=asked,
            batch_size=self.batch_size,
            device=run.config.device,
            work=run.work,
            originals=self._originals(),
            kv_cache=run.config.serve.kv_cache,
            trust_remote_code=trust,
            rope=_extended_rope(run),
            same_blocks=dense == run.artifacts["dense"] and self._alike(run, dense),
        )
        scores, outputs = judge.judge(dense, run.artifacts["checkpoint"], seed=seed)
        count, length = judge.windows.shape
        scores["fidelity"] |= {
            "windows": count,
            "window_tokens": length,
            "text": source,
            "kv_cache": judge.kv_cache,
        }
        scores["unasked"] = [asdict(task) for task in unasked]
        _say(scores)
        if self.outputs:
            kl = written.divergences(judge, dense, run.artifacts["checkpoint"], outputs)
            outputs = [{**o, "kl": kl.get((o["task"], o["id"]))} for o in outputs]
        chosen = sheet.select(outputs, self.outputs, seed=seed)
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in chosen]
        (out / "outputs.jsonl").write_text("".join(lines), encoding="utf-8")
        (out / "scores.json").write_text(json.dumps(scores, indent=2), encoding="utf-8")
        return scores

    def heldout(self, data: Data) -> tuple[str, str]:
        """The held-out text, and words for where it comes from. Raises UserError where it cannot be
        read.
        """
        if self.text is None:
            return heldout_text(data)
        file = home(self.text)
        try:
            return file.read_text(encoding="utf-8"), file.name
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"score.text={self.text}: cannot be read as text: {error}") from error

    def _originals(self) -> Path | None:
        if self.originals is None:
            return None
        return home(self.originals) / f"version{self.version}"

    def _alike(self, run: Run, dense: Path) -> bool:
        """Whether the checkpoint has as many blocks as the original; says so where it has not."""
        trust = run.config.model.trust_remote_code
        folders = (dense, run.artifacts["checkpoint"])
        configs = (AutoConfig.from_pretrained(f, trust_remote_code=trust) for f in folders)
        before, after = (config.get_text_config().num_hidden_layers for config in configs)
        if before != after:
            logger.info(f"  {after} blocks instead of {before}: they are not compared one by one")
        return before == after

    def _windows(self, text: str, tokenizer: PreTrainedTokenizerBase, context: int) -> Tensor:
        length = min(self.window_tokens, context)
        found = windows(text, tokenizer, self.windows, length)
        if tuple(found.shape) != (self.windows, self.window_tokens):
            shorter = "model's context" if length < self.window_tokens else "text"
            taken = f"{several(len(found), 'window')} of {found.shape[1]} tokens"
            logger.info(
                f"  held-out text: {taken} instead of {self.windows} of {self.window_tokens}, "
                f"since the {shorter} is shorter"
            )
        return found


def _extended_rope(run: Run) -> dict[str, Any] | None:
    """The `rope_parameters` that the stage extend left, None where it did not run."""
    return run.manifests.get("extend", {}).get("metrics", {}).get("rope_parameters")


def _say(scores: dict[str, Any]) -> None:
    close = scores["fidelity"]
    before, after = (
        f"{ppl:.2f}" if isfinite(ppl) else "not a number"
        for ppl in (close["ppl"]["before"], close["ppl"]["after"])
    )
    kl = f"KL {close['kl']:.4f} nats a token" if isfinite(close["kl"]) else "KL not a number"
    logger.info(
        f"  {kl} (arithmetic alone: {close['kl_floor']:.4f}), "
        f"same first choice {100 * close['top1']:.1f}%, perplexity {before} to {after}"
    )
    for fault in scores["faults"]:
        logger.warning(f"  {fault['name']}: {fault['text']}")
    for row in scores["tasks"]:
        logger.info(
            f"  {row['name']}, {row['metric']}: {significant(row['before'])} to "
            f"{significant(row['after'])} ({several(row['n'], 'item')}, {row['gained']} better, "
            f"{row['lost']} worse)"
        )
