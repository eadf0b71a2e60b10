"""Longer contexts from the rotary embedding: its frequencies, and ways to stretch them.

Of a head the first d channels turn in d / 2 pairs; frequencies [d / 2] are in radians a position.
A temperature multiplies cosine and sine, so that attention's logits grow by its square. `rope` is
the `rope_parameters` of a config.json, as transformers reads it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

METHODS = ("ntk", "yarn", "linear")

SCALING = (
    *("rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
)
"""What a rope says of its scaling; the rest (theta, the share of a head that turns) outlives it."""


def plain(theta: float, channels: int) -> Tensor:
    """theta^(-2i/d) for pair i (Su et al. 2021, arXiv:2104.09864)."""
    return theta ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)


def ntk_theta(theta: float, factor: float, channels: int) -> float:
    """The base of static NTK-aware scaling: theta * factor^(d / (d - 2)).

    The slowest pair is slowed by exactly `factor`, the fastest not at all
    (bloc97 2023; named in YaRN, arXiv:2309.00071, section 3.1).
    """
    return theta * factor ** (channels / (channels - 2))


def linear(frequencies: Tensor, factor: float) -> Tensor:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""
    return frequencies / factor


def by_parts(
    theta: float,
    channels: int,
    factor: float,
    window: int,
    fast: float = 32,
    slow: float = 1,
    truncate: bool = True,
) -> Tensor:
    """YaRN's NTK by parts (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    Pairs that turn more than `fast` times in the trained `window` are left alone, those that turn
    less than `slow` times are slowed by `factor`, and a ramp over the pairs' numbers lies between,
    its ends at whole pairs (truncate), as in the authors' code.
    """

    def pair(turns: float) -> float:
        """The number of the pair that turns so many times."""
        return channels * math.log(window / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    numbers = torch.arange(channels // 2, dtype=torch.float64)
    slowed = ((numbers - low) / (high - low or 0.001)).clamp(0, 1)
    frequencies = plain(theta, channels)
    return frequencies * (1 - slowed) + linear(frequencies, factor) * slowed


def yarn_temperature(factor: float, scale: float = 1.0) -> float:
    """0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4); `scale` as DeepSeek's models have it."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def llama3(frequencies: Tensor, factor: float, window: int, low: float, high: float) -> Tensor:
    """Llama 3.1's by parts (Grattafiori et al. 2024, arXiv:2407.21783; Meta's `apply_scaling`).

    Pairs that turn more than `high` times in the trained `window` are left alone, those that turn
    less than `low` times are slowed by `factor`; between, a ramp over the turns.
    """
    turns = window * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * kept + linear(frequencies, factor) * (1 - kept)


def longrope(frequencies: Tensor, factors: list[float]) -> Tensor:
    """Every pair slowed by its own searched factor (Ding et al. 2024, arXiv:2402.13753)."""
    return frequencies / torch.tensor(factors, dtype=torch.float64)


def longrope_temperature(factor: float, window: int) -> float:
    """sqrt(1 + ln(factor) / ln(window)), `window` the trained one (arXiv:2402.13753, Phi-3)."""
    return math.sqrt(1 + math.log(factor) / math.log(window)) if factor > 1 else 1.0


def turning(rope: Mapping[str, Any], head_dim: int) -> int:
    """The channels of a head that turn (GPT-NeoX, Phi: the rest know no position)."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def frequencies(rope: Mapping[str, Any], head_dim: int, window: int) -> tuple[Tensor, float]:
    """Frequencies [d / 2] float64 and temperature that a rope stands for.

    window: the model's whole window; beyond the original one longrope has its long factors.
    Raises ValueError for a kind that depends on more than these.
    """
    kind, channels = rope.get("rope_type", "default"), turning(rope, head_dim)
    theta, factor = rope["rope_theta"], rope.get("factor")
    base = plain(theta, channels)
    given = rope.get("attention_factor")
    if kind == "default":
        return base, 1.0
    if kind == "linear":
        return linear(base, rope["factor"]), 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":
        ends = rope["low_freq_factor"], rope["high_freq_factor"]
        return llama3(base, rope["factor"], original, *ends), 1.0
    factor = factor or window / original
    if kind == "longrope":
        factors = rope["long_factor"] if window > original else rope["short_factor"]
        return longrope(base, factors), given or longrope_temperature(factor, original)
    if kind == "yarn":
        ends = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
        scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        temperature = (
            yarn_temperature(factor, scale) / yarn_temperature(factor, scale_all)
            if scale and scale_all
            else yarn_temperature(factor)
        )
        found = by_parts(theta, channels, factor, original, *ends, rope.get("truncate", True))
        return found, given or temperature
    raise ValueError(f"frequencies of rope_type {kind!r} are not a function of its parameters")


def whole_window(rope: Mapping[str, Any], positions: int) -> int:
    """The window that a model has; positions: its max_position_embeddings.

    Of yarn that may still be the trained one: Qwen's cards add the factor alone.
    """
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "yarn" and positions == original:
        return round(original * rope["factor"])
    return positions


def refusal(method: str, rope: Mapping[str, Any]) -> str | None:
    """Why a rope cannot be stretched by `method`; None where it can."""
    if rope and all(isinstance(part, Mapping) for part in rope.values()):
        return f"its RoPE differs by layer ({', '.join(rope)})"
    kind = rope.get("rope_type", "default")
    if not rope.get("rope_theta"):
        return "its config names no rope_theta"
    if kind == "longrope":
        return "longrope's factors were searched for each pair of channels and for its own window"
    if kind == "linear" and method != "linear":
        return "it was stretched by linear, whose config does not say from which window"
    if kind not in ("default", "dynamic", "linear", "yarn", "llama3"):
        return f"its RoPE is of the kind {kind!r}"
    return None


def scaled(
    method: str,
    rope: Mapping[str, Any],
    factor: float,
    head_dim: int,
    window: int,
    stretch: float = 1.0,
) -> dict[str, Any]:
    """The rope of a window `factor` times the model's `window`, which may be scaled already.

    ntk: a larger theta and nothing else. yarn: NTK by parts with its temperature. linear: every
    pair alike. All start from the window that the model was trained with before any scaling; a
    model that is by parts already (yarn, llama3) stays so, with a larger factor. stretch: slows the
    frequencies by so many times the factor. Raises ValueError where `refusal` says why.
    """
    if why := refusal(method, rope):
        raise ValueError(why)
    kind = rope.get("rope_type", "default")
    rest = {name: value for name, value in rope.items() if name not in SCALING}
    original = rope.get("original_max_position_embeddings", window)
    if method == "yarn" and (kind == "yarn" or (kind == "llama3" and not _is_linear(rope))):
        # The temperature follows from the new factor.
        kept = {name: value for name, value in rope.items() if name != "attention_factor"}
        raised = {**kept, "factor": whole_factor(rope, window) * factor * stretch}
        return raised if kind == "llama3" else _filling(raised, round(window * factor))
    whole = (rope["factor"] if kind == "linear" else window / original) * factor * stretch
    if method == "ntk":
        theta = ntk_theta(rope["rope_theta"], whole, turning(rope, head_dim))
        return {**rest, "rope_type": "default", "rope_theta": theta}
    named = {"factor": whole, "original_max_position_embeddings": original}
    if method == "yarn":
        return _filling({**rest, "rope_type": "yarn", **named}, round(window * factor))
    # Written as llama3 with no pair fast enough to be left alone: `linear` would make vLLM and
    # SGLang multiply max_position_embeddings, which is the new window, by the factor again.
    ends = {"low_freq_factor": float(original), "high_freq_factor": 2.0 * original}
    return {**rest, "rope_type": "llama3", **named, **ends}


def method_of(
    rope: Mapping[str, Any], longer: Mapping[str, Any], head_dim: int, windows: tuple[int, int]
) -> str | None:
    """Which of METHODS makes of a rope the `longer` one, however that is spelled; None: none does.

    windows: the model's before and after.
    """
    old, new = windows
    try:
        found, temperature = frequencies(longer, head_dim, new)
    except (KeyError, TypeError, ValueError):
        return None
    for method in METHODS:
        if refusal(method, rope) is None:
            made = scaled(method, rope, new / old, head_dim, old)
            wanted, its = frequencies(made, head_dim, new)
            alike = torch.allclose(found, wanted, rtol=1e-3)
            if alike and math.isclose(temperature, its, rel_tol=1e-3):
                return method
    return None


def _filling(yarn: dict[str, Any], window: int) -> dict[str, Any]:
    """The same frequencies, spelled so that the original window times the factor is `window`.

    vLLM's table of cosines ends at that product, and transformers warns where it is another. The
    ramp depends on the original window by turns alone, so the numbers of turns move with it.
    """
    original = yarn["original_max_position_embeddings"]
    wanted = math.ceil(window / yarn["factor"])
    if wanted == original:
        return yarn
    ends = (yarn.get("beta_fast") or 32, yarn.get("beta_slow") or 1)
    fast, slow = (turns * wanted / original for turns in ends)
    moved = {"original_max_position_embeddings": wanted, "beta_fast": fast, "beta_slow": slow}
    return {**yarn, **moved}


def whole_factor(rope: Mapping[str, Any], window: int) -> float:
    """By how much a rope that is by parts slows its slowest pair."""
    return rope.get("factor") or window / rope["original_max_position_embeddings"]


def _is_linear(rope: Mapping[str, Any]) -> bool:
    """Whether a llama3 slows all pairs: even the fastest turns once in 2 pi positions."""
    turns = rope["original_max_position_embeddings"] / (2 * math.pi)
    return rope["low_freq_factor"] >= turns


def skipping(tokens: int, window: int, generator: torch.Generator) -> Tensor:
    """Positions [tokens] with one jump, so that a short text trains distances up to `window`.

    PoSE with two chunks (Zhu et al. 2023, arXiv:2309.10400): the text is cut at random, and the
    second chunk moved by a random number of positions that keeps it inside the window.
    """
    cut = int(torch.randint(1, max(2, tokens), (1,), generator=generator))
    skip = int(torch.randint(max(1, window - tokens + 1), (1,), generator=generator))
    positions = torch.arange(tokens)
    positions[cut:] += skip
    return positions
