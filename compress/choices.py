"""The formats that each linear may have, what each takes, and the room that a budget leaves."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig

from compress import engines
from compress.artifact import write_json
from compress.errors import UserError
from compress.model import linear_shapes, skeleton, storage_dtype
from compress.qtensor import QuantSpec
from compress.report.words import listed
from compress.structure import head_names

if TYPE_CHECKING:
    from compress.config import Config

SIXTEEN_BIT = "16 bit"
SCHEME = re.compile(r"W([48])A(8|16)(?: ?g(\d+))?")
UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(MB|GB|MiB|GiB)")
FILE = "allocation.json"
ENTRY = 100
"""Bytes of a tensor's entry in the header of a safetensors file, at most, beside its name."""
SUFFIX = len("weight_packed")
ENTRIES = 3
"""Tensors of a packed linear: integers, scales, shape."""


@dataclass(frozen=True)
class Group:
    """Linears that have one format, since engines join them into one matrix.

    names: of the linears, in full. weights: how many these hold together. sizes: their bytes with
    scales in every format that the engine serves them in; None is 16 bit.
    """

    names: tuple[str, ...]
    weights: int
    sizes: Mapping[QuantSpec | None, int]

    @property
    def name(self) -> str:
        """`model.layers.0.mlp.gate_proj+up_proj`."""
        parent = self.names[0].rpartition(".")[0]
        return f"{parent}.{'+'.join(name.rpartition('.')[2] for name in self.names)}"


def groups_of(
    model: PretrainedConfig, config: "Config", guarded: Mapping[str, str] | None = None
) -> tuple[list[Group], list[str]]:
    """What of `model` can be chosen formats for as `config` asks; see `offered`.

    guarded: linears left in 16 bit for what their weights hold, with the reason.
    """
    trust = config.model.trust_remote_code
    dtype = storage_dtype(model, config.model.dtype)
    return offered(
        linear_shapes(model, trust),
        config.allocate.specs(config.quantize.spec),
        config.engine,
        config.quantize.keep,
        head_names(skeleton(model, torch.bfloat16, trust)),
        itemsize=dtype.itemsize,
        dtype=dtype,
        guarded=guarded,
    )


def parse_scheme(text: str) -> QuantSpec | None:
    """The inverse of `QuantSpec.scheme`; None for what is no scheme of this project."""
    found = SCHEME.fullmatch(text)
    if found is None:
        return None
    bits, activations, group = int(found[1]), int(found[2]), found[3]
    return QuantSpec(bits, int(group) if group else None, None if activations == 16 else 8)


def scheme_name(spec: QuantSpec | None) -> str:
    """The scheme's name, `16 bit` for None."""
    return SIXTEEN_BIT if spec is None else spec.scheme


def scheme_of(specs: Mapping[str, QuantSpec]) -> str:
    """The schemes of a model's quantized linears in words, that of most of them first."""
    return listed(spec.scheme for spec, _ in Counter(specs.values()).most_common())


def offered(
    linears: Mapping[str, engines.Shape],
    choices: Iterable[QuantSpec],
    engine: str,
    keep: Sequence[str],
    heads: Sequence[str],
    *,
    itemsize: int = 2,
    **more: Any,
) -> tuple[list[Group], list[str]]:
    """The linears that may be quantized, in groups, and what is to be said of the choices.

    choices: asked for; where a group size does not divide a linear's inputs, the largest of 128,
    64, 32 below it that does is offered instead. A format that `engine` has no kernel for at a
    linear's size is not offered there. itemsize: bytes of a value left in 16 bit, and of a scale.
    Other arguments: those of `engines.preflight`. Raises UserError where no linear has a choice.
    """
    formats: dict[str, list[QuantSpec]] = {}
    notes: list[str] = []
    for spec in choices:
        try:
            # Per channel, since a group size is fitted to each linear here, not to all at once.
            chosen = engines.preflight(
                linears, replace(spec, group_size=None), engine, keep, heads, **more
            )
        except UserError as refusal:
            notes.append(f"{spec.scheme} is not offered: {refusal}")
            continue
        for name in chosen.quantize:
            fitting = _fitted(spec, linears[name][1])
            if fitting is not None:
                formats.setdefault(name, []).append(fitting)
    together: dict[str, list[str]] = {}
    for name in (name for name in linears if name in formats):
        parent, _, last = name.rpartition(".")
        key = f"{parent}.{engines.GATE_UP}" if last in engines.GATE_UP else name
        together.setdefault(key, []).append(name)
    groups = []
    for names in together.values():
        shapes = [linears[name] for name in names]
        of_all = [
            s for s in dict.fromkeys(formats[names[0]]) if all(s in formats[n] for n in names)
        ]
        sizes: dict[QuantSpec | None, int] = {
            spec: sum(stored_bytes(shape, spec, itemsize) for shape in shapes) for spec in of_all
        }
        weights = sum(n * k for n, k in shapes)
        if of_all:
            groups.append(Group(tuple(names), weights, {**sizes, None: weights * itemsize}))
    if not groups:
        raise UserError(f"no linear has a choice of formats: {'; '.join(notes)}")
    return groups, notes


def _fitted(spec: QuantSpec, width: int) -> QuantSpec | None:
    """`spec` with the largest group size that divides `width` and is not above its own."""
    if spec.group_size is None:
        return spec
    below = (size for size in engines.GROUP_SIZES if size < spec.group_size)
    size = next((s for s in (spec.group_size, *below) if width % s == 0), None)
    return None if size is None else replace(spec, group_size=size)


def stored_bytes(shape: engines.Shape, spec: QuantSpec, itemsize: int = 2) -> int:
    """Bytes of the integers and scales of a quantized weight [N, K]."""
    n, k = shape
    packed = spec.activation_bits is None  # whole int32 words
    ints = 4 * n * -(-k * spec.bits // 32) if packed else n * k
    return ints + itemsize * n * spec.groups(k)


def parse_size(text: str) -> int:
    """Bytes of a size such as `24GB` (10^9) or `80GiB` (2^30)."""
    found = SIZE.fullmatch(text)
    assert found is not None
    return int(float(found[1]) * UNITS[found[2].upper()])


def budget_problem(budget: str) -> str | None:
    """What is wrong with a budget as it is written, or None."""
    number = re.fullmatch(r"\d+(\.\d+)?", budget)
    if (number and float(budget) > 0) or SIZE.fullmatch(budget):
        return None
    return (
        f"budget is {budget!r}; wanted bits a weight such as 4.5, or bytes of the checkpoint such "
        "as 4.2GB"
    )


def room(
    budget: str, groups: Sequence[Group], elements: Mapping[str, int], *, itemsize: int = 2
) -> int:
    """Bytes that `budget` leaves for the weights and scales of `groups`.

    budget: bits a weight, mean over the linears of `groups`; or a size, of the whole checkpoint's
    weight files. elements: values of each tensor of the original by name, without a tied head.
    Raises UserError, with the least that is possible, where the smallest formats are over it.
    """
    weights = sum(group.weights for group in groups)
    least = sum(min(group.sizes.values()) for group in groups)
    if SIZE.fullmatch(budget) is None:
        found = int(float(budget) * weights / 8 + 1e-6)
        if found < least:
            bits = math.ceil(8e3 * least / weights - 1e-6) / 1e3
            raise UserError(
                f"budget={budget}: the smallest formats of the choices take {bits:g} bits a "
                f"weight; wanted budget={bits:g} or more, or other allocate.choices"
            )
        return found
    others = _other_bytes(groups, elements, itemsize)
    found = parse_size(budget) - others
    if found < least:
        megabytes = math.ceil((least + others) / 1e5) / 10
        raise UserError(
            f"budget={budget}: the smallest formats of the choices make a checkpoint of "
            f"{megabytes:.1f} MB, of which {others / 1e6:.1f} MB stay in 16 bit; wanted "
            f"budget={megabytes:.1f}MB or more, or other allocate.choices"
        )
    return found


def _other_bytes(groups: Sequence[Group], elements: Mapping[str, int], itemsize: int) -> int:
    """Bytes of the weight files beside the weights and scales of `groups`, at most."""
    names = [name for group in groups for name in group.names]
    inside = {f"{name}.weight" for name in names}
    outside = itemsize * sum(count for name, count in elements.items() if name not in inside)
    shapes = 16 * len(names)  # weight_shape, two int64
    headers = sum(ENTRY + len(name) for name in elements)
    headers += sum(ENTRIES * (ENTRY + len(name) + SUFFIX) for name in names)
    shards = 1 + (outside + itemsize * sum(group.weights for group in groups)) // 10**9
    return outside + shapes + headers + 1024 * shards


def write_assignment(folder: Path, specs: Mapping[str, QuantSpec]) -> None:
    """Keep which linears are quantized, by full name, and how."""
    write_json(folder / FILE, {name: asdict(spec) for name, spec in specs.items()})


def read_assignment(folder: Path) -> dict[str, QuantSpec]:
    """What `write_assignment` kept. Raises UserError where there is none."""
    file = folder / FILE
    if not file.exists():
        raise UserError(
            f"{folder}: no {FILE}, and budget asks for one; run the stage allocate first, with "
            "only=allocate or without only="
        )
    return {name: QuantSpec(**fields) for name, fields in json.loads(file.read_text()).items()}
