"""Longer contexts from the rotary embedding: three ways to stretch its frequencies by a factor.

Su et al. 2021 (arXiv:2104.09864) for the embedding itself: pair i of a head of d channels turns by
theta^(-2i/d) a position.
"""

from typing import Any

METHODS = ("ntk", "yarn", "linear")


def ntk_theta(theta: float, factor: float, head_dim: int) -> float:
    """The base of static NTK-aware scaling: theta * factor^(d / (d - 2)).

    The slowest pair is slowed by exactly `factor`, the fastest not at all
    (bloc97 2023; named in YaRN, arXiv:2309.00071, section 3.1).
    """
    return theta * factor ** (head_dim / (head_dim - 2))


def scaled(
    method: str, rope: dict[str, Any], factor: float, head_dim: int, window: int
) -> dict[str, Any]:
    """The `rope_parameters` of config.json for a window `factor` times the trained `window`.

    ntk: a larger theta and nothing else, so that every engine reads it. yarn: NTK by parts with
    its attention temperature (Peng et al. 2023, arXiv:2309.00071). linear: positions divided by
    the factor (Chen et al. 2023, arXiv:2306.15595).
    """
    theta = rope["rope_theta"]
    if method == "ntk":
        return {**rope, "rope_type": "default", "rope_theta": ntk_theta(theta, factor, head_dim)}
    if method == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    return {
        **rope,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": window,
    }
