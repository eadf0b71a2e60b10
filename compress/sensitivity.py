"""What each layer costs the whole model in each format, alone: KL(original || variant).

A variant is the original with some linears of one block in another format. Its KL is taken to
second order. Let tokens be drawn from the original's own predictions, and g [N] be the gradient of
their log-probabilities at the output of a linear. Then E[g g^T] is the Fisher information there,
and a change d [N] of the output costs a KL of E[(g d)^2] / 2. Errors of rounding hardly depend on
each other from channel to channel and from token to token, so the sum of (g_i d_i)^2 stands for
it, as in BRECQ (Li et al. 2021, arXiv:2102.05426, section 3.3). docs/log.md has how near that is.

Three passes read the model's blocks from disk, one at a time: forward, keeping what goes into each;
backward, keeping the gradients of what comes out; and forward again, with all the calibration
windows, for the Hessians that GPTQ rounds by, and what the variants of each block cost. So the
time does not grow with the square of the number of blocks, as it does where every variant has to
pass all that follow it. On disk are 2 B T H float32 values for B blocks and windows of T tokens in
all, and the calibration windows. Killed at any moment, it goes on from the last block.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.algorithms.blockwise import clip_of, smooth_block, weight_of
from compress.algorithms.gptq import Factor, factor, gptq
from compress.algorithms.rtn import rtn
from compress.artifact import write_json
from compress.clock import Clock
from compress.collector import load_block_statistics
from compress.errors import UserError
from compress.hidden import FLOAT32, HiddenStates, together
from compress.log import progress
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.structure import feeds
from compress.trainable import ScaleLinear

CALIBRATION = "calibration"
LOGITS = 1 << 26
"""Logits that are drawn from at a time: 268 MB in float32, of which a few copies are held. The head
is read from disk once for each such part."""


@dataclass(frozen=True)
class Variant:
    """Some linears of a block, by their names in it, in another format. They read one tensor."""

    names: tuple[str, ...]
    spec: QuantSpec


@dataclass(frozen=True)
class Windows:
    """Token ids and mask [n, T], padded on the right."""

    ids: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Sensitivity:
    """KL of variants of `model` on `windows`.

    variants: those of each block. calibration: the windows that GPTQ's Hessians are of.
    statistics: of the blocks' linears, for smoothing and clips. dtype: of scales. work: where
    hidden states are kept. batch: windows that pass a block together. rounding: nearest, or gptq;
    clips are searched in both. smooth: as in `stages.quantize.Quantize`, for the first variant of
    each linear. seed: of the tokens drawn.
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
        with self.clock.part("forward"):
            self._forward(states)
        with self.clock.part("backward"):
            self._backward(states)
        self._costs(states)
        files = map(self._file, range(len(self.model)))
        return [json.loads(file.read_text()) for file in files]

    def _forward(self, states: HiddenStates) -> None:
        """Keep what goes into each block, and what the last gives."""
        if _inputs(0) not in states:
            states.create(_inputs(0), self._embedded(self.windows))
        done = sum(_inputs(index + 1) in states for index in range(len(self.model)))
        for index in self._blocks(range(done, len(self.model)), "forward"):
            with self.model.block(index) as block:
                given = (
                    block(hidden, **call)
                    for _, hidden, call in self._batches(states, _inputs(index), index)
                )
                states.create(_inputs(index + 1), given)

    def _backward(self, states: HiddenStates) -> None:
        """Keep the gradients of what goes into each block but the first, and of the last output."""
        blocks = len(self.model)
        if _gradients(blocks) not in states:
            last = states.batches(_inputs(blocks), 1)
            states.create(_gradients(blocks), (self._drawn(rows, hidden) for rows, hidden in last))
        done = sum(_gradients(index) in states for index in range(1, blocks))
        for index in self._blocks(range(blocks - 1 - done, 0, -1), "backward"):
            with self.model.block(index) as block:
                states.create(_gradients(index), self._through(states, block, index))

    def _drawn(self, rows: slice, hidden: Tensor) -> Tensor:
        """The gradients [1, T, H], at what the last block gives for a window, of the
        log-probabilities of tokens drawn from the model's predictions; 0 for padding.
        """
        real, device = int(self.windows.mask[rows].sum()), self.model.device
        generator = torch.Generator(device).manual_seed(self.seed + rows.start)
        step = max(1, LOGITS // self.model.config.get_text_config().vocab_size)
        found = torch.zeros_like(hidden)
        for first in range(0, real, step):
            part = slice(first, min(first + step, real))
            leaf = hidden[:, part].to(device).requires_grad_()
            with torch.enable_grad():
                logprobs = self.model.logits(leaf)[0].float().log_softmax(-1)
                drawn = torch.multinomial(logprobs.detach().exp(), 1, generator=generator)
                logprobs.gather(1, drawn).sum().backward()
            assert leaf.grad is not None
            found[:, part] = leaf.grad.cpu()
        return found

    def _through(self, states: HiddenStates, block: nn.Module, index: int) -> Iterator[Tensor]:
        """Pass the block there and back, a batch at a time; gives the gradients of what goes in."""
        for rows, hidden, call in self._batches(states, _inputs(index), index):
            leaf = hidden.requires_grad_()
            with torch.enable_grad():
                given = block(leaf, **call)
            given.backward(states.read(_gradients(index + 1), rows).to(given.device))
            assert leaf.grad is not None
            yield leaf.grad

    def _costs(self, states: HiddenStates) -> None:
        """Keep the KL of the variants of each block."""
        by_hessian = self.rounding == "gptq"
        if by_hessian and CALIBRATION not in states:
            states.create(CALIBRATION, self._embedded(self.calibration))
        done = sum(self._file(index).exists() for index in range(len(self.model)))
        first = min(done, states.done(CALIBRATION)) if by_hessian else done
        for index in self._blocks(range(first, len(self.model)), "formats"):
            prefix = f"{self.model.block_name(index)}."
            statistics = load_block_statistics(self.statistics, index).items()
            local = {n.removeprefix(prefix): t.to(self.model.device) for n, t in statistics}
            with self.model.block(index) as block:
                with self.clock.part("smoothing"):
                    divided = self._smoothed(block, index, local)
                hessians = self._hessians(states, block, index) if by_hessian else {}
                with self.clock.part("rounding"):
                    served = self._served(block, index, local, divided, hessians)
                with self.clock.part("costs"):
                    found = self._cost_of(states, block, index, served)
            write_json(self._file(index), found)
            if by_hessian:
                states.commit(CALIBRATION)

    def _smoothed(
        self, block: nn.Module, index: int, local: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if not self.smooth:
            return {}
        variants = reversed(self.variants[index])  # so that the first has the last word
        specs = {name: variant.spec for variant in variants for name in variant.names}
        found = feeds(self.model.config, block)
        return smooth_block(block, found, local, specs, self.dtype)[0]

    def _hessians(self, states: HiddenStates, block: nn.Module, index: int) -> dict[str, Tensor]:
        """X^T X [K, K], a token's mean, of what the first linear of each group reads in the
        calibration windows, which pass the block.
        """
        names = dict.fromkeys(variant.names[0] for variant in self.variants[index])
        sums: dict[str, Tensor] = {}
        with self.clock.part("Hessians"), _seen(block, names) as seen:
            for rows, hidden, call in self._batches(states, CALIBRATION, index):
                states.write(CALIBRATION, rows, block(hidden, **call))
                real = self.calibration.mask[rows].bool().to(hidden.device)
                for name, (inputs, _) in seen.items():
                    x = inputs[real].float()
                    if name not in sums:
                        sums[name] = x.new_zeros(x.shape[1], x.shape[1])
                    sums[name].addmm_(x.T, x)
        tokens = int(self.calibration.mask.sum())
        return {name: total.div_(tokens) for name, total in sums.items()}

    def _served(
        self,
        block: nn.Module,
        index: int,
        statistics: Mapping[str, Tensor],
        divided: Mapping[str, Tensor],
        hessians: dict[str, Tensor],
    ) -> list[dict[str, ScaleLinear]]:
        """The linears of every variant, rounded; `hessians` is used up."""
        factors = {name: _factor(name, index, hessians.pop(name)) for name in list(hessians)}
        served = []
        for variant in self.variants[index]:
            modules = {}
            for name in variant.names:
                weight, spec = weight_of(block, name), variant.spec
                rows = statistics[f"{name}.rows"]
                clip = clip_of(weight, rows, divided.get(name), spec, self.dtype)
                if self.rounding == "gptq":
                    rounded = gptq(weight, factors[variant.names[0]], spec, self.dtype, clip)
                else:
                    rounded = rtn(weight, spec, self.dtype, clip)
                bias = block.get_submodule(name).bias
                modules[name] = ScaleLinear(rounded, bias if isinstance(bias, Tensor) else None)
            served.append(modules)
        return served

    def _cost_of(
        self,
        states: HiddenStates,
        block: nn.Module,
        index: int,
        served: Sequence[Mapping[str, ScaleLinear]],
    ) -> list[float]:
        """The KL of the variants of a block."""
        names = dict.fromkeys(name for modules in served for name in modules)
        sums = torch.zeros(len(served), dtype=torch.float64)
        with _seen(block, names) as seen:
            for _ in self._through(states, block, index):
                for number, modules in enumerate(served):
                    for name, module in modules.items():
                        inputs, outputs = seen[name]
                        assert outputs.grad is not None
                        change = module(inputs.detach()) - outputs.detach()
                        sums[number] += float((change * outputs.grad).square().sum())
        return (sums / 2 / int(self.windows.mask.sum())).tolist()

    def _batches(
        self, states: HiddenStates, name: str, index: int
    ) -> Iterator[tuple[slice, Tensor, Mapping[str, object]]]:
        """A stream a batch at a time: rows, hidden states, and the block's other arguments."""
        windows = self.calibration if name == CALIBRATION else self.windows
        device = self.model.device
        for rows, hidden in states.batches(name, together(self.batch, windows.ids.shape[1])):
            ids, mask = windows.ids[rows].to(device), windows.mask[rows].to(device)
            yield rows, hidden.to(device), self.model.calls(ids, mask)[index]

    def _embedded(self, windows: Windows) -> Iterator[Tensor]:
        device = self.model.device
        for ids, mask in zip(
            windows.ids.split(self.batch), windows.mask.split(self.batch), strict=True
        ):
            yield self.model.embed(ids.to(device), mask.to(device))

    def _blocks(self, numbers: range, what: str) -> Iterator[int]:
        total = len(self.model)
        done = total - len(numbers)
        return progress(numbers, f"allocate, {what}", "block", total=total, done=done)

    def _file(self, index: int) -> Path:
        return self.work / f"kl_{index:03d}.json"


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


def _factor(name: str, index: int, hessian: Tensor) -> Factor:
    try:
        return factor(hessian)
    except ValueError as error:
        raise UserError(
            f"{name} of block {index}: {error}; allocate.rounding=nearest does without"
        ) from error


def _inputs(index: int) -> str:
    """The stream of what goes into a block."""
    return f"inputs{index:03d}"


def _gradients(index: int) -> str:
    """The stream of the gradients of what goes into a block."""
    return f"gradients{index:03d}"
