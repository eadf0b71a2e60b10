"""Seconds of a prefill and of a decoding step, as a sum of what a forward does.

docs/planning.md has the formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from compress.planning.devices import CPU, Device
from compress.planning.memory import HALF, Weights, kv_bytes
from compress.planning.shape import Shape


@dataclass(frozen=True)
class Clock:
    """Predicts for one model, scheme and device. kv_cache: one of KV_CACHES."""

    shape: Shape
    weights: Weights
    device: Device
    kv_cache: str = "16"

    def prefill(self, prompts: Sequence[int]) -> float:
        """Seconds until the first tokens of `prompts`, of so many tokens each, in one forward."""
        channels = self.shape.query_heads * self.shape.head_size
        pairs = sum(self._pairs(tokens) for tokens in prompts)
        attention = pairs * channels * self.device.pair_s
        return self._forward(sum(prompts), len(prompts)) + attention

    def _pairs(self, tokens: int) -> float:
        """Pairs of tokens that attend to each other, in all layers. On CPU those beyond a sliding
        window are computed, too, and masked.
        """
        bounded = [window for window in self.shape.windows if window is not None]
        seen = [] if self.device.name == CPU else [min(tokens, window) for window in bounded]
        whole = (self.shape.blocks - len(seen)) * tokens * tokens / 2
        return whole + sum(width * (tokens - width / 2) for width in seen)

    def decode(self, batch: int, context: float) -> float:
        """Seconds of one step of `batch` requests whose caches hold `context` tokens together.

        Linear in `context` but for sliding windows: the mean of many steps is the step of the mean.
        """
        held = batch * kv_bytes(self.shape, self.kv_cache, context / batch)
        return self._forward(batch, batch) + held * self.device.kv_s

    def _forward(self, tokens: int, rows: int) -> float:
        """All but attention. tokens: through the blocks; rows: of logits."""
        shape, device, weights = self.shape, self.device, self.weights
        plain, head = weights.plain_weights, shape.vocabulary * shape.hidden
        rate, half = device.rates[weights.kind], device.rates["16"]
        rotated = (shape.query_heads + shape.kv_heads) * shape.head_size
        touched = {"norm": 2 * shape.hidden, "rotation": rotated, "product": shape.intermediate}
        values = sum(device.values[work].seconds(n, 0, tokens) for work, n in touched.items())
        return (
            rate.seconds(weights.quantized_weights, weights.quantized_bytes, tokens)
            + half.seconds(plain, HALF * plain, tokens)
            + half.seconds(head, HALF * head, rows)
            + shape.blocks * values
            + weights.quantized * device.call_s.get(weights.kind, 0.0)
            + shape.blocks * device.block_s
            + device.forward_s
        )
