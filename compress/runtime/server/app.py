"""The HTTP side: routes, the key, bodies in, answers out."""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from compress.runtime.server import answers, wire
from compress.runtime.server.answers import Answer, Served
from compress.runtime.server.errors import Refusal, stopping
from compress.runtime.server.protocol import Chat, Common, Completion, read
from compress.runtime.server.wire import CHAT, TEXT, Form

BODY_BYTES = 4 << 20
"""A longer body is refused unread: it holds text of about a million tokens."""
BODY_SECONDS = 30
"""For a body to arrive."""
JSON = "application/json"
CUT = "X-Prompt-Tokens-Cut"
"""The header that says how many tokens were cut from a prompt that was too long."""
GONE = 499
"""The status, as nginx has it, of what no client waits for."""

Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


def build(served: Served, api_key: str | None) -> Starlette:
    """The application. api_key: wanted as a bearer token under /v1; None: none is."""

    def locked(handler: Handler) -> Handler:
        async def open_if_known(request: Request) -> Response:
            if api_key is not None:
                given = request.headers.get("authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
                    raise Refusal(
                        401, "the API key is missing or wrong", code="invalid_api_key",
                        headers={"WWW-Authenticate": "Bearer"},
                    )  # fmt: skip
            return await handler(request)

        return open_if_known

    async def answered(request: Request, form: Form, kind: type[Common]) -> Response:
        served.unanswered += 1
        try:
            return await _answer(served, request, form, kind)
        finally:
            served.unanswered -= 1

    async def chat(request: Request) -> Response:
        return await answered(request, CHAT, Chat)

    async def completion(request: Request) -> Response:
        return await answered(request, TEXT, Completion)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(served)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise Refusal(404, f"no such model; there is {served.name!r}", code="model_not_found")
        return JSONResponse(_model(served))

    async def health(request: Request) -> Response:
        alive = served.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def metrics(request: Request) -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")

    return Starlette(
        routes=[
            Route("/v1/chat/completions", locked(chat), methods=["POST"]),
            Route("/v1/completions", locked(completion), methods=["POST"]),
            Route("/v1/models", locked(models)),
            Route("/v1/models/{name:path}", locked(model)),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _no_route,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )


async def _answer(served: Served, request: Request, form: Form, kind: type[Common]) -> Response:
    with _refusals_counted(served):
        sent = await _body(served, request)
    arrived = time.perf_counter()
    answers.refuse_if_full(served)
    # Of a long prompt JSON, chat template and tokens take seconds, which no stream is to wait for.
    with _refusals_counted(served):
        body, answer = await asyncio.to_thread(_begun, served, kind, sent)
    pieces = answers.pieces(served, answer, arrived)
    headers = {CUT: str(answer.cut)} if answer.cut else {}
    if not body.stream:
        text = await _unless_gone(request, _joined(pieces))
        return JSONResponse(wire.whole(form, served.name, answer, text), headers=headers)
    # The first piece before the headers, so that a full queue is a status of its own.
    first = await _unless_gone(request, _first(pieces))
    usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamingResponse(
        wire.events(form, served.name, answer, pieces, first, usage),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"} | headers,
    )


@contextmanager
def _refusals_counted(served: Served) -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        outcome = "invalid" if refusal.status < 500 else "failed"
        served.metrics.requests.labels(outcome).inc()
        raise


def _begun(served: Served, kind: type[Common], sent: bytes) -> tuple[Common, Answer]:
    body = read(kind, sent)
    return body, answers.begin(served, body)


async def _joined(pieces: AsyncGenerator[str]) -> str:
    async with aclosing(pieces):
        return "".join([piece async for piece in pieces])


async def _first(pieces: AsyncGenerator[str]) -> str:
    """The first piece; nothing where the answer is empty."""
    return await anext(pieces, "")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; it is cancelled where the client leaves, and ClientDisconnect raised."""
    task = asyncio.create_task(work)
    leaves = asyncio.create_task(_leaves(request))
    try:
        await asyncio.wait({task, leaves}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        task.cancel()
        leaves.cancel()


async def _leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(served: Served, request: Request) -> bytes:
    """The body, once it is there; Refusal where it takes too long, or the server stops before.

    Of other types than JSON a browser sends to this machine what any page asks for, unasked.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != JSON:
        raise Refusal(
            415, f"Content-Type is {kind!r}; wanted {JSON}", headers={"Connection": "close"}
        )
    reading = asyncio.create_task(_read(request))
    stops = asyncio.create_task(served.stopping.wait())
    try:
        await asyncio.wait(
            {reading, stops}, timeout=BODY_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if reading.done():
            return await reading
        if stops.done():
            raise stopping()
        raise Refusal(
            408,
            f"the body did not come within {BODY_SECONDS} s; send it again",
            headers={"Connection": "close"},
        )
    finally:
        reading.cancel()
        stops.cancel()


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise Refusal(413, f"the body is too long; wanted at most {BODY_BYTES} bytes")
    return bytes(body)


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "compress",
        "max_model_len": served.context,
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Refusal(error.status_code, message, headers=dict(error.headers or {})).response()


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    return Refusal(500, "the server failed; its log says how", kind="server_error").response()
