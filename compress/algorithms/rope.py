"""Longer contexts from the rotary embedding: three ways to stretch its frequencies by a factor.

Su et al. 2021 (arXiv:2104.09864) for the embedding itself: pair i of a head of d channels turns by
theta^(-2i/d) a position.
"""

from typing import Any

METHODS = ("ntk", "yarn", "linear")


def ntk_theta(theta: float, factor: float, rotary_dim: int) -> float:
    """The base of static NTK-aware scaling: theta * factor^(d / (d - 2)), d the channels that turn.

    The slowest pair is slowed by exactly `factor`, the fastest not at all
    (bloc97 2023; named in YaRN, arXiv:2309.00071, section 3.1).
    """
    return theta * factor ** (rotary_dim / (rotary_dim - 2))


def scaled(
    method: str, rope: dict[str, Any], factor: float, head_dim: int, window: int
) -> dict[str, Any]:
    """The `rope_parameters` of config.json for a window `factor` times the trained `window`.

    ntk: a larger theta and nothing else, so that every engine reads it. yarn: NTK by parts with
    its attention temperature (Peng et al. 2023, arXiv:2309.00071). linear: positions divided by
    the factor (Chen et al. 2023, arXiv:2306.15595). Of a head, the `partial_rotary_factor` in
    `rope` turns (GPT-NeoX, Phi: the rest of the channels know no position).
    """
    if method == "ntk":
        rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        theta = ntk_theta(rope["rope_theta"], factor, rotary_dim)
        return {**rope, "rope_type": "default", "rope_theta": theta}
    if method == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    return {
        **rope,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": window,
    }
