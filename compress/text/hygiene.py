"""Whether the calibration text can stand for what the model will read.

What makes statistics worthless is refused; what bends them is told in words, which the log, the
manifest and the report carry. docs/calibration.md has the measurements behind the thresholds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.errors import UserError
from compress.report.words import several
from compress.text import documents
from compress.text.windows import Windows

FEW_TOKENS = 1024
TEMPLATE_SHARE = 0.25
TOKENS_DIVERGE = 2.0
"""`token_divergence` above which held-out text is of another kind."""
ACTIVATIONS_DIVERGE = 0.003
"""`profile_divergence`, the mean over the linears, above which it is."""

MORE_TEXT = "give more text, or raise data.samples or data.length"


def refuse_few(name: str, tokens: int, least: int) -> None:
    """Raise UserError where fewer than `least` real tokens reach what is called `name`."""
    if tokens < least:
        raise UserError(
            f"{name}: {tokens} calibration tokens, without padding; wanted at least {least} "
            f"(calibrate.least_tokens): {MORE_TEXT}"
        )


def refuse_not_finite(block: str, hidden: Tensor) -> None:
    """Raise UserError where what a block gives for real tokens [tokens, H] holds NaN or Inf."""
    broken = int((~torch.isfinite(hidden)).any(-1).sum())
    if broken:
        raise UserError(
            f"{block}: its output is NaN or Inf for {broken} of {len(hidden)} tokens, in float32; "
            "wanted finite numbers: fetch the model again or repair that block"
        )


def counts(windows: Windows) -> dict[str, int]:
    """What the windows are made of, for the manifest."""
    return {
        "samples": len(windows.ids),
        "available": windows.available,
        "length": windows.ids.shape[1],
        "tokens": windows.tokens,
        "padding_tokens": windows.ids.numel() - windows.tokens,
        "template_tokens": windows.template_tokens,
        "short": windows.short,
        "cut": windows.cut,
        "dropped": windows.dropped,
    }


def token_divergence(windows: Windows, held: Windows, vocabulary: int) -> float:
    """How many times as unlikely as calibration tokens held-out ones are, by counts of the former.

    The ratio of two perplexities of the unigram model with one added to each count (Laplace): of
    the held-out tokens, and of each calibration window by the counts of all others. 1: the same
    kind of text, however little there is of it. Raises UserError for a token that is not in the
    `vocabulary` of the model.
    """
    largest = int(torch.cat([windows.ids.flatten(), held.ids.flatten()]).max())
    if largest >= vocabulary:
        raise UserError(
            f"the tokenizer gives token {largest}, and the model has embeddings for {vocabulary}; "
            "wanted the tokenizer that belongs to the model, or its embedding resized"
        )
    total = torch.bincount(windows.ids[windows.mask.bool()], minlength=vocabulary).float()
    own = []
    for row, mask in zip(windows.ids, windows.mask, strict=True):
        tokens = row[mask.bool()]
        own.append(_losses(total - torch.bincount(tokens, minlength=vocabulary), tokens))
    losses = _losses(total, held.ids[held.mask.bool()])
    return math.exp(float(losses.mean() - torch.cat(own).mean()))


def profile_divergence(one: Tensor, other: Tensor) -> Tensor:
    """Jensen-Shannon divergence [] in nats of two sizes by channel [K], each made to sum to 1.

    Where one of them is all zeros and the other is not, nothing is shared: ln 2, the most.
    """
    if bool(one.any()) != bool(other.any()):
        return torch.tensor(math.log(2), dtype=torch.float64)
    p, q = one.double() / one.double().sum(), other.double() / other.double().sum()
    mean = (p + q) / 2
    return (torch.special.xlogy(p, p / mean) + torch.special.xlogy(q, q / mean)).nansum() / 2


def text_notes(windows: Windows, held: Windows, tokens_diverge: float) -> list[str]:
    """What in the text would bend the statistics, in words; the last: its `token_divergence`."""
    figures, notes = counts(windows), []
    if windows.tokens < FEW_TOKENS:
        notes.append(
            f"only {windows.tokens} calibration tokens; a few thousand are usual: {MORE_TEXT}"
        )
    if figures["padding_tokens"]:
        share = figures["padding_tokens"] / windows.ids.numel()
        notes.append(
            f"{share:.0%} of the calibration windows is padding, which is not counted: "
            f"{several(windows.short, 'conversation')} shorter than a window"
        )
    if windows.cut:
        notes.append(f"{several(windows.cut, 'conversation')} cut at {figures['length']} tokens")
    if windows.dropped:
        notes.append(f"{several(windows.dropped, 'document')} with nothing in them left out")
    if windows.template_tokens:
        share = windows.template_tokens / windows.tokens
        note = f"{share:.0%} of the calibration tokens are of the chat template"
        if share > TEMPLATE_SHARE:
            note += ", the same in each; longer conversations would weigh what is said more"
        notes.append(note)
    if windows.description == documents.PYTHON_DOCS:
        notes.append(
            f"calibrated on {windows.tokens:,} tokens of CPython's documentation; give "
            "data.path=FILE with text of the domain that the model will serve"
        )
    if tokens_diverge > TOKENS_DIVERGE:
        why = f"its tokens are {tokens_diverge:.1f} times as unlikely by the latter's counts"
        notes.append(_another_kind(windows, held, why))
    return notes


def layer_notes(layers: Sequence[Mapping[str, Any]], windows: Windows, held: Windows) -> list[str]:
    """What in the figures of the linears is worth a word; nothing where there are none."""
    notes: list[str] = []
    if not layers:
        return notes
    mean = sum(layer["divergence"] for layer in layers) / len(layers)
    # Fewer tokens differ by as much from others of the same text.
    if mean > ACTIVATIONS_DIVERGE and min(windows.tokens, held.tokens) >= FEW_TOKENS:
        worst = max(layers, key=lambda layer: layer["divergence"])
        why = (
            f"the linears' inputs differ by {mean:.4f} nats, {ACTIVATIONS_DIVERGE:g} at most "
            f"within one kind, and most those of {worst['name']}"
        )
        notes.append(_another_kind(windows, held, why))
    dead = {x["name"]: x["dead_channels"] for x in layers if x["dead_channels"]}
    if dead:
        most = max(dead, key=lambda name: dead[name])
        notes.append(
            f"{several(len(dead), 'linear')} with input channels that no calibration token used, "
            f"the most {most} with {dead[most]}; other text may use them: {MORE_TEXT}"
        )
    return notes


def _another_kind(windows: Windows, held: Windows, why: str) -> str:
    return (
        f"the held-out text ({held.description}) is of another kind than the calibration text "
        f"({windows.description}): {why}; calibrate by data.path on text like what the model "
        "will read"
    )


def _losses(counted: Tensor, tokens: Tensor) -> Tensor:
    """Nats of each token by counts [V], one added to each."""
    return -torch.log((counted[tokens] + 1) / (counted.sum() + len(counted)))
