"""Prompts that are too long, refused or cut to fit by a rule."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compress.runtime.server.errors import Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFUSE = "refuse"
RULES = (REFUSE, "start", "middle", "end")
"""What is cut: `start` suits conversations and logs, `end` texts that open with what matters, and
`middle` documents with the question after them (LongBench, Bai et al., 2024)."""

Message = dict[str, str]


def cut(ids: Sequence[int], most: int, rule: str) -> list[int]:
    """`ids` without so many at the start, in the middle, or at the end that `most` are left."""
    if rule == "end" or len(ids) <= most:
        return list(ids[:most])
    tail = most if rule == "start" else most // 2
    return [*ids[: most - tail], *ids[len(ids) - tail :]]


def cut_chat(
    messages: Sequence[Message],
    ids: list[int],
    encode: Callable[[Sequence[Message]], list[int]],
    tokenizer: "PreTrainedTokenizerBase",
    most: int,
    rule: str,
) -> list[int]:
    """The tokens of a conversation, at most `most`: its longest message is cut, all else stays.

    ids: of the messages as they are. encode: messages to tokens, through the chat template. Raises
    Refusal where all else alone is too long.
    """
    at = max(range(len(messages)), key=lambda i: len(messages[i]["content"]))
    text = tokenizer(messages[at]["content"], add_special_tokens=False, verbose=False).input_ids
    room = len(text)
    # More than once where tokens at the seams are cut otherwise when they are encoded again.
    while len(ids) > most:
        room -= len(ids) - most
        if room < 1:
            raise Refusal(
                400, f"the prompt has over {most} tokens without its longest message",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip
        kept = str(tokenizer.decode(cut(text, room, rule))).replace("\ufffd", "")
        ids = encode([*messages[:at], {**messages[at], "content": kept}, *messages[at + 1 :]])
    return ids
