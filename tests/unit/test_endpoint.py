"""A teacher behind a server: its answers are the model's own, and what is wrong is told."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import as_vllm, server
from transformers import AutoTokenizer

from compress.algorithms.soft_labels import top_k
from compress.errors import UserError
from compress.runtime.loader import load
from compress.training import endpoint
from compress.training.endpoint import Endpoint, connect, likeliest

K = 5


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSE", 0.0)


def test_labels_of_a_server_are_those_of_its_model(tiny_model: Path) -> None:
    ids = torch.randint(0, 200, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with server(as_vllm(tiny_model)) as url:
        teacher = connect(url, None, K, AutoTokenizer.from_pretrained(tiny_model))
        assert teacher == Endpoint(url, "teacher", K)
        tokens, probabilities, rest = teacher.label(ids, mask)
    with torch.inference_mode():
        logits = load(tiny_model, dtype=torch.float32)(ids).logits
    wanted = top_k(logits, K)
    real = mask.bool()
    assert torch.equal(tokens[real], wanted[0][real])
    assert torch.allclose(probabilities[real], wanted[1][real], atol=1e-3)
    assert torch.allclose(rest[real], wanted[2][real], atol=1e-3)
    assert not probabilities[~real].any()


def test_the_token_that_is_there_does_not_crowd_out_a_likely_one() -> None:
    row = {"7": {"logprob": -9.0}, "1": {"logprob": -0.5}, "2": {"logprob": -1.5}}
    tokens, probabilities, rest = likeliest([row], 2)
    assert tokens.tolist() == [[1, 2]]
    kept = torch.tensor([-0.5, -1.5]).exp()
    assert torch.allclose(probabilities[0].float(), kept, atol=1e-3)
    assert float(rest[0]) == pytest.approx(1 - float(kept.sum()), abs=1e-3)
    with pytest.raises(UserError, match=r"gives 3 tokens .* --max-logprobs 4, or lower"):
        likeliest([row], 4)


def test_another_model_or_tokenizer_is_refused(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    wanted = "serves teacher; wanted other; name it by"
    with server(as_vllm(tiny_model)) as url, pytest.raises(UserError, match=wanted):
        connect(url, "other", K, tokenizer)

    def reads_otherwise(path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path == "/tokenize":
            return 200, {"tokens": [1, 2, 3]}
        return 200, {"data": [{"id": "teacher"}]}

    wanted = r"another tokenizer; .* is \[1, 2, 3\] there"
    with server(reads_otherwise) as url, pytest.raises(UserError, match=wanted):
        connect(url, None, K, tokenizer)


@contextmanager
def cut_short() -> Iterator[str]:
    """A server that promises more than it sends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"{")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/v1"
        serving.shutdown()


def test_what_fails_in_passing_is_tried_again_and_what_does_not_is_told() -> None:
    asked: list[int] = []

    def busy(_: str, __: dict[str, Any]) -> tuple[int, object]:
        asked.append(1)
        return (200, {"fine": True}) if len(asked) == 3 else (503, {"error": "busy"})

    with server(busy) as url:
        assert endpoint.get(url) == {"fine": True}
        assert len(asked) == 3

    asked.clear()

    def refuses(_: str, __: dict[str, Any]) -> tuple[int, object]:
        asked.append(1)
        return 400, {"error": "Requested prompt logprobs of 64, which is greater than 20"}

    with server(refuses) as url, pytest.raises(UserError, match=r"status 400: .*greater than 20"):
        endpoint.get(url)
    assert len(asked) == 1
    with cut_short() as url, pytest.raises(UserError, match=r"IncompleteRead.*once it answers"):
        endpoint.get(url)
    with pytest.raises(UserError, match="Connection refused; once it answers"):
        endpoint.get(url)  # nobody listens there any more


def test_a_server_without_log_probabilities_is_told() -> None:
    def silent(_: str, __: dict[str, Any]) -> tuple[int, object]:
        return 200, {"choices": [{"text": "x"}]}

    with server(silent) as url, pytest.raises(UserError, match="holds no prompt_logprobs for 4"):
        Endpoint(url, "m", K).label(torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long))
