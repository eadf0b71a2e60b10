"""What the server refuses, and how it says so."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, BadRequestError, RateLimitError

from compress import serve
from compress.errors import UserError
from compress.runtime.server import answers
from compress.runtime.server.answers import begin
from compress.runtime.server.errors import Refusal
from compress.runtime.server.key import KEY_VARIABLE, key_of
from compress.runtime.server.protocol import Chat, Completion, read
from tests.serving.asking import complete, counted, number, raw
from tests.serving.conftest import LONG, NAME, Running, running


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "word " * 600}, "the prompt has 1802 tokens; wanted at most 511, or a server "),
        ({"max_tokens": LONG + 1}, "max_tokens is 301; wanted at most 300"),
        ({"prompt": [5] * 400, "max_tokens": 113}, "wanted at most 512 together"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [512]}, "a token id is above 511"),
        ({"prompt": ["a", "b"]}, "prompt: found a list with 'a'; wanted a text or a list of token"),
        ({"prompt": [-1]}, "prompt: found a list with -1; wanted a text or a list of token ids, "),
        ({"prompt": 5}, "prompt: found 5; wanted a text or a list of token ids, one prompt a req"),
        ({"n": 2}, "n: 2 is not served; leave it out"),
        ({"stop": ""}, "stop: found one of 0 characters; wanted up to 4 strings of 1 to 256"),
        ({"stop": ["x" * 1_000_000] * 4}, "stop: found one of 1000000 characters; wanted up to 4"),
        ({"stop": ["a"] * 5}, "stop: found 5 of them; wanted up to 4 strings of 1 to 256"),
        ({"stop": ["a", 3]}, "stop: found int; wanted up to 4 strings of 1 to 256 characters"),
        ({"logprobs": 3}, "logprobs: 3 is not served; leave it out"),
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
    for prompt in ("Once upon a time, there was a", [5, 100]):
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
    before = counted(server, "invalid")
    found, answer = raw(server, body)
    assert (found, message in answer["error"]["message"]) == (status, True)
    assert answer["error"]["type"] == "invalid_request_error"
    assert counted(server, "invalid") == before + 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "a"}}], "a part of type 'image_url' is not"),
        (None, "found null; wanted a text, or parts of type text"),
        ([5], "a part of type 5 is not served; wanted text"),
        ([{"type": "text", "text": 5}], "Input should be a valid string"),
    ],
)
def test_content_that_is_no_text_is_named(content: Any, message: str) -> None:
    turn = {"role": "user", "content": content}
    with pytest.raises(Refusal, match=rf"^messages\.0\.content.*: {message}"):
        read(Chat, json.dumps({"model": NAME, "messages": [turn]}).encode())


def test_null_of_an_assistant_is_an_empty_text() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    body = read(Chat, json.dumps({"model": NAME, "messages": turns}).encode())
    assert body.messages[1].plain() == {"role": "assistant", "content": ""}


def test_an_unknown_route_is_told_in_the_same_shape(server: Running) -> None:
    assert raw(server, b"{}", "/v1/embeddings")[0] == 404
    status, answer = raw(server, b"{}", "/health")
    assert status == 405
    assert "POST /health: Method Not Allowed" in answer["error"]["message"]


def test_a_full_queue_is_told_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = serve.Options(
        checkpoint=str(folder), device="cpu", running=1, waiting=1, kv_tokens=1000
    )
    with running(settings) as small, ThreadPoolExecutor(2) as pool:
        assert number(small, "kv_tokens_capacity") == 32 * 32  # whole pages
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
        with pytest.raises(AuthenticationError, match="the API key is missing or wrong") as caught:
            locked.client.models.list()
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        known = locked.client.with_options(api_key="secret")
        assert [model.id for model in known.models.list()] == ["mine"]
        assert number(locked, "requests_running") == 0


def test_a_key_is_what_a_header_can_carry() -> None:
    assert key_of({}) is key_of({KEY_VARIABLE: ""}) is None
    assert key_of({KEY_VARIABLE: "sk-1~\r\n"}) == "sk-1~"
    for key, found in (("aé", r"'é' at character 2"), ("a b", "' ' at"), ("\nab", r"'\\n' at")):
        with pytest.raises(UserError, match=f"^COMPRESS_API_KEY has {found}"):
            key_of({KEY_VARIABLE: key})


def test_a_body_that_a_page_in_a_browser_can_send_is_refused(server: Running) -> None:
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    assert raw(server, body, kind="application/json; charset=utf-8")[0] == 200
    status, answer = raw(server, body, kind="text/plain")
    assert status == 415
    assert answer["error"]["message"] == "Content-Type is 'text/plain'; wanted application/json"
