"""Known faults of compressed checkpoints, each looked for by itself and named.

Scores say that something is wrong; these say what. Of the files (eval/fingerprint.py): the
tokenizer, its chat template and beginning-of-sequence token, the tokens that end an answer, how
the others are chosen, RoPE, the rest of the configuration. Of the weights (eval/layers.py): blocks,
an embedding or an output head that are further from the original than they should be.
"""

from collections.abc import Iterator
from math import isfinite
from statistics import median

from compress.algorithms.rope import method_of
from compress.eval.fingerprint import Fingerprint
from compress.eval.layers import Blocks

FAR, COMMON, OUTSTANDING, GAIN = 0.3, 0.35, 3.0, 0.3
"""A block is named where its error is above FAR and above OUTSTANDING times both the median block's
and its own in the original as it is served, and its scales where its gain is off 1 by more than
GAIN and explains most of the error. All blocks are where the median is above COMMON, or the median
gain off 1 by more than GAIN."""
EMBEDDING = 0.1
"""Of its size. SmolLM2-135M's, rounded to nearest, is off by 1.2% in INT8, and in 4 bit by 13% in
groups of 32 and 22% by channels."""
HEAD_KL = 0.005
"""Nats a token above the original's head as it is served. SmolLM2-135M's, rounded to nearest, has
0.002 in INT8 and 0.17 in 4 bit by groups of 64; in bfloat16 0.0005."""


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
        ("generation", _generation(original, found)),
        ("chat template", _template(original, found)),
        ("RoPE", _rope(original, found)),
    ]
    if blocks is not None and served is not None:
        misread = any(True for check in (_rope, _arithmetic) for _ in check(original, found))
        checks += [
            ("configuration", _arithmetic(original, found)),
            ("embedding", _embedding(blocks)),
            ("LM head", _head(blocks, served)),
            ("block", _blocks(blocks, served, misread)),
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
    for name, token in original.named.items():
        if found.named.get(name, token) != token:
            yield f"The checkpoint's tokenizer has {found.named[name]} as its {name}, not {token}."


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


def _generation(original: Fingerprint, found: Fingerprint) -> Iterator[str]:
    old, new = original.generation, found.generation
    changed = [
        f"{name} is {new.get(name, 'absent')}, should be {old.get(name, 'absent')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if changed:
        yield (
            f"The checkpoint's generation_config.json chooses tokens otherwise: "
            f"{'; '.join(changed)}. Engines answer by it, the judging does not."
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


def _embedding(blocks: Blocks) -> Iterator[str]:
    if not blocks.embedding <= EMBEDDING:  # NaN too
        yield (
            f"The input embedding is off by {100 * blocks.embedding:.0f}% of its size: its weights "
            "are not the original's."
        )


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


def _blocks(blocks: Blocks, served: Blocks, misread: bool) -> Iterator[str]:
    """misread: that config.json is wrong, which alone may put blocks off."""
    usual = median(filter(isfinite, blocks.error)) if any(map(isfinite, blocks.error)) else 0.0
    gains = [gain for gain in blocks.gain if isfinite(gain)]
    common = median(gains) if gains else 1.0
    if abs(common - 1) > GAIN or usual > max(COMMON, OUTSTANDING * median(served.error)):
        yield (
            f"The blocks add {common:.2f} times what they should (median), with errors of "
            f"{100 * usual:.0f}%: what they have in common is wrong, such as norms, scales, the "
            "order of channels or config.json."
        )
    each = zip(blocks.error, blocks.gain, served.error, strict=True)
    for i, (error, gain, floor) in enumerate(each):
        if not isfinite(error):
            yield f"What block {i} gives are not finite numbers: its weights or scales are broken."
        elif not error <= max(FAR, OUTSTANDING * usual, OUTSTANDING * floor):
            why = "config.json may explain it" if misread else _why(error, gain)
            yield (
                f"Block {i} is off by {100 * error:.0f}% of what it adds, the median block by "
                f"{100 * usual:.1f}%: {why}."
            )


def _why(error: float, gain: float) -> str:
    """What a block's error is: a factor, or another direction than the original's."""
    scaled = abs(gain - 1)
    if gain > 0 and scaled > GAIN and error**2 < 2 * scaled**2:  # the rest is the smaller part
        return f"it adds {gain:.2f} times what it should, so its scales or norms are wrong"
    return "what it adds points elsewhere, so its weights are wrong, missing or another block's"
