"""What each serving engine accepts, checked before anything is computed.

The facts here are of vLLM 0.32, SGLang 0.5.23 and transformers 5.24 with compressed-tensors;
docs/engines.md names the source file of each.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from compress.errors import UserError
from compress.given import ENGINES
from compress.qtensor import QuantSpec
from compress.report import words
from compress.sizes import saved_bytes

Shape = tuple[int, int]  # (out_features N, in_features K)

# RoPE acts on what these make, and a fine-tune after scaling trains them. The last four are the
# projections of multi-head latent attention.
QUERY_KEY = ("q_proj", "k_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "W_pack")
VALUE = ("v_proj",)
# Layers of one parent that engines join into one matrix, which then has one scheme.
GATE_UP = ("gate_proj", "up_proj")

GROUP_SIZES = (128, 64, 32)

# A weight [N, K] is served where one of the pairs (n, k) has n dividing N and k dividing K.
KERNELS: Mapping[tuple[str, str], Sequence[Shape]] = {
    ("vllm", "W8A8"): ((1, 1),),
    ("vllm", "W8A16"): ((1, 4),),
    ("vllm", "W4A16"): ((32, 32),),
    ("sglang", "W8A8"): ((8, 16),),
    ("sglang", "W8A16"): ((64, 128), (128, 64)),
    ("sglang", "W4A16"): ((64, 128), (128, 64)),
}

# What the kernels of an engine take as activations; the others take any.
DTYPES = {"sglang": (torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Preflight:
    """What will be quantized and how.

    quantize: full names of the linears that are. ignore: full names of those that stay in 16 bit,
    the output layer among them, for the checkpoint's `ignore`. spec: as asked for, but for a group
    size that had to be repaired. notes: what was kept or repaired, and what it costs in bytes.
    reasons: why each of `ignore` is.
    """

    quantize: list[str]
    ignore: list[str]
    spec: QuantSpec
    notes: list[str]
    reasons: Mapping[str, str] = field(default_factory=dict)


def choose(
    linears: Mapping[str, Shape],
    spec: QuantSpec,
    engine: str,
    keep: Iterable[str] = (),
    heads: Sequence[str] = ("lm_head",),
    *,
    dtype: torch.dtype = torch.bfloat16,
    guarded: Mapping[str, str] | None = None,
) -> Preflight:
    """Choose the linears that `engine` can serve quantized by `spec`; `any` is every engine.

    linears: (out_features, in_features) by full name, of those inside the decoder blocks; nothing
    else is a candidate. keep: linears left in 16 bit, by full name, shell wildcard, or `re:`
    pattern (matched from the start, as in compressed-tensors). heads: names of the output layer, in
    the model and in its files, as `structure.head_names` gives them. dtype: of what stays in 16
    bit, and of activations. guarded: more linears left in 16 bit, by full name, with the reason.

    Raises UserError for an unknown engine or scheme, a dtype that the engine has no kernels for,
    a pattern that matches nothing, a group size that cannot be, and where nothing is left to
    quantize.
    """
    check_spec(spec, engine)
    _check_dtype(dtype, engine)
    if not linears:
        raise UserError("no nn.Linear inside the decoder blocks; wanted a Llama-like model")

    kept = dict(guarded or {})

    def keep_all(names: Iterable[str], reason: str) -> None:
        for name in names:
            kept.setdefault(name, reason)

    keep_all(_called(linears, QUERY_KEY), "query and key, on which RoPE acts")
    keep_all(_called(linears, FUSED_QKV), "query, key and value in one matrix")
    if engine != "native":
        keep_all(_called(linears, VALUE), "engines fuse v with q and k; engine=native quantizes it")
    keep_all(matching([*linears, *heads], keep), "asked for by keep")
    if engine != "native":
        keep_all(_partners(linears, kept), "engines fuse gate and up, and the other is kept")
    for name in linears:
        refusal = None if name in kept else _refusal(name, linears, spec, engine)
        if refusal is not None:
            keep_all([name], refusal)

    left = {name: shape for name, shape in linears.items() if name not in kept}
    repaired = None
    if spec.group_size is not None and left:
        spec, indivisible, repaired = _fit_group(left, spec, engine)
        keep_all(indivisible, f"no group size of {_words(GROUP_SIZES)} divides K")
    quantize = [name for name in linears if name not in kept]
    if not quantize:
        reasons = "; ".join(dict.fromkeys(kept.values()))
        raise UserError(
            f"{spec.scheme} for engine={engine} leaves no linear to quantize ({reasons}); "
            "wanted at least one: keep fewer, or choose another scheme or engine"
        )
    for head in heads:
        kept.pop(head, None)
    ignore = [name for name in linears if name in kept]
    notes = _kept_notes(linears, kept, spec)
    if repaired is not None:
        notes.append(repaired)
    notes += remarks(spec, engine, dtype)
    why = {name: kept[name] for name in ignore} | dict.fromkeys(heads, "output layer")
    return Preflight(quantize, [*ignore, *heads], spec, notes, why)


def remarks(spec: QuantSpec, engine: str, dtype: torch.dtype) -> Iterator[str]:
    """What is to be known of a scheme and a dtype where `engine` serves them."""
    if dtype == torch.float32 and engine == "vllm":
        yield "float32 in vLLM runs on CPU only; its CUDA kernels take bfloat16 or float16"
    if dtype == torch.float16 and engine == "native":
        yield "float16 runs as bfloat16 on CPU, where its products are many times slower"
    if spec.scheme.startswith("W8A16") and engine in ("any", "vllm"):
        yield "W8A16 in vLLM runs on CUDA only; its CPU build has no kernel for it"


def group_sizes(asked: int, engine: str) -> list[int]:
    """What groups of `asked` may become, largest first: those, or smaller ones that all engines
    serve. Empty where `engine` serves no groups of `asked`.
    """
    if asked not in GROUP_SIZES and (asked < 1 or engine not in ("transformers", "native")):
        return []
    return [asked, *(size for size in GROUP_SIZES if size < asked)]


def matching(names: Sequence[str], patterns: Iterable[str]) -> list[str]:
    """The names that any pattern matches: a full name, a shell wildcard, or `re:` and a pattern.

    Raises UserError for a pattern that matches no name, with those near it.
    """
    found: set[str] = set()
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                compiled = re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise UserError(f"keep: {pattern!r} is no regular expression: {error}") from error
            hits = {name for name in names if compiled.match(name)}
        else:
            hits = set(fnmatch.filter(names, pattern))
        if not hits:
            raise UserError(
                f"keep: {pattern!r} matches no linear inside the decoder blocks (what lies outside "
                f"stays in 16 bit anyway); names near it: {', '.join(_near(pattern, names))}"
            )
        found |= hits
    return [name for name in names if name in found]


def check_spec(spec: QuantSpec, engine: str) -> None:
    """Raise UserError for an unknown engine, or a scheme that no kernel serves."""
    if engine not in ENGINES:
        raise UserError(f"engine is {engine!r}; wanted one of {_words(ENGINES)}")
    if spec.bits not in (4, 8):
        raise UserError(f"bits is {spec.bits}; wanted 4 or 8: no kernel serves others")
    if spec.activation_bits is not None and (spec.bits, spec.activation_bits) != (8, 8):
        raise UserError(f"{spec.scheme} is not supported; wanted W8A8, W8A16 or W4A16")
    if spec.activation_bits is not None and spec.group_size is not None:
        raise UserError(
            f"group size is {spec.group_size} for W8A8; wanted null: INT8 products are scaled once"
        )


def _check_dtype(dtype: torch.dtype, engine: str) -> None:
    for server in ENGINES[1:] if engine == "any" else (engine,):
        if dtype not in DTYPES.get(server, (dtype,)):
            raise UserError(
                f"model.dtype is {str(dtype).removeprefix('torch.')}, and {server}'s kernels take "
                "bfloat16 or float16; wanted model.dtype=bfloat16, or engine=vllm, transformers or "
                "native"
            )


def _called(linears: Iterable[str], last: Sequence[str]) -> list[str]:
    return [name for name in linears if name.rpartition(".")[2] in last]


def _fused(name: str, linears: Mapping[str, Shape]) -> list[str]:
    """The gate and up of one MLP if `name` is one of them and both are there, else `name`."""
    parent, _, last = name.rpartition(".")
    pair = [f"{parent}.{other}" for other in GATE_UP]
    return pair if last in GATE_UP and all(other in linears for other in pair) else [name]


def _partners(linears: Mapping[str, Shape], kept: Mapping[str, str]) -> list[str]:
    return [other for name in kept for other in _fused(name, linears) if other not in kept]


def _refusal(name: str, linears: Mapping[str, Shape], spec: QuantSpec, engine: str) -> str | None:
    """Why an engine has no kernel for the layer and which engines have one, or None."""
    n = sum(linears[part][0] for part in _fused(name, linears))
    k = linears[name][1]
    scheme = f"W{spec.bits}A{spec.activation_bits or 16}"

    def serves(server: str) -> bool:
        sizes = KERNELS.get((server, scheme), ((1, 1),))
        return any(n % by_n == 0 and k % by_k == 0 for by_n, by_k in sizes)

    asked = ENGINES[1:] if engine == "any" else (engine,)
    refusing = next((server for server in asked if not serves(server)), None)
    if refusing is None:
        return None
    wanted = " or ".join(f"{by_n} and {by_k}" for by_n, by_k in KERNELS[refusing, scheme])
    able = [f"engine={server}" for server in ENGINES[1:] if serves(server)]
    return (
        f"{refusing}'s {scheme} kernels want N and K in multiples of {wanted}; "
        f"quantized with {_words(able)}"
    )


def _fit_group(
    left: Mapping[str, Shape], spec: QuantSpec, engine: str
) -> tuple[QuantSpec, list[str], str | None]:
    """A group size that divides K of all layers: the spec, the layers that none divides, a note."""
    asked = spec.group_size or 0
    widths = sorted({k for _, k in left.values()})
    choices = group_sizes(asked, engine)
    if not choices or (asked not in GROUP_SIZES and any(k % asked for k in widths)):
        fit = [size for size in GROUP_SIZES if all(k % size == 0 for k in widths)]
        raise UserError(
            f"group size {asked} cannot be for layers with K = {_words(widths)} "
            f"and engine={engine}; sizes that would do: {_words([*fit, 'null (per channel)'])}"
        )
    indivisible = [n for n, (_, k) in left.items() if all(k % size for size in choices)]
    fitting = {name: shape for name, shape in left.items() if name not in indivisible}
    if not fitting:
        raise UserError(
            f"group size {asked} divides none of K = {_words(widths)}; sizes that would do: "
            f"{_words([*(s for s in GROUP_SIZES if any(k % s == 0 for k in widths)), 'null'])}"
        )
    size = next(s for s in choices if all(k % s == 0 for _, k in fitting.values()))
    repaired = QuantSpec(spec.bits, size, spec.activation_bits)
    if size == asked:
        return repaired, indivisible, None
    uneven = sorted({k for _, k in fitting.values() if k % asked})
    extra = sum(2 * n * (k / size - k / asked) for n, k in fitting.values())
    note = (
        f"groups of {size}, not {asked}, which does not divide K = {_words(uneven)}: "
        f"{words.said_size(extra)} more of scales"
    )
    return repaired, indivisible, note


def _kept_notes(
    linears: Mapping[str, Shape], kept: Mapping[str, str], spec: QuantSpec
) -> list[str]:
    """One line a reason: how many layers stay in 16 bit for it, and the bytes that it costs."""
    notes = []
    for reason in dict.fromkeys(kept.values()):
        names = [name for name, why in kept.items() if why == reason]
        cost = 0
        for n, k in (linears[name] for name in names):
            divides = spec.group_size is None or k % spec.group_size == 0
            asked = spec if divides else QuantSpec(spec.bits)
            cost += saved_bytes((n, k), asked)
        which = _words(sorted({name.rpartition(".")[2] for name in names}))
        notes.append(f"16 bit: {len(names)} × {which} ({reason}), {words.said_size(cost)} more")
    return notes


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    bare = pattern.removeprefix("re:").strip("*.?^$")
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    by_last = difflib.get_close_matches(bare.rpartition(".")[2], list(last), n=3)
    return [last[word] for word in by_last] or difflib.get_close_matches(
        bare, names, n=3, cutoff=0.0
    )


def _words(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)
