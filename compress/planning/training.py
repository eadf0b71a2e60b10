"""Bytes that the stage distill takes while the quantized model learns, by what learns.

docs/planning.md has the formulas and what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compress.planning.memory import part_of
from compress.qtensor import QuantSpec
from compress.training.long_window import CHUNK
from compress.training.trainable import ATTENTION_INPUTS

FLOAT = 4
HALF = 2
PROCESS = 450_000_000
"""Bytes of Python with torch and transformers, before anything is loaded (Linux, CPU)."""
MOMENT = {"adamw": FLOAT, "adamw_8bit": 1 + FLOAT / 256}
"""Bytes of a moment for each value, by the optimizer."""
LOGIT_COPIES = 4
"""Of a position's logits: as the head gives them, in the softmax, and the gradients of both."""


@dataclass(frozen=True)
class Student:
    """A quantized model by its sizes.

    tensors: values of each tensor in 16 bit by name, a tied head left out; linears: (N, K) of those
    in the blocks; quantized: names of those that are. attention: width of Q. The rest as in its
    configuration.
    """

    tensors: Mapping[str, int]
    linears: Mapping[str, tuple[int, int]]
    quantized: Sequence[str]
    spec: QuantSpec
    blocks: int
    hidden: int
    intermediate: int
    attention: int
    vocabulary: int

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(N, K) of the quantized linears."""
        return [self.linears[name] for name in self.quantized]

    @property
    def weights(self) -> int:
        """How many weights are integers."""
        return sum(n * k for n, k in self.sizes)


@dataclass(frozen=True)
class Step:
    """windows of `length` tokens go through the model at once; see Distill for the rest."""

    windows: int
    length: int
    recompute: bool
    precision: str
    rank: int
    optimizer: str = "adamw"


def training_bytes(student: Student, step: Step, way: str) -> dict[str, int]:
    """Bytes by what they are for, and their `total`, while a way of `trainable.WAYS` learns in one
    process.
    """
    learned = _learned(student) + _more(student, step, way)
    passing = student.weights // (student.blocks if step.recompute else 1)
    largest = max((n * k for n, k in student.sizes), default=0)
    low = HALF if step.precision == "bfloat16" else 0
    parts = {
        "process": PROCESS,
        "integers": 0 if way == "latent" else student.weights,
        "frozen": FLOAT * (sum(student.tensors.values()) - student.weights - _in_16_bit(student)),
        "learned": FLOAT * learned,
        "gradients": FLOAT * learned,
        "optimizer": round(2 * MOMENT[step.optimizer] * learned),
        "best step": HALF * learned,
        # Kept for the way back: the integers as float, and times their scales; and the gradient of
        # one weight, before and after it is summed into its scales'.
        "dequantized": (2 * FLOAT + low) * passing + 2 * FLOAT * largest,
        "activations": _activations(student, step),
    }
    # While it is measured the exact values stand beside the rounded ones, in the gradients' place.
    return {**parts, "total": sum(parts.values())}


def _in_16_bit(student: Student) -> int:
    """Values of norms, Q, K, and V in 16 bit."""
    return sum(
        count
        for name, count in student.tensors.items()
        if part_of(name) == "norms" or _is_input(name.rpartition(".")[0], student)
    )


def _is_input(linear: str, student: Student) -> bool:
    return linear.rpartition(".")[2] in ATTENTION_INPUTS and linear not in student.quantized


def _learned(student: Student) -> int:
    """Values that learn whatever the way: scales, and what is in 16 bit."""
    scales = sum(n * student.spec.groups(k) for n, k in student.sizes)
    return scales + _in_16_bit(student)


def _more(student: Student, step: Step, way: str) -> int:
    """Values that learn in this way alone."""
    adapters = sum(step.rank * (n + k) for n, k in student.sizes)
    return {"scales": 0, "latent": student.weights, "adapters": adapters}[way]


def _activations(student: Student, step: Step) -> int:
    """What goes into each block; what a block's way back needs: norms and residuals, Q, K, V and
    what attention gives, gate, up, SiLU and product; and logits.
    """
    tokens = step.windows * step.length
    inside = 6 * student.hidden + 5 * student.attention + 4 * student.intermediate
    blocks = 1 if step.recompute else student.blocks
    positions = step.windows * (min(CHUNK, step.length) if step.recompute else step.length)
    values = (
        tokens * (student.blocks * student.hidden + blocks * inside)
        + LOGIT_COPIES * positions * student.vocabulary
    )
    return FLOAT * values
