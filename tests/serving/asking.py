"""What tests ask a running server, by the official client and without."""

import json
import socket
import urllib.error
import urllib.request
from typing import Any

from openai import OpenAI

from compress.runtime.server.app import JSON
from tests.serving.conftest import NAME, Running


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(
        model=NAME, prompt=prompt, **({"temperature": 0, "max_tokens": 24} | fields)
    )


def raw(
    server: Running, body: bytes, path: str = "/v1/completions", kind: str = JSON
) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{server.port}{path}"
    request = urllib.request.Request(url, body, {"Content-Type": kind})
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


def half_a_body(port: int) -> socket.socket:
    """A connection whose request never comes to its end."""
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    client.sendall(head("/v1/completions", 90) + b"{")
    return client


def head(path: str, length: int) -> bytes:
    """The lines of a request above its body."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: a",
        f"Content-Type: {JSON}",
        f"Content-Length: {length}",
    )
    return "\r\n".join((*lines, "", "")).encode()
