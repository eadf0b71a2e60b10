"""A server on this machine that answers as an OpenAI-compatible one does."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from compress.runtime.loader import load

Answer = Callable[[str, dict[str, Any]], tuple[int, object]]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """One that answers a path and the JSON posted there with a status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            status, said = answer(self.path, json.loads(self.rfile.read(length) or b"{}"))
            body = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            pass

    serving = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}/v1"
    finally:
        serving.shutdown()
        serving.server_close()


def as_vllm(model: Path) -> Answer:
    """Answers as vLLM's server does: of each token of the prompt its own log-probability, and
    those of the likeliest in its place.
    """
    dense, tokenizer = load(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)

    def answer(path: str, body: dict[str, Any]) -> tuple[int, object]:
        if path.endswith("/models"):
            return 200, {"data": [{"id": "teacher"}]}
        if path == "/tokenize":
            return 200, {"tokens": tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        with torch.inference_mode():
            said = dense(torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
        positions: list[dict[str, Any] | None] = [None]
        for row, follows in zip(said[:-1], body["prompt"][1:], strict=True):
            tokens = {*row.topk(body["prompt_logprobs"]).indices.tolist(), follows}
            positions.append({str(t): {"logprob": float(row[t])} for t in tokens})
        return 200, {"choices": [{"prompt_logprobs": positions}]}

    return answer
