"""Answers in OpenAI's JSON: whole, or as server-sent events."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from compress.runtime.server.answers import Answer
from compress.runtime.server.errors import Refusal

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Form:
    """What differs between the two kinds: names, and where the text stands."""

    prefix: str
    whole: str
    part: str
    text: Callable[[str], Json]
    piece: Callable[[str], Json]
    opening: Json
    closing: Json


CHAT = Form(
    prefix="chatcmpl-",
    whole="chat.completion",
    part="chat.completion.chunk",
    text=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    piece=lambda text: {"delta": {"content": text}},
    opening={"delta": {"role": "assistant", "content": ""}},
    closing={"delta": {}},
)
TEXT = Form(
    prefix="cmpl-",
    whole="text_completion",
    part="text_completion",
    text=lambda text: {"text": text},
    piece=lambda text: {"text": text},
    opening={"text": ""},
    closing={"text": ""},
)


def whole(form: Form, model: str, answer: Answer, text: str) -> Json:
    """A finished answer in one object."""
    choice = _choice(form.text(text), answer.finish)
    head = _head(form, form.whole, model, answer)
    return head | {"choices": [choice], "usage": answer.usage()}


async def events(
    form: Form, model: str, answer: Answer, pieces: AsyncGenerator[str], first: str, usage: bool
) -> AsyncIterator[bytes]:
    """The answer as events: `first`, each of `pieces`, how it finished, and [DONE].

    usage: count the tokens in one more event. What goes wrong on the way is an event too.
    """
    head = _head(form, form.part, model, answer)
    if usage:
        head["usage"] = None
    yield _event(head | {"choices": [_choice(form.opening)]})
    try:
        async with aclosing(pieces):
            if first:
                yield _event(head | {"choices": [_choice(form.piece(first))]})
            async for text in pieces:
                yield _event(head | {"choices": [_choice(form.piece(text))]})
    except Refusal as refusal:
        yield _event(refusal.body)
        return
    yield _event(head | {"choices": [_choice(form.closing, answer.finish)]})
    if usage:
        yield _event(head | {"choices": [], "usage": answer.usage()})
    yield DONE


def _head(form: Form, kind: str, model: str, answer: Answer) -> Json:
    name = form.prefix + answer.id
    return {"id": name, "object": kind, "created": answer.created, "model": model}


def _choice(content: Json, finish: str | None = None) -> Json:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish}


def _event(body: Json) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()
