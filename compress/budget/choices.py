"""The formats that each linear may have, what each takes, and the room that a budget leaves."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig

from compress import engines
from compress.artifact import write_json
from compress.blocks.structure import head_names, stored_name
from compress.errors import UserError
from compress.given import SIZE, parse_size
from compress.model import linear_shapes, skeleton, storage_dtype, tied_names
from compress.qtensor import QuantSpec
from compress.report.words import listed, said_size
from compress.sizes import SHAPE_BYTES, stored_bytes

if TYPE_CHECKING:
    from compress.config import Config

SIXTEEN_BIT = "16 bit"
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


@dataclass(frozen=True)
class Offer:
    """What may be chosen.

    groups: the linears that have a choice. reasons: of the other linears, by full name, why they
    stay in 16 bit. refused: by scheme and reason, the linears that may not have it. remarks: what
    is to be known of the schemes altogether.
    """

    groups: list[Group]
    reasons: Mapping[str, str]
    refused: Mapping[tuple[str, str], Sequence[str]]
    remarks: Sequence[str]

    @property
    def notes(self) -> list[str]:
        """All that the user should read of it, a line each."""
        notes = list(dict.fromkeys(self.remarks))
        for reason in dict.fromkeys(self.reasons.values()):
            names = [name for name, why in self.reasons.items() if why == reason]
            notes.append(f"16 bit: {_counted(names)} ({reason})")
        for (scheme, reason), all_names in self.refused.items():
            choosing = [name for name in all_names if name not in self.reasons]
            if choosing:
                notes.append(f"{scheme} is not offered: {_counted(choosing)} ({reason})")
        return notes

    def without(self, lost: Mapping[QuantSpec, Mapping[str, str]]) -> "Offer":
        """Less the formats that `lost` names linears for, with the reason; with them go those
        that share a matrix. Raises UserError where no linear has a choice left.
        """
        groups, reasons = [], dict(self.reasons)
        refused = {key: list(names) for key, names in self.refused.items()}
        for group in self.groups:
            sizes = dict(group.sizes)
            for spec in filter(None, group.sizes):
                why = next((lost[spec][n] for n in group.names if n in lost.get(spec, {})), None)
                if why is not None:
                    del sizes[spec]
                    refused.setdefault((spec.scheme, why), []).extend(group.names)
                    if len(sizes) == 1:
                        reasons |= dict.fromkeys(group.names, why)
            if len(sizes) > 1:
                groups.append(replace(group, sizes=sizes))
        return _some(Offer(groups, reasons, refused, self.remarks))


def offer_for(model: PretrainedConfig, config: "Config") -> Offer:
    """What of `model` can be chosen formats for as `config` asks; see `offered`."""
    trust = config.model.trust_remote_code
    return offered(
        linear_shapes(model, trust),
        config.allocate.specs(config.quantize.spec),
        config.engine,
        config.quantize.keep,
        head_names(skeleton(model, torch.bfloat16, trust)),
        dtype=storage_dtype(model, config.model.dtype),
    )


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
    dtype: torch.dtype = torch.bfloat16,
) -> Offer:
    """The linears that may be quantized, in groups, with the formats that each may have.

    linears, keep, heads: as in `engines.choose`. choices: the formats asked for; where a group
    size does not divide a linear's inputs, the largest of 128, 64, 32 below it that does is offered
    instead. A format that `engine` has no kernel for at a linear's size is not offered there.
    dtype: of a value left in 16 bit, and of a scale. Raises UserError where no linear has a choice.
    """
    formats: dict[str, list[QuantSpec]] = {}
    reasons: dict[str, str] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    remarks: list[str] = []
    for spec in dict.fromkeys(choices):
        try:
            engines.check_spec(spec, engine)
            # Per channel, since a group size is fitted to each linear here, not to all at once.
            whole = replace(spec, group_size=None)
            chosen = engines.choose(linears, whole, engine, keep, heads, dtype=dtype)
        except UserError as refusal:
            remarks.append(f"{spec.scheme} is not offered: {refusal}")
            continue
        remarks += engines.remarks(spec, engine, dtype)
        why = {name: reason for name, reason in chosen.reasons.items() if name in linears}
        for name in chosen.quantize:
            fitting = _fitted(spec, linears[name][1], engine)
            if fitting is None:
                why[name] = f"no group size up to {spec.group_size} divides its {linears[name][1]}"
            elif fitting not in formats.setdefault(name, []):
                formats[name].append(fitting)
        for name, reason in why.items():
            refused.setdefault((spec.scheme, reason), []).append(name)
            reasons.setdefault(name, reason)
    together: dict[str, list[str]] = {}
    for name in (name for name in linears if name in formats):
        parent, _, last = name.rpartition(".")
        key = f"{parent}.{engines.GATE_UP}" if last in engines.GATE_UP else name
        together.setdefault(key, []).append(name)
    groups = []
    for names in together.values():
        shapes = [linears[name] for name in names]
        of_all = [s for s in formats[names[0]] if all(s in formats[n] for n in names)]
        sizes: dict[QuantSpec | None, int] = {
            spec: sum(stored_bytes(shape, spec, dtype.itemsize) for shape in shapes)
            for spec in of_all
        }
        weights = sum(n * k for n, k in shapes)
        if of_all:
            groups.append(Group(tuple(names), weights, {**sizes, None: weights * dtype.itemsize}))
            for name in names:
                reasons.pop(name, None)
    return _some(Offer(groups, reasons, refused, remarks))


def _some(offer: Offer) -> Offer:
    if not offer.groups:
        raise UserError(f"no linear has a choice of formats: {'; '.join(offer.notes)}")
    return offer


def _fitted(spec: QuantSpec, width: int, engine: str) -> QuantSpec | None:
    """`spec` with the largest group size that divides `width` and is not above its own."""
    if spec.group_size is None:
        return spec
    sizes = engines.group_sizes(spec.group_size, engine)
    size = next((size for size in sizes if width % size == 0), None)
    return None if size is None else replace(spec, group_size=size)


def _counted(names: Sequence[str]) -> str:
    """`60 × q_proj and k_proj`."""
    return f"{len(names)} × {listed(dict.fromkeys(name.rpartition('.')[2] for name in names))}"


def budget_problem(budget: str) -> str | None:
    """What is wrong with a budget as it is written, or None."""
    number = re.fullmatch(r"\d+(\.\d+)?", budget)
    if (number and float(budget) > 0) or SIZE.fullmatch(budget):
        return None
    return (
        f"budget is {budget!r}; wanted bits a weight such as 4.5, or bytes of the checkpoint such "
        "as 4.2GB"
    )


def elements_stored(
    model: PretrainedConfig, empty: nn.Module, elements: Mapping[str, int]
) -> dict[str, int]:
    """Those of the original's tensors that a checkpoint holds: a tied head is not stored.

    empty: the model's skeleton. elements: values of each tensor by name.
    """
    tied = {stored_name(model, name) for name in tied_names(empty)}
    return {name: count for name, count in elements.items() if name not in tied}


def room(
    budget: str, groups: Sequence[Group], elements: Mapping[str, int], *, itemsize: int = 2
) -> int:
    """Bytes that `budget` leaves for the weights and scales of `groups`.

    budget: bits a weight, mean over the linears of `groups`; or a size, of the whole checkpoint's
    weight files. elements: values of each tensor of the original by name, without a tied head.
    Raises UserError, with the least that is possible, where the smallest formats are over it, and
    with the most that leaves something to quantize, where all of `groups` fit in 16 bit.
    """
    weights = sum(group.weights for group in groups)
    least = sum(min(group.sizes.values()) for group in groups)
    most = sum(group.sizes[None] for group in groups)
    if SIZE.fullmatch(budget) is None:
        found = int(float(budget) * weights / 8 + 1e-6)
        if found < least:
            bits = math.ceil(8e3 * least / weights - 1e-6) / 1e3
            raise UserError(
                f"budget={budget}: the smallest formats of the choices take {bits:g} bits a "
                f"weight; wanted budget={bits:g} or more, or other allocate.choices"
            )
        if found >= most:
            raise UserError(_all_fits(budget, f"{8 * most / weights:g}"))
        return found
    others = _other_bytes(groups, elements, itemsize)
    found = parse_size(budget) - others
    if found < least:
        megabytes = math.ceil((least + others) / 1e5) / 10
        raise UserError(
            f"budget={budget}: the smallest formats of the choices make a checkpoint of "
            f"{megabytes:.1f} MB, of which {said_size(others)} stay in 16 bit; wanted "
            f"budget={megabytes:.1f}MB or more, or other allocate.choices"
        )
    if found >= most:
        raise UserError(_all_fits(budget, f"{(most + others) / 1e6:.1f}MB"))
    return found


def _all_fits(budget: str, below: str) -> str:
    return (
        f"budget={budget}: all fits in 16 bit, and nothing is left to quantize; wanted a budget "
        f"below {below}, or none"
    )


def _other_bytes(groups: Sequence[Group], elements: Mapping[str, int], itemsize: int) -> int:
    """Bytes of the weight files beside the weights and scales of `groups`, at most."""
    names = [name for group in groups for name in group.names]
    inside = {f"{name}.weight" for name in names}
    outside = itemsize * sum(count for name, count in elements.items() if name not in inside)
    shapes = SHAPE_BYTES * len(names)
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
