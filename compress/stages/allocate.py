"""allocate: which linear gets how many bits, so that a budget is kept at the least loss."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from compress import checkpoint, guards
from compress.algorithms.budget import Option, assign
from compress.artifact import fingerprint, write_json
from compress.budget import choices
from compress.budget.allocation import figures
from compress.budget.choices import Group, Offer, scheme_name
from compress.budget.sensitivity import Sensitivity, Variant
from compress.clock import Clock
from compress.engines import GROUP_SIZES
from compress.errors import ConfigError, UserError
from compress.log import logger
from compress.model import BlockModel, storage_dtype
from compress.qtensor import QuantSpec, parse_scheme
from compress.report.words import said_size
from compress.sizes import tensor_elements
from compress.stage import Run
from compress.stages.calibrate import WINDOWS
from compress.text.windows import Windows

FILE = "sensitivities.json"
UNTRIED = "more than one format: vLLM and our runtime were tried with a mixture, SGLang was not"


@dataclass(kw_only=True)
class Allocate:
    """Mixed precision: formats chosen layer by layer under the `budget` of the recipe.

    What each group of linears costs in each format, alone, is estimated as KL on calibration text
    (`Sensitivity`), and the sum of these is made least within the budget (`assign`). Off without a
    budget; another budget on the same estimates (force=[allocate]) takes seconds, and
    force=[calibrate] makes them anew.

    choices: schemes to choose from beside 16 bit, such as [W4A16 g64, W8A16]; empty: those that go
    with the recipe's. Without INT8 activations these are 4 bit per channel, in the recipe's groups
    and in groups of 32, and 8 bit per channel; else W8A8. windows, length: calibration text that
    gradients are taken on. batch: windows that go through a block together. rounding, smooth,
    clip: of the formats on trial, as in quantize unless given; what is learned is tried by gptq.
    """

    name: ClassVar[str] = "allocate"
    version: ClassVar[int] = 4
    needs: ClassVar[tuple[str, ...]] = ("dense", "statistics")
    gives: ClassVar[str | None] = "statistics"
    shares: ClassVar[tuple[str, ...]] = ("model", "engine", "device", "seed", "scheme")

    choices: list[str] = field(default_factory=list)
    windows: int = 16
    length: int = 512
    batch: int = 4
    rounding: str = "gptq"
    smooth: bool = True
    clip: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"allocate.{name} is {value}; wanted at least {least}"
            for name, value, least in (
                ("windows", self.windows, 1),
                ("length", self.length, 16),
                ("batch", self.batch, 1),
            )
            if value < least
        ]
        problems += [
            f"allocate.choices has {text!r}; wanted W8A8, W8A16 or W4A16, the last two also in "
            f"groups of {', '.join(map(str, GROUP_SIZES))}, such as W4A16 g64"
            for text in self.choices
            if not _is_choice(parse_scheme(text))
        ]
        if problems:
            raise ConfigError(problems)

    def specs(self, recipe: QuantSpec) -> list[QuantSpec]:
        """The schemes to choose from, for a recipe of this scheme."""
        given = [parse_scheme(text) for text in self.choices]
        if given:
            return [spec for spec in given if spec is not None]
        if recipe.activation_bits is not None:
            return [recipe]
        return [QuantSpec(4), QuantSpec(4, recipe.group_size), QuantSpec(4, 32), QuantSpec(8)]

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        options, statistics = run.config.model, run.artifacts["statistics"]
        model = BlockModel(
            run.artifacts["dense"],
            device=run.config.device,
            trust_remote_code=options.trust_remote_code,
        )
        dtype = storage_dtype(model.config, options.dtype)
        offer, unscaled = _offer(run, model, dtype)
        groups, notes, itemsize = offer.groups, offer.notes, dtype.itemsize
        elements = choices.elements_stored(
            model.config, model.skeleton, tensor_elements(model.folder)
        )
        room = choices.room(str(run.config.budget), groups, elements, itemsize=itemsize)
        text = load_file(statistics / WINDOWS)
        calibration = Windows(text["ids"], text["mask"])
        clock = Clock()
        costs = self._measure(run, out, model, groups, calibration, dtype, clock)
        _refuse_unmeasured(groups, costs)
        options_of = [
            [Option(group.sizes[spec], cost[spec]) for spec in group.sizes]
            for group, cost in zip(groups, costs, strict=True)
        ]
        taken = [
            list(group.sizes)[number]
            for group, number in zip(groups, assign(options_of, room), strict=True)
        ]
        found = figures(groups, costs, taken, room)
        if len({spec for spec in taken if spec}) > 1 and run.config.engine in ("any", "sglang"):
            notes.append(UNTRIED)
        for note in notes:
            logger.info(f"  {note}")
        logger.info(
            f"  {found['bits_per_weight']:.3f} bits a weight of {found['room_bits']:.3f}, sum of "
            f"KL {found['kl']:.4f}: " + ", ".join(f"{n} x {s}" for s, n in found["counts"].items())
        )
        checkpoint.hand_on(statistics, out)
        specs = {n: s for g, s in zip(groups, taken, strict=True) if s for n in g.names}
        choices.write_assignment(out, specs)
        others = itemsize * (sum(elements.values()) - found["weights"])
        return {
            "budget": run.config.budget,
            "tokens": self._part_of(calibration).tokens,
            "rounding": self.rounding,
            "seconds_by_part": clock.seconds,
            **found,
            "kept": {**unscaled, **found["kept"]},
            "checkpoint_bytes": others + found["bytes"],
            "notes": notes,
        }

    def _part_of(self, calibration: Windows) -> Windows:
        """The text that gradients are taken on."""
        rows, columns = slice(self.windows), slice(self.length)
        return Windows(calibration.ids[rows, columns], calibration.mask[rows, columns])

    def _measure(
        self,
        run: Run,
        out: Path,
        model: BlockModel,
        groups: Sequence[Group],
        calibration: Windows,
        dtype: torch.dtype,
        clock: Clock,
    ) -> list[dict[QuantSpec | None, float]]:
        """KL of each group in each of its formats; 0 in 16 bit. Kept in `out`."""
        variants: list[list[Variant]] = [[] for _ in range(len(model))]
        places: list[list[tuple[QuantSpec, int, int]]] = []
        blocks = {f"{model.block_name(index)}.": index for index in range(len(model))}
        for group in groups:
            prefix = next(p for p in blocks if group.names[0].startswith(p))
            local = tuple(name.removeprefix(prefix) for name in group.names)
            index, places_of = blocks[prefix], []
            for spec in filter(None, group.sizes):
                places_of.append((spec, index, len(variants[index])))
                variants[index].append(Variant(local, spec))
            places.append(places_of)
        key = {
            "version": self.version,
            "calibrate": run.manifests["calibrate"]["fingerprint"],
            "device": run.config.device,
            "seed": run.config.seed,
            "allocate": asdict(self),
            "variants": [[asdict(variant) for variant in block] for block in variants],
        }
        kl = _measured_before(run, key)
        if kl is None:
            sensitivity = Sensitivity(
                model,
                self._part_of(calibration),
                calibration,
                variants,
                run.artifacts["statistics"],
                dtype,
                run.work,
                self.batch,
                rounding="nearest" if self.rounding == "nearest" else "gptq",
                smooth=self.smooth,
                clip=self.clip,
                seed=run.config.seed,
                clock=clock,
            )
            disk = said_size(sensitivity.disk)
            logger.info(f"  {sum(map(len, variants))} variants: {disk} of temporary disk")
            kl = sensitivity.measure()
        write_json(out / FILE, {"key": fingerprint(key), "kl": kl})
        return [
            {**{spec: kl[index][number] for spec, index, number in places_of}, None: 0.0}
            for places_of in places
        ]


def _refuse_unmeasured(
    groups: Sequence[Group], costs: Sequence[Mapping[QuantSpec | None, float]]
) -> None:
    """Raise UserError where a KL is no number, by the linears and the format."""
    for group, cost in zip(groups, costs, strict=True):
        for spec, kl in cost.items():
            if not math.isfinite(kl):
                raise UserError(
                    f"{group.name} in {scheme_name(spec)}: its KL is {kl}; look for what overflows "
                    "there, or keep it in 16 bit with quantize.keep"
                )


def _measured_before(run: Run, key: Mapping[str, Any]) -> list[list[float]] | None:
    """The KL of the same variants from an earlier run of the stage with another budget, if any.

    Where calibrate was made again, by force, they are measured again too.
    """
    file = run.work.parents[1] / Allocate.name / FILE
    if not file.exists() or not run.manifests["calibrate"]["skipped"]:
        return None
    found = json.loads(file.read_text())
    if found["key"] != fingerprint(key):
        return None
    logger.info("  sensitivities were measured before, for another budget")
    return found["kl"]


def _is_choice(spec: QuantSpec | None) -> bool:
    """Whether a scheme is one that any engine has kernels for."""
    if spec is None or spec.group_size is None:
        return spec is not None and (spec.bits == 8 or spec.activation_bits is None)
    return spec.activation_bits is None and spec.group_size in GROUP_SIZES


def _offer(run: Run, model: BlockModel, dtype: torch.dtype) -> tuple[Offer, dict[str, str]]:
    """What may be chosen, less the formats whose scales float16 cannot hold; and the linears that
    have no choice for that, with the reason.
    """
    offer = choices.offer_for(model.config, run.config)
    if dtype != torch.float16:
        return offer, {}
    names: dict[QuantSpec, list[str]] = {}
    for group in offer.groups:
        for spec in filter(None, group.sizes):
            names.setdefault(spec, []).extend(group.names)
    left = offer.without({spec: guards.small_scales(model, names[spec], spec) for spec in names})
    return left, {name: why for name, why in left.reasons.items() if name not in offer.reasons}
