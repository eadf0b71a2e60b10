"""Ask a model about a text that is longer than its window, in two stages: docs/scenarios.md.

python -m compress.summarize checkpoint=DIR file=TEXT.txt [question="…"] [field=value ...]
"""

import sys
import time
from dataclasses import dataclass
from functools import partial

from compress import options
from compress.errors import ConfigError, UserError
from compress.model_path import home
from compress.runtime import devices

SENTENCE = 16
"""Tokens of a short sentence: summaries of fewer say nothing that an answer could be made from."""


@dataclass(kw_only=True)
class Options:
    """checkpoint: a model's folder, compressed or not. file: the text. question: what to answer
    from it.

    window: tokens that the model may hold; null: its own. summary_tokens: of the summary of a part.
    answer_tokens: of the answer. batch_size: parts that are summarized at a time. device: cpu,
    cuda, or auto. backend: of the kernels. show: print the summaries too.
    """

    checkpoint: str = "???"
    file: str = "???"
    question: str = "Summarize the whole text in one paragraph."
    window: int | None = None
    summary_tokens: int = 256
    answer_tokens: int = 256
    batch_size: int = 1
    device: str = "auto"
    backend: str | None = None
    show: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = devices.problems(self.device)
        least = {"window": 1, "summary_tokens": SENTENCE, "answer_tokens": 1, "batch_size": 1}
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                problems.append(f"{name} is {value}; wanted at least {number}")
        if problems:
            raise ConfigError(problems)
        self.device = devices.picked(self.device)


def main(words: list[str]) -> None:
    """Read the text, summarize its parts, print the answer."""
    asked = options.parsed(Options, words)
    try:
        text = home(asked.file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"file={asked.file}: cannot be read as text: {error}") from error
    if not text:
        raise UserError(f"file={asked.file}: empty; wanted a text")
    # Not above: torch and transformers take seconds, and what is wrong until here none.
    from compress.runtime.generate import chat_prompt, generate
    from compress.runtime.loader import load_with_tokenizer
    from compress.runtime.summary import summarize

    model, tokenizer = load_with_tokenizer(
        home(asked.checkpoint),
        device=asked.device,
        backend=asked.backend,
        trust_remote_code=asked.trust_remote_code,
    )
    positions = model.config.get_text_config().max_position_embeddings
    if asked.window is not None and asked.window > positions:
        raise UserError(
            f"window={asked.window}: {asked.checkpoint} holds {positions} tokens; wanted at most "
            "these"
        )
    write = partial(generate, model, tokenizer, batch_size=asked.batch_size)

    def ask(prompts: list[str], tokens: int) -> list[str]:
        return write([chat_prompt(tokenizer, one) for one in prompts], max_new_tokens=tokens)

    begun = time.monotonic()
    found = summarize(
        text,
        asked.question,
        ask,
        tokenizer,
        window=asked.window or positions,
        summary_tokens=asked.summary_tokens,
        answer_tokens=asked.answer_tokens,
    )
    if asked.show:
        for number, summaries in enumerate(found.rounds, 1):
            sys.stdout.writelines(f"[{number}] {summary}\n\n" for summary in summaries)
    sys.stdout.write(f"{found.answer}\n")
    parts = ", then ".join(f"{len(summaries)} parts" for summaries in found.rounds)
    read = parts or "it fits the window, so it was read as it is"
    sys.stderr.write(f"compress: {read}; {time.monotonic() - begun:.0f} s\n")


if __name__ == "__main__":
    options.run(main, f"{__doc__}\n{Options.__doc__}\n")
