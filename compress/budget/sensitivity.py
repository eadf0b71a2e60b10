"""What each layer costs the whole model in each format, alone: KL(original || variant).

A variant is the original with some linears of one block in another format. Its KL is taken to
second order. Let tokens be drawn from the original's own predictions, and g [N] be the gradient of
their log-probabilities at the output of a linear. Then E[g g^T] is the Fisher information there,
and a change d [N] of the output costs a KL of E[(g d)^2] / 2. Errors of rounding hardly depend on
each other from channel to channel and from token to token, so the sum of (g_i d_i)^2 stands for
it, as in BRECQ (Li et al. 2021, arXiv:2102.05426, section 3.3). docs/log.md has how near that is.

Three passes read the model's blocks from disk, one at a time: forward and backward (`Gradients`),
and forward again with all the calibration windows, for the Hessians that GPTQ rounds by, and what
the variants of each block cost. So the time does not grow with the square of the number of blocks,
as it does where every variant has to pass all that follow it. On disk are 2 B T H float32 values
for B blocks and windows of T tokens in all, and the calibration windows. Killed at any moment, it
goes on from the last block.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.algorithms.blockwise import clip_of, smooth_block, weight_of
from compress.algorithms.gptq import Factor, gptq
from compress.algorithms.rtn import rtn
from compress.artifact import write_json
from compress.blocks.collector import load_block_statistics
from compress.blocks.hessians import Hessians, factored
from compress.blocks.hidden import FLOAT32, HiddenStates
from compress.blocks.structure import feeds
from compress.budget.gradients import Gradients, Passage, blocks
from compress.clock import Clock
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.text.windows import Windows
from compress.training.trainable import ScaleLinear

CALIBRATION = "calibration"


@dataclass(frozen=True)
class Variant:
    """Some linears of a block, by their names in it, in another format. They read one tensor."""

    names: tuple[str, ...]
    spec: QuantSpec


@dataclass(frozen=True)
class Sensitivity:
    """KL of variants of `model` on `windows`.

    variants: those of each block. calibration: the windows that GPTQ's Hessians are of.
    statistics: of the blocks' linears, for smoothing and clips. dtype: of scales. work: where
    hidden states are kept. batch: windows that pass a block together. rounding: nearest, or gptq.
    smooth, clip: as in `stages.quantize.Quantize`; smoothing is for the first variant of each
    linear. seed: of the tokens drawn.
    """

    model: BlockModel
    windows: Windows
    calibration: Windows
    variants: Sequence[Sequence[Variant]]
    statistics: Path
    dtype: torch.dtype
    work: Path
    batch: int
    rounding: str
    smooth: bool
    clip: bool
    seed: int
    clock: Clock

    @property
    def disk(self) -> int:
        """Bytes of hidden states that are kept."""
        channels = self.model.config.get_text_config().hidden_size
        kept = (2 * len(self.model) + 1) * self.windows.ids.numel()
        moving = 2 * self.calibration.ids.numel() if self.rounding == "gptq" else 0
        return FLOAT32 * channels * (kept + moving)

    @torch.no_grad()
    def measure(self) -> list[list[float]]:
        """The KL of every variant, in nats a token, mean over the tokens that are no padding.

        Raises UserError where a Hessian cannot be factored.
        """
        states = HiddenStates(self.work)
        passage = Passage(self.model, states, self.windows, self.batch)
        gradients = Gradients(passage, self.seed)
        with self.clock.part("gradients"):
            gradients.make()
        calibration = None
        files = [self.work / f"kl_{index:03d}.json" for index in range(len(self.model))]
        first = sum(file.exists() for file in files)
        if self.rounding == "gptq":
            calibration = Passage(self.model, states, self.calibration, self.batch)
            calibration.begin(CALIBRATION)
            first = min(first, states.done(CALIBRATION))
        for index in blocks(range(first, len(self.model)), "formats", len(self.model)):
            with self.model.block(index) as block:
                write_json(files[index], self._costs(block, index, gradients, calibration))
            if calibration is not None:
                states.commit(CALIBRATION)
        return [json.loads(file.read_text()) for file in files]

    def _costs(
        self, block: nn.Module, index: int, gradients: Gradients, calibration: Passage | None
    ) -> list[float]:
        """The KL of the variants of a block."""
        prefix = f"{self.model.block_name(index)}."
        found = load_block_statistics(self.statistics, index)
        statistics = {n.removeprefix(prefix): t.to(self.model.device) for n, t in found.items()}
        divided: dict[str, Tensor] = {}
        if self.smooth:
            with self.clock.part("smoothing"):
                divided = self._smoothed(block, index, statistics)
        factors: dict[str, Factor] = {}
        if calibration is not None:
            with self.clock.part("Hessians"):
                factors = self._factors(block, index, calibration)
        with self.clock.part("rounding"):
            served = self._served(block, index, statistics, divided, factors)
        names = dict.fromkeys(name for modules in served for name in modules)
        sums = torch.zeros(len(served), dtype=torch.float64)
        with self.clock.part("costs"), _seen(block, names) as seen:
            for _ in gradients.through(block, index):
                for number, modules in enumerate(served):
                    for name, module in modules.items():
                        inputs, outputs = seen[name]
                        assert outputs.grad is not None
                        change = module(inputs.detach()) - outputs.detach()
                        sums[number] += float((change * outputs.grad).square().sum())
        return (sums / 2 / self.windows.tokens).tolist()

    def _smoothed(
        self, block: nn.Module, index: int, statistics: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Smooth the block in place; what the inputs of its linears are divided by."""
        variants = reversed(self.variants[index])  # so that the first has the last word
        specs = {name: variant.spec for variant in variants for name in variant.names}
        found = feeds(self.model.config, block)
        return smooth_block(block, found, statistics, specs, self.dtype)[0]

    def _factors(self, block: nn.Module, index: int, calibration: Passage) -> dict[str, Factor]:
        """What GPTQ rounds by, of what the first linear of each group reads in the calibration
        windows, which pass the block.
        """
        names = dict.fromkeys(variant.names[0] for variant in self.variants[index])
        with Hessians(block, names) as hessians:
            for rows, hidden, call in calibration.batches(CALIBRATION, index):
                hessians.start(self.calibration.mask[rows].to(hidden.device))
                calibration.states.write(CALIBRATION, rows, block(hidden, **call))
        factors: dict[str, Factor] = {}
        for readers, hessian in hessians.means():  # whose memory its factor takes over
            found = factored(f"{readers[0]} of block {index}", hessian, "allocate")
            factors |= dict.fromkeys(readers, found)
        return factors

    def _served(
        self,
        block: nn.Module,
        index: int,
        statistics: Mapping[str, Tensor],
        divided: Mapping[str, Tensor],
        factors: Mapping[str, Factor],
    ) -> list[dict[str, ScaleLinear]]:
        """The linears of every variant, rounded: by GPTQ where there are factors."""
        served = []
        for variant in self.variants[index]:
            modules = {}
            for name in variant.names:
                weight, spec = weight_of(block, name), variant.spec
                clip: Tensor | float = 1.0
                if self.clip:
                    rows = statistics[f"{name}.rows"]
                    clip = clip_of(weight, rows, divided.get(name), spec, self.dtype)
                found = factors.get(variant.names[0])
                if found is None:
                    rounded = rtn(weight, spec, self.dtype, clip)
                else:
                    rounded = gptq(weight, found, spec, self.dtype, clip)
                bias = block.get_submodule(name).bias
                modules[name] = ScaleLinear(rounded, bias if isinstance(bias, Tensor) else None)
            served.append(modules)
        return served


@contextmanager
def _seen(block: nn.Module, names: Iterable[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """What the linears `names` of the block read and give in its last call, by their names; after
    a backward pass what they give has its gradient.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def see(name: str, inputs: Tensor, given: Tensor) -> None:
        if given.requires_grad:
            given.retain_grad()
        seen[name] = inputs, given

    hooks = [
        block.get_submodule(name).register_forward_hook(
            lambda _, args, given, name=name: see(name, args[0], given)
        )
        for name in names
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
