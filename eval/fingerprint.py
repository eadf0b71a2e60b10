"""What of a model's folder, beside its weights, decides what the model says."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from compress.runtime.configs import generation_config
from compress.source import head_dim
from compress.text.tokenizer import tokenizer_of

PROBES = (
    "The quick brown fox, it's 3.5% of 1,000!",
    "  def f(x):\n\treturn x**2  # ok",
    "早上好，世界。",
    "Grüße aus Zürich — 🙂",
)
NAMED = ("bos_token", "eos_token")
"""Special tokens that templates and engines ask a tokenizer for by these names."""
BESIDE = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "use_cache", "cache_implementation"),
    *("output_attentions", "output_hidden_states", "transformers_version", "_from_model_config"),
)
"""Fields of a GenerationConfig that do not change which tokens are chosen, or are told apart."""
ARITHMETIC = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "hidden_act"),
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "logits_scaling"),
    *("final_logit_softcapping", "embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "attention_bias", "sliding_window", "layer_types"),
)
"""Fields of a configuration, of any kind of model, that change what its weights compute."""


@dataclass(frozen=True)
class Fingerprint:
    """How text becomes tokens, tokens positions, and what weights compute, by a folder's files.

    vocabulary: ids by token; empty where the tokenizer cannot be loaded. probes: the ids of PROBES,
    without special tokens. rope: the `rope_parameters` of the configuration, without Nones. window:
    its positions; 0 where the RoPE that a checkpoint should have is known whatever its window.
    ends: ids of the tokens that end an answer. head_dim: channels of a head. arithmetic: what else
    of the configuration the model computes by, of ARITHMETIC. named: the tokens that the tokenizer
    knows by the names of NAMED. generation: how engines choose tokens where a request leaves it
    open, beside `ends`.
    """

    vocabulary: Mapping[str, int]
    probes: tuple[tuple[int, ...], ...]
    adds_bos: bool
    chat_template: str | None
    rope: Mapping[str, Any]
    window: int = 0
    ends: frozenset[int] = frozenset()
    head_dim: int = 0
    arithmetic: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


def fingerprint(folder: Path, *, trust_remote_code: bool = False) -> Fingerprint:
    """The fingerprint of a model's folder."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    # Where engines look for it.
    generation = generation_config(folder) or GenerationConfig.from_model_config(config)
    tokenizer = tokenizer_of(folder, trust_remote_code=trust_remote_code)
    of_files = Fingerprint(
        vocabulary={},
        probes=(),
        adds_bos=False,
        chat_template=None,
        rope=_given(getattr(config, "rope_parameters", None) or {}),
        window=getattr(text, "max_position_embeddings", 0),
        ends=_ends(generation),
        generation=_choosing(generation),
        head_dim=head_dim(text),
        arithmetic={name: getattr(text, name) for name in ARITHMETIC if hasattr(text, name)},
    )
    if tokenizer is None:
        return of_files
    return replace(
        of_files,
        vocabulary=tokenizer.get_vocab(),
        probes=tuple(
            tuple(tokenizer(probe, add_special_tokens=False).input_ids) for probe in PROBES
        ),
        named={name: token for name in NAMED if (token := getattr(tokenizer, name)) is not None},
        adds_bos=_opens(tokenizer),
        chat_template=tokenizer.chat_template,
    )


def _opens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it opens a text with a token of its own, which it may have no name for."""
    return tokenizer("a").input_ids[:1] != tokenizer("a", add_special_tokens=False).input_ids[:1]


def _ends(generation: GenerationConfig) -> frozenset[int]:
    ids = generation.eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _choosing(generation: GenerationConfig) -> dict[str, Any]:
    """What it says of how tokens are chosen, without what says nothing: what is as by default."""
    default = generation._get_default_generation_params()
    given = generation.to_diff_dict()
    return {
        name: value
        for name, value in given.items()
        if name not in BESIDE and value is not None and value != default.get(name)
    }


def _given(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if value is not None}
