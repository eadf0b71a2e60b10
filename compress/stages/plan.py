"""plan: what it weighs, what a request adds, whether it fits; from headers, nothing is loaded."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from compress.blocks.structure import stored_name
from compress.budget import choices
from compress.errors import ConfigError, UserError
from compress.given import SIZE, parse_size
from compress.log import logger
from compress.model import linear_shapes, skeleton, storage_dtype, tensor_counts
from compress.planning.memory import LOGIT, OVERHEAD, by_part, part_of, token_bytes
from compress.planning.shape import widths
from compress.planning.training import PROCESS, Step, Student, training_bytes
from compress.preflight import preflight
from compress.qtensor import QuantSpec
from compress.report import words
from compress.report.words import said_size
from compress.runtime.cache import KV_CACHES, bytes_per_token, make_cache
from compress.sizes import shape_bytes, stored_bytes, tensor_bytes, tensor_elements
from compress.source import head_dim, read_config
from compress.stage import Run
from compress.tensors import TensorFiles
from compress.training.scaling import window_of
from compress.training.trainable import WAYS

OWN_CACHE = (
    "the KV cache is counted in 8 bit as our own runtime keeps it (serve.kv_cache); "
    "vLLM and SGLang have settings of their own"
)
BATCHES = (1, 4, 16, 64)


@dataclass(kw_only=True)
class Plan:
    """Weights, KV cache and activations against the memory there is.

    memory: of the card, such as 24GB or 80GiB; null: nothing is refused. batch: requests served
    at the same time. tokens: prompt and answer together, of each; at most the window that the model
    will have. The KV cache is counted as serve.kv_cache has it.
    """

    name: ClassVar[str] = "plan"
    version: ClassVar[int] = 8
    needs: ClassVar[tuple[str, ...]] = ("dense",)
    gives: ClassVar[str | None] = None
    shares: ClassVar[tuple[str, ...]] = (
        *("model", "engine", "device", "scheme", "kv_cache", "distill", "extend"),
    )

    memory: str | None = None
    batch: int = 1
    tokens: int = 2048

    def __post_init__(self) -> None:
        problems = []
        if self.memory is not None and not SIZE.fullmatch(self.memory):
            problems.append(f"plan.memory is {self.memory!r}; wanted a size such as 24GB or 80GiB")
        for name, value in (("batch", self.batch), ("tokens", self.tokens)):
            if value < 1:
                problems.append(f"plan.{name} is {value}; wanted at least 1")
        if problems:
            raise ConfigError(problems)

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        folder = run.artifacts["dense"]
        options = run.config.model
        config = read_config(folder, options.trust_remote_code)
        odd = _left_out(folder, skeleton(config, torch.bfloat16, options.trust_remote_code))
        sizes = tensor_elements(folder)
        whole = sum(sizes.values())
        if "shrink" in run.config.stages:
            config = run.config.shrink.planned(config, options.trust_remote_code)
            sizes = tensor_counts(config, options.trust_remote_code)
        shapes = linear_shapes(config, options.trust_remote_code)
        chosen = preflight(config, run.config)
        kv_cache = run.config.serve.kv_cache
        make_cache(kv_cache, config)  # refuses a model that it cannot be had for
        dtype = storage_dtype(config, options.dtype)
        scheme, notes = chosen.spec.scheme, [*chosen.notes]
        stored = {
            name: stored_bytes(shapes[name], chosen.spec, dtype.itemsize) + shape_bytes(chosen.spec)
            for name in chosen.quantize
        }
        reasons = dict(chosen.reasons)
        if run.config.budget is not None:
            scheme = "mixed precision"
            offer = choices.offer_for(config, run.config)
            stored, notes = _mixed(run, config, offer, sizes, dtype)
            reasons |= offer.reasons
        if "shrink" in run.config.stages:
            notes.insert(0, _of_the_student(sum(sizes.values()), whole))
        notes += odd
        window = _window(config, run)
        tokens = min(self.tokens, window)
        lengths = sorted({tokens, *(length for length in (1024, 4096) if length <= window)})
        if tokens < self.tokens:
            notes.append(
                f"requests are counted with the {tokens} tokens of the model's window, not the "
                f"{self.tokens} of plan.tokens"
            )
        if kv_cache != "16" and run.config.engine != "native":
            notes.append(OWN_CACHE)
        for note in notes:
            logger.info(f"  {note}")

        before = by_part(tensor_bytes(folder))
        after = {part: count * dtype.itemsize for part, count in by_part(sizes).items()}
        for name, quantized in stored.items():
            after[part_of(name)] -= math.prod(shapes[name]) * dtype.itemsize - quantized
        before["total"], after["total"] = sum(before.values()), sum(after.values())
        parameters = sum(sizes.values())

        by_kind = {kind: bytes_per_token(kind, config) for kind in KV_CACHES}
        per_token = by_kind[kv_cache]
        memory = self._memory(config, after["total"], per_token, tokens, run.config.device)
        self._say(before, after, parameters, by_kind, memory)
        training = None
        if "distill" in run.config.stages and run.config.budget is None:
            student = _student(config, sizes, shapes, chosen.quantize, chosen.spec)
            training = _training(run, student)
        if memory["fits"] is False:
            raise UserError(_does_not_fit(memory, per_token))
        return {
            "scheme": scheme,
            "parameters": parameters,
            "bytes": {"before": before, "after": after},
            "bits_per_weight": {
                "before": 8 * before["total"] / whole,
                "after": 8 * after["total"] / parameters,
            },
            "kv_cache": {
                "kind": kv_cache,
                "by_kind": by_kind,
                "bytes_per_token": per_token,
                "table": [
                    {"batch": batch, "tokens": length, "bytes": batch * length * per_token}
                    for batch in sorted({*BATCHES, self.batch})
                    for length in lengths
                ],
            },
            "memory": memory,
            "training": training,
            "quantized": list(stored),
            "kept": {name: why for name, why in reasons.items() if name not in stored},
            "notes": notes,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def _memory(
        self, config: PretrainedConfig, weights: int, per_token: int, tokens: int, device: str
    ) -> dict[str, Any]:
        """Bytes of serving by what they are for. On a CPU Python and its libraries are of the
        overhead.
        """
        given = None if self.memory is None else parse_size(self.memory)
        hidden, intermediate, vocabulary = widths(config)
        parts = {
            "weights": weights,
            "kv_cache": self.batch * tokens * per_token,
            "activations": tokens * token_bytes(hidden, intermediate)
            + self.batch * vocabulary * LOGIT,
            "overhead": max(
                PROCESS if device == "cpu" else 0, 0 if given is None else int(OVERHEAD * given)
            ),
        }
        total = sum(parts.values())
        return {
            "given": given,
            **parts,
            "total": total,
            "fits": None if given is None else total <= given,
            "batch": self.batch,
            "tokens": tokens,
        }

    def _say(
        self,
        before: dict[str, int],
        after: dict[str, int],
        parameters: int,
        by_kind: dict[str, int],
        memory: dict[str, Any],
    ) -> None:
        logger.info(
            f"  weights {said_size(before['total'])} to {said_size(after['total'])} "
            f"({8 * after['total'] / parameters:.2f} bits a weight): "
            f"{said_size(memory['total'])} for {memory['batch']} x {memory['tokens']} tokens"
        )
        sizes = ", ".join(f"{kind} {size / 1e3:.1f} kB" for kind, size in by_kind.items())
        logger.info(f"  KV cache a token, by serve.kv_cache: {sizes}")


def _mixed(
    run: Run,
    config: PretrainedConfig,
    offer: choices.Offer,
    sizes: dict[str, int],
    dtype: torch.dtype,
) -> tuple[dict[str, int], list[str]]:
    """Bytes of each linear that the stage allocate will choose a format for, at the mean of the
    budget, and what is to be said of it. Raises UserError where the budget cannot be kept to.
    """
    trust = run.config.model.trust_remote_code
    elements = choices.elements_stored(config, skeleton(config, dtype, trust), sizes)
    groups, itemsize = offer.groups, dtype.itemsize
    each = choices.room(str(run.config.budget), groups, elements, itemsize=itemsize) / sum(
        group.weights for group in groups
    )
    shapes = linear_shapes(config, trust)
    stored = {n: int(each * math.prod(shapes[n])) for group in groups for n in group.names}
    note = (
        f"mixed precision by the stage allocate: {8 * each:.2f} bits a weight in the mean of "
        f"{words.several(len(stored), 'linear')}"
    )
    return stored, [note, *offer.notes]


def _student(
    config: PretrainedConfig,
    sizes: dict[str, int],
    shapes: dict[str, tuple[int, int]],
    quantized: list[str],
    spec: QuantSpec,
) -> Student:
    text = config.get_text_config()
    hidden, intermediate, vocabulary = widths(config)
    head = head_dim(text)
    return Student(
        tensors=sizes,
        linears=shapes,
        quantized=quantized,
        spec=spec,
        blocks=text.num_hidden_layers,
        hidden=hidden,
        intermediate=intermediate,
        attention=text.num_attention_heads * head,
        vocabulary=vocabulary,
    )


def _training(run: Run, student: Student) -> dict[str, dict[str, int]]:
    """What distill takes in each way of learning, by its own settings, over one process."""
    settings = run.config.distill
    step = Step(
        windows=settings.batch,
        length=settings.length,
        recompute=settings.recompute,
        precision=settings.precision,
        rank=settings.rank,
        optimizer=settings.optimizer,
    )
    found = {way: training_bytes(student, step, way) for way in WAYS}
    sizes = ", ".join(f"{way} {said_size(parts['total'])}" for way, parts in found.items())
    logger.info(f"  distill in one process, by what learns (train={settings.train}): {sizes}")
    return found


def _window(config: PretrainedConfig, run: Run) -> int:
    """The tokens that the model will hold, once it is extended where the run extends it."""
    factor = run.config.extend.factor if "extend" in run.config.stages else 1
    return round(factor * window_of(config.get_text_config()))


def _left_out(folder: Path, empty: PreTrainedModel) -> list[str]:
    """What is to be said of stored tensors that the model has no place for."""
    names = {stored_name(empty.config, name) for name in empty.state_dict()}
    odd = [name for name in TensorFiles(folder) if name not in names]
    if not odd:
        return []
    count = words.several(len(odd), "tensor")
    return [f"{count} that the model of config.json has no place for, left out: {odd[0]}, ..."]


def _of_the_student(parameters: int, whole: int) -> str:
    counts = f"{words.many(parameters)} of {words.many(whole)} parameters"
    return f"planned for what the stage shrink leaves: {counts}".replace(words.SPACE, " ")


def _does_not_fit(memory: dict[str, Any], per_token: int) -> str:
    room = memory["given"] - memory["total"] + memory["kv_cache"]
    most = max(0, room // (per_token * memory["batch"]))
    way_out = f"at this batch {most} tokens fit: plan.tokens={most}" if most else "take fewer bits"
    sizes = ("total", "weights", "kv_cache", "activations", "overhead", "given")
    total, weights, cache, activations, overhead, given = (
        said_size(memory[name]) for name in sizes
    )
    return (
        f"plan: {total} needed (weights {weights}, KV cache {cache} for "
        f"{memory['batch']} x {memory['tokens']} tokens, activations {activations}, "
        f"overhead {overhead}), {given} given; {way_out}"
    )
