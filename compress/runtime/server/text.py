"""From token ids to text as they come: no half characters, nothing past a stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the first bytes of a character to."""
OPEN_TOKENS = 32
"""Tokens that may wait for the rest of a character, which has four bytes at most: so many are no
text, and are shown as they are, or each new one would have all before it decoded again."""


class Decoder:
    """Text of token ids, piece by piece; special tokens are left out.

    What a token adds can depend on the one before (spaces, bytes of a character), so each piece is
    the difference that its tokens make after those of the piece before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._open: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain now; the rest of an unfinished character comes later."""
        self._open += tokens
        text = self._difference()
        unfinished = not text or text.endswith(UNFINISHED)
        if unfinished and len(self._open) < OPEN_TOKENS:
            return ""
        self._before, self._open = self._open, []
        return text

    def rest(self) -> str:
        """What is left at the end, as `decode` shows it."""
        text = self._difference()
        self._open = []
        return text

    def _difference(self) -> str:
        before = self._decode(self._before)
        return self._decode(self._before + self._open)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class Stop:
    """Text up to the first of some stop strings, of which nothing is let through."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What may be shown now; `hit` is set where a stop string is complete, then it is over."""
        if self.hit:
            return ""
        self._held += text
        starts = [at for s in self._strings if (at := self._held.find(s)) >= 0]
        if starts:
            text, self._held = self._held[: min(starts)], ""
            self.hit = True
            return text
        shown = self._begun()
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def rest(self) -> str:
        """What was held back in case that a stop string came."""
        return self._held

    def _begun(self) -> int:
        """Where the longest end of the text starts that a stop string begins with."""
        held = self._held
        first = max(0, len(held) + 1 - max(map(len, self._strings), default=0))
        ends = (at for at in range(first, len(held)) if self._opens_one(held[at:]))
        return next(ends, len(held))

    def _opens_one(self, text: str) -> bool:
        return any(s.startswith(text) for s in self._strings)
