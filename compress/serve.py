"""Serve a checkpoint over HTTP, as OpenAI's clients speak it: docs/serving.md.

python -m compress.serve checkpoint=DIR [port=8000] [field=value ...]
"""

import asyncio
import errno
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from compress import options
from compress.errors import ConfigError, UserError
from compress.log import logger
from compress.runtime import devices
from compress.runtime.generate import encode, greedy_config
from compress.runtime.loader import load_with_tokenizer
from compress.runtime.server.answers import Served
from compress.runtime.server.app import build
from compress.runtime.server.engine import Engine, Limits, context_of
from compress.runtime.server.metrics import Metrics
from compress.runtime.server.overlong import REFUSE, RULES

KEY_VARIABLE = "COMPRESS_API_KEY"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
LAST_SECONDS = 1
"""For answers to reach their clients after the engine has stopped, at least."""
POLL_SECONDS = 0.1


@dataclass(kw_only=True)
class Options:
    """checkpoint: the folder. name: of the model, for clients; null: the folder's, or
    that of the folder above `checkpoint`.

    host, port: where to listen; port 0: any that is free. device: cpu, cuda, or auto. backend: of
    the kernels; null: the device's own. running, waiting, kv_tokens, batch_tokens: see Limits.
    prompt_tokens, new_tokens: the most that a request may bring, and ask for; null: what the
    model's context holds. overlong: what becomes of a prompt that is longer: refuse, or what is
    cut of it, start, middle or end. grace: seconds that requests have to finish after SIGTERM. The
    API key, if there is to be one, is in the environment as COMPRESS_API_KEY.
    """

    checkpoint: str = "???"
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    backend: str | None = None
    running: int = Limits.running
    waiting: int = Limits.waiting
    kv_tokens: int = Limits.kv_tokens
    batch_tokens: int = Limits.batch_tokens
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    overlong: str = REFUSE
    grace: float = 30.0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        problems = devices.problems(self.device)
        if not 0 <= self.port < 1 << 16:
            problems.append(f"port is {self.port}; wanted 0 to 65535")
        if not 0 <= self.grace < math.inf:
            problems.append(f"grace is {self.grace}; wanted seconds, 0 or more")
        for name in ("prompt_tokens", "new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value}; wanted at least 1, or null")
        if self.overlong not in RULES:
            problems.append(f"overlong is {self.overlong!r}; wanted one of {', '.join(RULES)}")
        if problems:
            raise ConfigError(problems)
        self.device = devices.picked(self.device)

    def limits(self) -> Limits:
        """Those of the engine."""
        return Limits(
            running=self.running,
            waiting=self.waiting,
            kv_tokens=self.kv_tokens,
            batch_tokens=self.batch_tokens,
        )


def served(settings: Options) -> Served:
    """Load the checkpoint and put an engine around it."""
    folder, limits = Path(settings.checkpoint).expanduser(), settings.limits()
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


def listen(host: str, port: int) -> socket.socket:
    """The socket, taken before the model is loaded; raises UserError where it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        another = port != 0 and number in (errno.EADDRINUSE, errno.EACCES)
        advice = "; port=0 takes one that is free" if another else ""
        raise UserError(f"host={host} port={port}: {reason}{advice}") from error


def key_of(environ: Mapping[str, str]) -> str | None:
    """The API key, if there is to be one; raises UserError for one that no header can carry."""
    key = environ.get(KEY_VARIABLE, "").rstrip("\r\n")  # which a file ends with
    for place, character in enumerate(key, 1):
        if not "!" <= character <= "~":
            raise UserError(
                f"{KEY_VARIABLE} has {character!r} at character {place}; wanted visible ASCII "
                "alone, which every client can send"
            )
    return key or None


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
    _say(f"{served.name} is served at http://{where}/v1")
    if settings.host not in LOOPBACK and key is None:
        _say(f"other machines can reach it, without a key; set {KEY_VARIABLE} to ask for one")
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.should_exit and not serving.done():
            await asyncio.sleep(POLL_SECONDS)
        _say(f"stopping; requests have {settings.grace:g} s to finish")
    finally:
        end = time.monotonic() + settings.grace
        await stop(served, settings.grace)
    await asyncio.wait([serving], timeout=max(LAST_SECONDS, end - time.monotonic()))
    if left := list(server.server_state.connections):
        _say(f"cut off {len(left)} that did not read the answer in time")
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


def _say(line: str) -> None:
    sys.stderr.write(f"compress: {line}\n")
    sys.stderr.flush()


def main(words: list[str]) -> None:
    """Read the options, load, serve."""
    settings, key = options.parsed(Options, words), key_of(os.environ)
    with listen(settings.host, settings.port) as listening:
        asyncio.run(run(served(settings), listening, settings, key))


if __name__ == "__main__":
    options.run(main, f"{__doc__}\n{Options.__doc__}\n")
