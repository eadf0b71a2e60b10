"""A quantized tiny model behind a real socket on loopback."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from openai import OpenAI

from compress import serve
from compress.qtensor import QuantSpec
from compress.runtime.server import app, lifetime
from compress.runtime.server.answers import Served
from tests.unit.test_runtime import change_config, quantized

NAME = "tiny"
LONG = 300
"""The most tokens that a request to `server` may ask for."""
CLIENT: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('ends with an answer') }}"
    "{% endif %}"
)


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process: where it listens, and what is inside."""

    port: int
    served: Served
    client: OpenAI
    loop: asyncio.AbstractEventLoop

    def until(self, reached: Callable[[], bool]) -> bool:
        """Whether `reached` comes true within ten seconds."""
        wait = threading.Event()
        return any(reached() or wait.wait(0.02) for _ in range(500))


@pytest.fixture(scope="session")
def folder(stories260k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """W8A8 with 16-bit activations, and a chat template."""
    folder = tmp_path_factory.mktemp("serving") / NAME
    quantized(stories260k, folder, QuantSpec(8, activation_bits=8))
    change_config(folder, dtype="bfloat16")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextmanager
def running(settings: serve.Options, api_key: str | None = None) -> Iterator[Running]:
    """A server of these settings; it stops at the end."""
    served = lifetime.served(settings)
    listening = serve.listen("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(app.build(served, api_key), lifespan="off", log_level="warning")
    )

    loop = asyncio.new_event_loop()

    async def run() -> None:
        await served.engine.start()
        await server.serve(sockets=[listening])
        await served.engine.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=[run()])
    thread.start()
    try:
        port = listening.getsockname()[1]
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", **CLIENT) as client:
            here = Running(port, served, client, loop)
            assert here.until(lambda: server.started)
            yield here
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()
        loop.close()


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Running]:
    """With room for 16 at once, and for two more that wait."""
    settings = serve.Options(
        checkpoint=str(folder), device="cpu", running=16, waiting=2, kv_tokens=4096, new_tokens=LONG
    )
    with running(settings) as here:
        yield here
