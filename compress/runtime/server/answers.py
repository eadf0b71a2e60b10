"""From a checked request to its answer: prompt, tokens, text, and OpenAI's JSON."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from compress.runtime.generate import encode
from compress.runtime.server.engine import Engine, EngineError, QueueFullError
from compress.runtime.server.errors import Refusal, busy, failed, stopping
from compress.runtime.server.metrics import Metrics, Watch
from compress.runtime.server.overlong import REFUSE, Message, cut, cut_chat
from compress.runtime.server.protocol import Chat, Common, Completion
from compress.runtime.server.sampling import Sampling
from compress.runtime.server.text import Decoder, Stop


@dataclass(kw_only=True)
class Served:
    """A checkpoint as it is served.

    vocabulary: rows of the embedding. prompt_tokens, new_tokens: the most that a request may bring,
    and ask for. context: what the model holds of both together, and the KV cache of one request.
    overlong: what becomes of a prompt that is longer, one of overlong.RULES.
    defaults: how the checkpoint's own generation config draws tokens. unanswered: requests that
    came and whose answer has not begun. stopping: set once the server is told to stop.
    """

    name: str
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    metrics: Metrics
    defaults: GenerationConfig
    end_tokens: list[int]
    vocabulary: int
    context: int
    prompt_tokens: int
    new_tokens: int
    overlong: str = REFUSE
    created: int = field(default_factory=lambda: int(time.time()))
    unanswered: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Answer:
    """One answer as it grows. cut: tokens that were taken from its prompt, which was too long."""

    prompt: list[int]
    most: int
    sampling: Sampling | None
    stops: list[str]
    cut: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    new_tokens: int = 0
    finish: str = "length"

    def usage(self) -> dict[str, int]:
        """Tokens that were read and made."""
        read, made = len(self.prompt), self.new_tokens
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def refuse_if_full(served: Served) -> None:
    """Raise Refusal where the queue is full, before any work on the prompt is done."""
    if served.engine.full:
        served.metrics.requests.labels("refused").inc()
        raise busy()


def begin(served: Served, body: Common) -> Answer:
    """What to answer, or Refusal: another model, a limit, a conversation that has no template.

    It may run in several threads at once.
    """
    if body.model != served.name:
        raise Refusal(
            404, f"no model {body.model!r}; there is {served.name!r}",
            param="model", code="model_not_found",
        )  # fmt: skip
    wanted = body.new_tokens()
    if wanted is not None and wanted > served.new_tokens:
        raise Refusal(
            400, f"max_tokens is {wanted}; wanted at most {served.new_tokens}", param="max_tokens"
        )
    whole = _prompt(served, body)
    prompt = whole if served.overlong == REFUSE else _fitting(served, body, whole)
    most = _most(served, len(prompt), wanted)
    dropped = len(whole) - len(prompt)
    return Answer(prompt, most, _sampling(served.defaults, body), body.stop, dropped)


def _prompt(served: Served, body: Common) -> list[int]:
    """The prompt's tokens, however many."""
    if isinstance(body, Completion):
        given = body.prompt
        ids = given if isinstance(given, list) else _encoded(served, given)
    else:
        assert isinstance(body, Chat)
        ids = _conversation(served, [message.plain() for message in body.messages])
    if not ids:
        raise Refusal(400, "the prompt is empty", param="prompt")
    return _known(ids, served.vocabulary)


def _encoded(served: Served, text: str) -> list[int]:
    return encode(served.tokenizer, [text], 0)[0][0].tolist() if text else []


def _conversation(served: Served, messages: Sequence[Message]) -> list[int]:
    """The tokens of `messages`, through the chat template."""
    tokenizer = served.tokenizer
    if not tokenizer.chat_template:
        raise Refusal(400, f"{served.name} has no chat template; wanted /v1/completions")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise Refusal(400, f"the chat template refuses it: {error}", param="messages") from error
    return _encoded(served, str(text))


def _fitting(served: Served, body: Common, ids: list[int]) -> list[int]:
    """`ids`, the prompt's tokens, cut by the server's rule where they are too many.

    Too many are those that would be refused. What is left of them leaves room for the answer: the
    tokens that are asked for, and where no number is, those that may be asked for, a quarter of the
    context at most.
    """
    wanted = body.new_tokens()
    if len(ids) <= min(served.prompt_tokens, served.context - (wanted or 1)):
        return ids
    answer = wanted or min(served.new_tokens, served.context // 4)
    most = min(served.prompt_tokens, served.context - answer)
    if isinstance(body, Chat):
        messages = [message.plain() for message in body.messages]
        of = partial(_conversation, served)
        return cut_chat(messages, ids, of, served.tokenizer, most, served.overlong)
    return cut(ids, most, served.overlong)


def _known(ids: list[int], vocabulary: int) -> list[int]:
    """`ids`, none past the embedding: one such would end the engine for all."""
    if max(ids) >= vocabulary:
        raise Refusal(400, f"a token id is above {vocabulary - 1}", param="prompt")
    return ids


def _most(served: Served, prompt: int, wanted: int | None) -> int:
    """Tokens to make at most, within all limits."""
    if prompt > served.prompt_tokens:
        raise Refusal(
            400,
            f"the prompt has {prompt} tokens; wanted at most {served.prompt_tokens}, or a server "
            "that cuts it (overlong=start, middle or end)",
            param="prompt", code="context_length_exceeded",
        )  # fmt: skip
    if wanted is None:
        return min(served.new_tokens, served.context - prompt)
    if prompt + wanted > served.context:
        raise Refusal(
            400,
            f"the prompt has {prompt} tokens, max_tokens is {wanted}; wanted at most "
            f"{served.context} together",
            param="max_tokens", code="context_length_exceeded",
        )  # fmt: skip
    return wanted


def _sampling(own: GenerationConfig, body: Common) -> Sampling | None:
    """How tokens are drawn; None: greedily. A checkpoint that samples by itself says how."""

    def chosen(asked: Any, name: str, otherwise: Any) -> Any:
        found = getattr(own, name, None) if asked is None and own.do_sample else asked
        return otherwise if found is None else found

    temperature = chosen(body.temperature, "temperature", 1.0 if own.do_sample else 0.0)
    if temperature == 0:
        return None
    top_k, top_p = chosen(body.top_k, "top_k", 0), chosen(body.top_p, "top_p", 1.0)
    seed = secrets.randbits(32) if body.seed is None else body.seed
    return Sampling(temperature, top_k, top_p, seed)


async def pieces(served: Served, answer: Answer, arrived: float) -> AsyncGenerator[str]:
    """The text as it comes; `answer` says at the end how it finished.

    arrived: when the request did, by `time.perf_counter`. Raises Refusal where the queue is full or
    the engine stops. Leaving early gives up the request.
    """
    watch = Watch(served.metrics, arrived, len(answer.prompt), answer.cut)
    decoder, stop = Decoder(served.tokenizer), Stop(answer.stops)
    outcome = "failed"
    try:
        made = served.engine.tokens(answer.prompt, answer.most, answer.sampling)
        async with aclosing(made):
            async for tokens in made:
                watch.came(len(tokens))
                answer.new_tokens += len(tokens)
                if text := stop.feed(decoder.feed(tokens)):
                    yield text
                if stop.hit or tokens[-1] in served.end_tokens:
                    answer.finish = "stop"
                    break
        if rest := stop.feed(decoder.rest()) + stop.rest():
            yield rest
        if stop.hit:
            answer.finish = "stop"
        outcome = answer.finish
    except QueueFullError as error:
        outcome = "refused"
        raise busy() from error
    except EngineError as error:
        raise (stopping() if served.stopping.is_set() else failed(str(error))) from error
    except (GeneratorExit, asyncio.CancelledError):
        outcome = "abandoned"
        raise
    finally:
        watch.ended(outcome)
