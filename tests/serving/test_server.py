"""The server over HTTP, by the official client where it can say what is to be said."""

import asyncio
import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import (
    APIError,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
    RateLimitError,
)
from transformers import AutoTokenizer

from compress import serve
from compress.runtime.generate import generate
from compress.runtime.loader import load
from compress.runtime.server import answers
from compress.runtime.server.answers import Answer, Served, begin
from compress.runtime.server.errors import Refusal
from compress.runtime.server.protocol import Common, Completion
from tests.serving.conftest import NAME, Running, running

PROMPTS = [
    "Once upon a time, there was a",
    "Lily",
    "The big dog ran to the park and saw a cat. The cat was",
    "One day, Tom went out to play with his red ball. " * 6,
]
LONG = 300


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(
        model=NAME, prompt=prompt, **({"temperature": 0, "max_tokens": 24} | fields)
    )


def raw(server: Running, body: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def number(server: Running, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"compress_{name} ")]
    return float(value)


def counted(server: Running, outcome: str) -> float:
    """Requests that ended so."""
    (family,) = server.served.metrics.requests.collect()
    return sum(
        sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["outcome"] == outcome
    )


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
    whole = complete(server.client, PROMPTS[0])
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
    made = number(server, "new_tokens_total")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = {"model": NAME, "prompt": "Once", "max_tokens": LONG, "temperature": 0, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert server.until(lambda: number(server, "kv_tokens") > 0)
    connection.close()
    assert server.until(lambda: number(server, "requests_running") == 0)
    assert number(server, "kv_tokens") == 0
    assert number(server, "new_tokens_total") - made < LONG
    assert not server.served.engine._manager.output_router.result_handlers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "word " * 600}, "the prompt has 1802 tokens; wanted at most 511"),
        ({"max_tokens": LONG + 1}, "max_tokens is 301; wanted at most 300"),
        ({"prompt": [5] * 400, "max_tokens": 113}, "wanted at most 512 together"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [512]}, "a token id is above 511"),
        ({"n": 2}, "n: Input should be 1"),
        ({"stop": ""}, "stop.constrained-str: String should have at least 1 character"),
        ({"logprobs": 3}, "logprobs: Input should be null"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"extra_body": {"nonsense": 1}}, "nonsense: Extra inputs are not permitted"),
    ],
)
def test_what_is_beyond_the_limits_is_refused(
    server: Running, fields: dict[str, Any], message: str
) -> None:
    before = counted(server, "invalid")
    with pytest.raises(BadRequestError) as caught:
        complete(server.client, **({"prompt": "Once"} | fields))
    assert counted(server, "invalid") == before + 1
    assert message in caught.value.message
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == next(reversed(fields.get("extra_body", fields)))


def test_a_tokenizer_larger_than_the_model_does_not_end_the_engine(server: Running) -> None:
    smaller = replace(server.served, vocabulary=100)
    for prompt in (PROMPTS[0], [5, 100]):
        with pytest.raises(Refusal, match="a token id is above 99"):
            begin(smaller, Completion(model=NAME, prompt=prompt))
    assert begin(smaller, Completion(model=NAME, prompt=[5, 99])).prompt == [5, 99]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"model": "tiny", "pro', 400, "the body is no JSON: EOF while parsing"),
        (b"\xff\xfe", 400, "the body is no JSON"),
        (b"[" * 100_000, 400, "the body is no JSON: recursion limit"),
        (b"[]", 400, "Input should be an object"),
        (b"{}", 400, "model: Field required"),
        (b'{"model": "big", "prompt": "a"}', 404, "no model 'big'; there is 'tiny'"),
        (b" " * (4 << 20) + b"{}", 413, "the body is too long"),
    ],
)
def test_what_is_no_request_is_refused(
    server: Running, body: bytes, status: int, message: str
) -> None:
    found, answer = raw(server, body)
    assert (found, message in answer["error"]["message"]) == (status, True)
    assert answer["error"]["type"] == "invalid_request_error"


def test_an_unknown_route_is_told_in_the_same_shape(server: Running) -> None:
    assert raw(server, b"{}", "/v1/embeddings")[0] == 404
    status, answer = raw(server, b"{}", "/health")
    assert status == 405
    assert "POST /health: Method Not Allowed" in answer["error"]["message"]


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
        long = pool.submit(complete, server.client, PROMPTS[3], user="slow")
        try:
            assert reading.wait(10)
            quick = server.client.with_options(timeout=10)
            assert complete(quick, "Lily", max_tokens=4).usage.completion_tokens == 4
            assert list(stream)[-1].choices[0].finish_reason == "length"
        finally:
            others_done.set()
        assert long.result().usage.completion_tokens == 24


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
        stopped = asyncio.run_coroutine_threadsafe(serve.stop(ends.served, 30), ends.loop)
        assert not stopped.done()
        go_on.set()
        assert late.result().usage.completion_tokens == 24
        stopped.result()
        assert not ends.served.engine.alive


def test_a_full_queue_is_told_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = serve.Options(checkpoint=str(folder), device="cpu", running=1, waiting=1)
    with running(settings) as small, ThreadPoolExecutor(2) as pool:
        held = [pool.submit(complete, small.client, "Once", max_tokens=150) for _ in range(2)]
        assert small.until(lambda: number(small, "requests_waiting") == 1)
        assert number(small, "requests_running") == 1
        begin, begun = answers.begin, []
        monkeypatch.setattr(answers, "begin", lambda *of: begun.append(of) or begin(*of))
        for stream in (False, True):
            with pytest.raises(RateLimitError, match="the queue is full") as caught:
                complete(small.client, "Lily", stream=stream)
            assert caught.value.response.headers["retry-after"] == "1"
        assert begun == []  # no prompt is read for nothing
        assert counted(small, "refused") == 2
        assert [one.result().usage.completion_tokens for one in held] == [150, 150]
        assert complete(small.client, "Lily").choices[0].text


def test_a_key_is_asked_for_where_there_is_one(folder: Path) -> None:
    settings = serve.Options(checkpoint=str(folder), device="cpu", name="mine")
    with running(settings, api_key="secret") as locked:
        with pytest.raises(AuthenticationError, match="the API key is missing or wrong"):
            locked.client.models.list()
        known = locked.client.with_options(api_key="secret")
        assert [model.id for model in known.models.list()] == ["mine"]
        assert number(locked, "requests_running") == 0


def test_a_request_that_the_engine_ends_is_told_so(folder: Path) -> None:
    settings = serve.Options(checkpoint=str(folder), device="cpu")
    with running(settings) as ends, ThreadPoolExecutor(1) as pool:
        long = pool.submit(complete, ends.client, "Once", max_tokens=450)
        stream = complete(ends.client, "Lily", max_tokens=450, stream=True)
        next(stream)
        assert ends.until(lambda: number(ends, "requests_running") == 2)
        ends.served.engine._manager.stop(hard_stop=True)
        with pytest.raises(InternalServerError, match="finished before this request completed"):
            long.result()
        with pytest.raises(APIError, match="finished before this request completed"):
            list(stream)
        stream.close()
        with pytest.raises(InternalServerError, match="the engine has stopped") as caught:
            complete(ends.client, "Once")
        assert caught.value.status_code == 503
        with pytest.raises(urllib.error.HTTPError, match="503") as unwell:
            urllib.request.urlopen(f"http://127.0.0.1:{ends.port}/health", timeout=30)
        unwell.value.close()
