"""The server over HTTP, by the official client where it can say what is to be said."""

import asyncio
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, BadRequestError, InternalServerError, NotFoundError
from transformers import AutoTokenizer

from compress import serve
from compress.runtime.generate import generate
from compress.runtime.loader import load
from compress.runtime.server import answers, app, lifetime
from compress.runtime.server.answers import Answer, Served
from compress.runtime.server.protocol import Common
from tests.serving.asking import complete, counted, half_a_body, number
from tests.serving.conftest import LONG, NAME, Running, running

SEND_AGAIN = "the server is stopping; send it again"
PROMPTS = [
    "Once upon a time, there was a",
    "Lily",
    "The big dog ran to the park and saw a cat. The cat was",
    "One day, Tom went out to play with his red ball. " * 6,
]


def offline(folder: Path, prompts: list[str], lengths: list[int]) -> list[str]:
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    return [
        generate(model, tokenizer, [prompt], max_new_tokens=length, batch_size=1)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def test_sixteen_in_flight_are_answered_as_each_alone(server: Running, folder: Path) -> None:
    prompts = [PROMPTS[i % 4] + " and then" * (i // 4) for i in range(18)]
    lengths = [(3, 30, 8, 17)[i // 2 % 4] for i in range(18)]
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(
            lambda of: complete(server.client, of[0], max_tokens=of[1]),
            zip(prompts, lengths, strict=True),
        )
        texts = [answer.choices[0].text for answer in found]
    assert texts == offline(folder, prompts, lengths)
    assert len(set(texts)) > 10
    assert server.until(lambda: number(server, "kv_tokens") == 0)
    assert 0 < number(server, "kv_tokens_most") <= number(server, "kv_tokens_capacity")


def test_a_stream_is_the_whole_answer_piece_by_piece(server: Running) -> None:
    timed = number(server, "time_per_output_token_seconds_count")
    whole = complete(server.client, PROMPTS[0])
    assert number(server, "time_per_output_token_seconds_count") == timed + 24 - 1
    options = {"include_usage": True}
    with complete(server.client, PROMPTS[0], stream=True, stream_options=options) as stream:
        events = list(stream)
    *parts, last, counted = events
    assert "".join(event.choices[0].text for event in parts) == whole.choices[0].text
    assert len(parts) > 10
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert counted.usage == whole.usage
    assert whole.usage.completion_tokens == 24
    tokens = AutoTokenizer.from_pretrained(server.served.tokenizer.name_or_path)(PROMPTS[0])
    assert whole.usage.prompt_tokens == len(tokens.input_ids)
    assert complete(server.client, tokens.input_ids).choices[0].text == whole.choices[0].text


def test_a_chat_goes_through_the_template(server: Running) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Once upon a time,"},
        {"role": "user", "content": [{"type": "text", "text": "there was a"}]},
    ]
    asked = {"model": NAME, "messages": messages, "temperature": 0, "max_completion_tokens": 20}
    whole = server.client.chat.completions.create(**asked)
    said = whole.choices[0].message.content
    same = complete(server.client, "<s>Once upon a time, there was a ", max_tokens=20)
    assert said == same.choices[0].text
    with server.client.chat.completions.create(**asked, stream=True) as stream:
        pieces = [event.choices[0].delta for event in stream]
    assert pieces[0].role == "assistant"
    assert "".join(piece.content or "" for piece in pieces) == said
    again = [*messages, whole.choices[0].message, {"role": "user", "content": "Then"}]
    assert server.client.chat.completions.create(**asked | {"messages": again}).choices[0]
    with pytest.raises(BadRequestError, match="ends with an answer"):
        server.client.chat.completions.create(
            model=NAME, messages=[{"role": "assistant", "content": "Yes."}]
        )


def test_a_stop_string_ends_the_answer_before_it(server: Running) -> None:
    text = complete(server.client, PROMPTS[0], max_tokens=60).choices[0].text
    # One character each: where it stands inside a token, the token's start is shown, and once.
    for stop in (text[20:24], ["zzz", text[20:24]], *text[20:26]):
        answer = complete(server.client, PROMPTS[0], max_tokens=60, stop=stop).choices[0]
        found = stop[-1] if isinstance(stop, list) else stop
        assert answer.text == text[: text.index(found)]
        assert answer.finish_reason == "stop"
    assert server.until(lambda: number(server, "requests_running") == 0)


def test_a_seed_draws_the_same_text_again(server: Running) -> None:
    drawn = [
        complete(server.client, PROMPTS[0], temperature=1.5, seed=seed, top_p=0.95).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = complete(server.client, PROMPTS[0]).choices[0].text
    likeliest = complete(server.client, PROMPTS[0], temperature=1.5, extra_body={"top_k": 1})
    assert likeliest.choices[0].text == greedy


def test_models_and_health(server: Running) -> None:
    (model,) = server.client.models.list().data
    assert model.id == server.client.models.retrieve(NAME).id == NAME
    with pytest.raises(NotFoundError, match="no such model; there is 'tiny'"):
        server.client.models.retrieve("other")
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(server: Running, stream: bool) -> None:
    made, left = number(server, "new_tokens_total"), counted(server, "abandoned")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = {"model": NAME, "prompt": "Once", "max_tokens": LONG, "temperature": 0, "stream": stream}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    assert server.until(lambda: number(server, "kv_tokens") > 0)
    connection.close()
    assert server.until(lambda: number(server, "requests_running") == 0)
    assert number(server, "kv_tokens") == 0
    assert number(server, "new_tokens_total") - made < LONG
    assert not server.served.engine._manager.output_router.result_handlers
    assert server.until(lambda: counted(server, "abandoned") == left + 1)


def test_a_prompt_that_takes_long_to_read_holds_up_no_one_else(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reading, others_done = answers.begin, threading.Event(), threading.Event()

    def slow(served: Served, body: Common) -> Answer:
        if body.user == "slow":
            reading.set()
            assert others_done.wait(30)
        return read(served, body)

    monkeypatch.setattr(answers, "begin", slow)
    with ThreadPoolExecutor(1) as pool:
        stream = complete(server.client, "Once", max_tokens=40, stream=True)
        next(stream)
        waited = number(server, "time_to_first_token_seconds_sum")
        long = pool.submit(complete, server.client, PROMPTS[3], user="slow")
        try:
            assert reading.wait(10)
            since = time.perf_counter()
            quick = server.client.with_options(timeout=10)
            assert complete(quick, "Lily", max_tokens=4).usage.completion_tokens == 4
            assert list(stream)[-1].choices[0].finish_reason == "length"
            took = time.perf_counter() - since
        finally:
            others_done.set()
        assert long.result().usage.completion_tokens == 24
        assert number(server, "time_to_first_token_seconds_sum") > waited + took


def test_a_prompt_that_is_still_read_is_answered_before_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reading, go_on = answers.begin, threading.Event(), threading.Event()

    def slow(served: Served, body: Common) -> Answer:
        reading.set()
        assert go_on.wait(30)
        return read(served, body)

    monkeypatch.setattr(answers, "begin", slow)
    settings = serve.Options(checkpoint=str(folder), device="cpu")
    with running(settings) as ends, ThreadPoolExecutor(1) as pool:
        late = pool.submit(complete, ends.client, PROMPTS[3])
        assert reading.wait(10)
        stopped = asyncio.run_coroutine_threadsafe(lifetime.stop(ends.served, 30), ends.loop)
        assert not stopped.done()
        go_on.set()
        assert late.result().usage.completion_tokens == 24
        stopped.result()
        assert not ends.served.engine.alive


def test_what_the_server_does_not_finish_is_to_be_sent_again(folder: Path) -> None:
    settings = serve.Options(checkpoint=str(folder), device="cpu")
    with running(settings) as ends, ThreadPoolExecutor(1) as pool:
        long = pool.submit(complete, ends.client, "Once", max_tokens=450)
        stream = complete(ends.client, "Lily", max_tokens=450, stream=True)
        next(stream)
        assert ends.until(lambda: number(ends, "requests_running") == 2)
        asyncio.run_coroutine_threadsafe(lifetime.stop(ends.served, 0), ends.loop)
        with pytest.raises(InternalServerError, match=SEND_AGAIN) as whole:
            long.result()
        assert (whole.value.status_code, whole.value.response.headers["Retry-After"]) == (503, "5")
        with pytest.raises(APIError, match=SEND_AGAIN):
            list(stream)
        stream.close()
        assert counted(ends, "failed") == 2
        with pytest.raises(InternalServerError, match=SEND_AGAIN):
            complete(ends.client, "Once")
        with pytest.raises(urllib.error.HTTPError, match="503") as unwell:
            urllib.request.urlopen(f"http://127.0.0.1:{ends.port}/health", timeout=30)
        unwell.value.close()


def test_an_engine_that_fails_is_told(folder: Path) -> None:
    with running(serve.Options(checkpoint=str(folder), device="cpu")) as ends:
        ends.served.engine._manager.stop(hard_stop=True)
        with pytest.raises(InternalServerError, match="the engine has stopped") as caught:
            complete(ends.client, "Once")
        assert caught.value.status_code == 503


def test_a_body_that_does_not_come_is_waited_for_so_long(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    with half_a_body(server.port) as client, client.makefile("rb") as answer:
        said = answer.read()  # to the end: the connection is closed
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come within 0.1 s; send it again" in said
