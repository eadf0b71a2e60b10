"""What happens, in Prometheus' form: the queue, the KV cache, and how long requests take."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from compress.runtime.server.engine import Engine
from compress.runtime.server.limits import PAGE

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ANSWERED = ("stop", "length")


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        registry = self._registry = CollectorRegistry()

        def gauge(name: str, words: str) -> Gauge:
            return Gauge(f"compress_{name}", words, registry=registry)

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"compress_{name}", words, labels, registry=registry)

        def histogram(name: str, words: str) -> Histogram:
            return Histogram(f"compress_{name}", words, registry=registry, buckets=SECONDS)

        gauge("requests_running", "requests in the batch").set_function(
            lambda: engine.load().running
        )
        gauge("requests_waiting", "requests that wait for a place").set_function(
            lambda: engine.load().waiting
        )
        gauge("kv_tokens", "tokens of the KV cache in use, in whole pages").set_function(
            lambda: engine.load().kv_tokens
        )
        gauge("kv_tokens_most", "the most of them so far").set_function(
            lambda: engine.kv_tokens_most
        )
        gauge("kv_tokens_capacity", "tokens that the KV cache has room for").set(
            engine.limits.pages * PAGE
        )
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts that were read")
        self.cut_tokens = counter("prompt_tokens_cut", "tokens cut from prompts that were too long")
        self.new_tokens = counter("new_tokens", "tokens made")
        self.requests = counter("requests", "requests by how they ended", "outcome")
        self.ttft = histogram("time_to_first_token_seconds", "from the request to its first token")
        self.tpot = histogram("time_per_output_token_seconds", "from a token to the next")
        self.whole = histogram("request_seconds", "from the request to the end of its answer")

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)


class Watch:
    """Times one request, which arrived at that second of `time.perf_counter`."""

    def __init__(
        self, metrics: Metrics, arrived: float, prompt_tokens: int, cut_tokens: int
    ) -> None:
        self._metrics, self._arrived = metrics, arrived
        self._prompt_tokens, self._cut_tokens = prompt_tokens, cut_tokens
        self._last: float | None = None

    def came(self, tokens: int) -> None:
        """So many tokens came, at once."""
        now, later = time.perf_counter(), tokens
        if self._last is None:
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
            self._metrics.cut_tokens.inc(self._cut_tokens)
            self._metrics.ttft.observe(now - self._arrived)
            self._last, later = now, tokens - 1
        for _ in range(later):
            self._metrics.tpot.observe((now - self._last) / tokens)
        self._last = now
        self._metrics.new_tokens.inc(tokens)

    def ended(self, outcome: str) -> None:
        """The request is over: `stop`, `length`, `abandoned`, `refused` or `failed`."""
        if outcome in ANSWERED:
            self._metrics.whole.observe(time.perf_counter() - self._arrived)
        self._metrics.requests.labels(outcome).inc()
