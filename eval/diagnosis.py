"""Known faults of compressed checkpoints, each looked for by itself and named.

Scores say that something is wrong; these say what. Of the files: the tokenizer, its chat template
and beginning-of-sequence token, the tokens that end an answer, RoPE. Of the weights: a
block or an output head that is further from the original than the others (see eval/layers.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from compress.algorithms.rope import method_of
from compress.eval.layers import Blocks
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
FAR, OUTSTANDING, GAIN = 0.3, 3.0, 0.3
"""A block is named where its error is above FAR and above OUTSTANDING times both the median block's
and its own in the original as it is served, and its scales where its gain is off 1 by more than
GAIN."""
ARITHMETIC = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "hidden_act"),
    *("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "logits_scaling"),
    *("final_logit_softcapping", "embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "attention_bias", "sliding_window", "layer_types"),
)
"""Fields of a configuration, of any kind of model, that change what its weights compute."""
HEAD_KL = 0.005
"""Nats a token above the original's head as it is served. SmolLM2-135M's, rounded to nearest, has
0.002 in INT8 and 0.17 in 4 bit by groups of 64; in bfloat16 0.0005."""


@dataclass(frozen=True)
class Fingerprint:
    """What of a folder decides how text becomes tokens, and tokens positions.

    vocabulary: ids by token; empty where the tokenizer cannot be loaded. probes: the ids of PROBES,
    without special tokens. rope: the `rope_parameters` of the configuration, without Nones. window:
    its positions; 0 where the RoPE that a checkpoint should have is known whatever its window.
    ends: ids of the tokens that end an answer. head_dim: channels of a head. arithmetic: what else
    of the configuration the model computes by, of ARITHMETIC. named: those of NAMED that the
    tokenizer knows.
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
    named: tuple[str, ...] = ()


def fingerprint(folder: Path, *, trust_remote_code: bool = False) -> Fingerprint:
    """The fingerprint of a model's folder."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    tokenizer = tokenizer_of(folder, trust_remote_code=trust_remote_code)
    of_files = Fingerprint(
        vocabulary={},
        probes=(),
        adds_bos=False,
        chat_template=None,
        rope=_given(getattr(config, "rope_parameters", None) or {}),
        window=getattr(text, "max_position_embeddings", 0),
        ends=_ends(folder, config),
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
        named=tuple(name for name in NAMED if getattr(tokenizer, name) is not None),
        adds_bos=_opens(tokenizer),
        chat_template=tokenizer.chat_template,
    )


def _opens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it opens a text with a token of its own, which it may have no name for."""
    return len(tokenizer("a").input_ids) > len(tokenizer("a", add_special_tokens=False).input_ids)


def _ends(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    """Ids of the tokens that end an answer, where engines look for them: generation_config.json,
    or config.json where there is none.
    """
    ids = (generation_config(folder) or GenerationConfig.from_model_config(config)).eos_token_id
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _given(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if value is not None}


def faults(
    original: Fingerprint, found: Fingerprint, blocks: Blocks | None, served: Blocks | None
) -> list[dict[str, str]]:
    """What is wrong with a checkpoint: `name` and `text`, a sentence each.

    original: with the RoPE that the checkpoint should have, where it was extended. blocks: of the
    checkpoint; served: of the original in the dtype it is served in: what arithmetic alone costs;
    None where they do not stand for each other one by one.
    """
    checks = [
        ("tokenizer", _tokenizer(original, found)),
        ("BOS", _bos(original, found)),
        ("EOS", _eos(original, found)),
        ("chat template", _template(original, found)),
        ("RoPE", _rope(original, found)),
    ]
    if blocks is not None and served is not None:
        checks += [
            ("configuration", _arithmetic(original, found)),
            ("LM head", _head(blocks, served)),
            ("block", _blocks(blocks, served)),
        ]
    return [{"name": name, "text": text} for name, texts in checks for text in texts]


def _tokenizer(original: Fingerprint, found: Fingerprint) -> Iterator[str]:
    if not found.vocabulary:
        yield "The checkpoint's tokenizer is missing or cannot be loaded."
        return
    moved = sum(found.vocabulary.get(token) != i for token, i in original.vocabulary.items())
    if moved:
        all_of_it = len(original.vocabulary)
        what = "is that of another model" if moved > all_of_it / 100 else "is not the original's"
        yield (
            f"The checkpoint's tokenizer {what}: {moved} of {all_of_it} tokens are missing there "
            "or have other ids."
        )
    elif original.probes != found.probes:
        yield "The checkpoint's tokenizer has the same tokens but cuts text otherwise."
    if lost := [name for name in original.named if name not in found.named]:
        yield f"The checkpoint's tokenizer no longer says what its {' and '.join(lost)} is."


def _bos(original: Fingerprint, found: Fingerprint) -> Iterator[str]:
    if not found.vocabulary or original.adds_bos == found.adds_bos:
        return
    if original.adds_bos:
        yield "BOS is missing: the original's tokenizer opens a text with it, the checkpoint's not."
    else:
        yield "BOS is added: the checkpoint's tokenizer opens a text with it, the original's not."


def _eos(original: Fingerprint, found: Fingerprint) -> Iterator[str]:
    if original.ends == found.ends:
        return
    wanted, given = (_tokens(original, ends) for ends in (original.ends, found.ends))
    if lost := original.ends - found.ends:
        yield (
            f"EOS is missing: {_tokens(original, lost)} ends the original's answers; the "
            f"checkpoint's are ended by {given}, so they run on."
        )
    else:
        yield (
            f"EOS is another: the checkpoint's answers are ended by {given}, "
            f"the original's by {wanted}."
        )


def _tokens(original: Fingerprint, ids: frozenset[int]) -> str:
    """Tokens by name, as the original's vocabulary has them, or by number."""
    names = {i: token for token, i in original.vocabulary.items() if i in ids}
    return " or ".join(names.get(i, str(i)) for i in sorted(ids)) or "nothing"


def _template(original: Fingerprint, found: Fingerprint) -> Iterator[str]:
    if not found.vocabulary:
        return  # a tokenizer that is missing is told as one
    if original.chat_template and not found.chat_template:
        yield "The chat template is lost: the original has one, the checkpoint has none."
    elif original.chat_template != found.chat_template:
        yield "The checkpoint's chat template is not the original's."


def _arithmetic(original: Fingerprint, found: Fingerprint) -> Iterator[str]:
    changed = [
        f"{name} is {found.arithmetic.get(name, 'absent')}, should be {value}"
        for name, value in original.arithmetic.items()
        if found.arithmetic.get(name, "absent") != value
    ]
    if changed:
        yield f"The checkpoint's config.json computes otherwise: {'; '.join(changed)}."
    if 0 < found.window < original.window:
        yield (
            f"The checkpoint's window is {found.window} tokens, the original's {original.window}: "
            "engines cut or refuse what is longer."
        )


def _rope(original: Fingerprint, found: Fingerprint) -> Iterator[str]:
    changed = [
        (name, found.rope.get(name, "absent"), original.rope.get(name, "absent"))
        # Others than these are filled in by transformers where a file leaves them out.
        for name in sorted({*original.rope, "rope_type", "rope_theta", "factor"})
        if original.rope.get(name) != found.rope.get(name)
    ]
    if not changed:
        return
    if 0 < original.window < found.window:
        windows = original.window, found.window
        if method_of(original.rope, found.rope, found.head_dim, windows):
            return
        changed.append(("the window", found.window, original.window))
        said = ", ".join(f"{name} {new} in place of {old}" for name, new, old in changed)
        yield (
            f"The checkpoint's RoPE is not the original's: {said}. Stretched for that window by "
            "NTK-aware, by parts or linear it is another: right only if a search chose it."
        )
    else:
        said = ", ".join(f"{name} is {new}, should be {old}" for name, new, old in changed)
        yield f"The checkpoint's RoPE is wrong: {said}."


def _head(blocks: Blocks, served: Blocks) -> Iterator[str]:
    if not isfinite(blocks.head_kl):
        yield "What the output head gives are not finite numbers: its weights or scales are broken."
    elif not blocks.head_kl <= served.head_kl + HEAD_KL:
        scheme = blocks.head_scheme
        how = (
            f"it is stored in {scheme}; it should be in 16 bit"
            if scheme
            else "its weights, or those of the norm before it, are not the original's"
        )
        yield f"The output head alone costs a KL of {blocks.head_kl:.3f} nats a token: {how}."


def _blocks(blocks: Blocks, served: Blocks) -> Iterator[str]:
    usual = median(filter(isfinite, blocks.error)) if any(map(isfinite, blocks.error)) else 0.0
    gains = [gain for gain in blocks.gain if isfinite(gain)]
    if gains and abs(median(gains) - 1) > GAIN:
        yield (
            f"The blocks add {abs(median(gains)):.2f} times what they should (median), with errors "
            f"of {100 * usual:.0f}%: what they have in common is wrong, such as norms, scales or "
            "config.json."
        )
    each = zip(blocks.error, blocks.gain, served.error, strict=True)
    for i, (error, gain, floor) in enumerate(each):
        if not isfinite(error):
            yield f"What block {i} gives are not finite numbers: its weights or scales are broken."
        elif not error <= max(FAR, OUTSTANDING * usual, OUTSTANDING * floor):
            why = (
                f"it adds {abs(gain):.2f} times what it should, so scales are wrong"
                if abs(gain - 1) > GAIN
                else "its weights are wrong"
            )
            yield (
                f"Block {i} is off by {100 * error:.0f}% of what it adds, the median block by "
                f"{100 * usual:.1f}%: {why}."
            )
