"""A server from the loading of its checkpoint to the last answer."""

import asyncio
import signal
import socket
import time
from pathlib import Path
from types import FrameType

import uvicorn
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from compress.errors import UserError
from compress.log import logger
from compress.model_path import home
from compress.runtime.generate import encode, greedy_config
from compress.runtime.loader import load_with_tokenizer
from compress.runtime.server.answers import Served
from compress.runtime.server.app import build
from compress.runtime.server.engine import Engine, context_of
from compress.runtime.server.key import KEY_VARIABLE
from compress.runtime.server.metrics import Metrics
from compress.runtime.server.options import Options

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LAST_SECONDS = 1
"""For answers to reach their clients after the engine has stopped, at least."""
POLL_SECONDS = 0.1


def served(settings: Options) -> Served:
    """Load the checkpoint and put an engine around it."""
    folder, limits = home(settings.checkpoint), settings.limits()
    model, tokenizer = load_with_tokenizer(
        folder,
        device=settings.device,
        backend=settings.backend,
        trust_remote_code=settings.trust_remote_code,
    )
    _check_template(folder, tokenizer)
    # The first call takes a stored truncation off, which no other thread may meet halfway.
    encode(tokenizer, ["a"], 0)
    greedy = greedy_config(model, tokenizer, 1)
    ends = greedy.eos_token_id
    end_tokens = ends if isinstance(ends, list) else [ends] if ends is not None else []
    context = context_of(model, limits)
    engine = Engine(model, end_tokens, limits)
    return Served(
        name=settings.name or _name(folder.resolve()),
        engine=engine,
        tokenizer=tokenizer,
        metrics=Metrics(engine),
        defaults=model.generation_config,
        end_tokens=end_tokens,
        vocabulary=model.get_input_embeddings().num_embeddings,
        context=context,
        prompt_tokens=_within("prompt_tokens", settings.prompt_tokens, context),
        new_tokens=_within("new_tokens", settings.new_tokens, context),
        overlong=settings.overlong,
    )


def _within(name: str, limit: int | None, context: int) -> int:
    """The limit on a request's tokens, of prompt or answer: one token at least is the other's."""
    if limit is not None and limit >= context:
        logger.info(f"  {name}={limit}: the context of {context} tokens leaves {context - 1}")
    return min(limit or context, context - 1)


def _check_template(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError for a chat template that is no Jinja: every conversation would fail."""
    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise UserError(
            f"{folder}: the chat template does not parse: line {error.lineno}: {error.message}; "
            "mend it, or take it away"
        ) from error
    except TemplateError:
        return  # it refuses this conversation, as it may, and not all


def _name(folder: Path) -> str:
    """The folder's, or that of the run whose checkpoint it is."""
    return folder.parent.name if folder.name == "checkpoint" else folder.name


async def run(served: Served, listening: socket.socket, settings: Options, key: str | None) -> None:
    """Serve until SIGTERM or SIGINT; then finish what runs, as far as `grace` lets it."""
    server = uvicorn.Server(
        uvicorn.Config(
            build(served, key),
            log_level="warning",
            lifespan="off",
        )
    )

    def stopped(signal_number: int, frame: FrameType | None) -> None:
        """Before Uvicorn takes the signals over; after it has stopped, it sends them again."""
        server.should_exit = True

    await served.engine.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopped)
    host, port = listening.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    logger.info(f"{served.name} is served at http://{where}/v1")
    if settings.host not in LOOPBACK and key is None:
        logger.info(
            f"other machines can reach it, without a key; set {KEY_VARIABLE} to ask for one"
        )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.should_exit and not serving.done():
            await asyncio.sleep(POLL_SECONDS)
        logger.info(f"stopping; requests have {settings.grace:g} s to finish")
    finally:
        end = time.monotonic() + settings.grace
        await stop(served, settings.grace)
    await asyncio.wait([serving], timeout=max(LAST_SECONDS, end - time.monotonic()))
    if left := list(server.server_state.connections):
        logger.info(f"cut off {len(left)} that did not read the answer in time")
        for connection in left:
            connection.transport.abort()
    await serving


async def stop(served: Served, grace: float) -> None:
    """Stop the engine once all that came is answered, or after `grace` seconds.

    A request whose prompt is still read is not yet the engine's, which from then on takes no more.
    """
    served.stopping.set()
    deadline = time.monotonic() + grace
    while served.unanswered and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)
    await served.engine.stop(max(0.0, deadline - time.monotonic()))
