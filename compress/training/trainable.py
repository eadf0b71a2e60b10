"""A quantized model that learns: scales and 16-bit parameters, and the integers if asked for.

Frozen integers need no gradient and no optimizer state, and RoPE acts on what is in 16 bit, so the
checkpoint needs no second quantization after training. Integers that learn are latent weights in
float32, or the integers with adapters of low rank added, rounded going forward, and stored as what
they round to.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress import checkpoint
from compress.engines import FUSED_QKV, QUERY_KEY, VALUE
from compress.kernels.w8a8.reference import quantize_per_token
from compress.qtensor import QTensor, QuantSpec
from compress.runtime.linear import QuantLinear
from compress.runtime.loader import load

if TYPE_CHECKING:
    from compress.config import Config

WAYS = ("scales", "latent", "adapters")
"""What can learn in it; see `train` of the stage distill."""
ROTATED = (*QUERY_KEY, *FUSED_QKV)
"""What RoPE acts on, with V where it is in one matrix with Q and K."""
ATTENTION_INPUTS = (*ROTATED, *VALUE)
ADAPTER = ("adapter_up", "adapter_down")


class ScaleLinear(nn.Module):
    """A linear of frozen integers whose scales [N, G] are learned.

    The scales are float32; what they are rounded to when stored is what the linear computes with.
    """

    def __init__(self, weight: QTensor, bias: Tensor | None) -> None:
        super().__init__()
        self.spec, self.stored = weight.spec, weight.scales.dtype
        # A parameter, though it never learns, so that FSDP cuts it too.
        self.ints = nn.Parameter(weight.ints, requires_grad=False)
        self.weight_scale = nn.Parameter(weight.scales.float())
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return _linear(x, self.ints, _rounded(self.weight_scale, self.stored), self.bias, self.spec)


class LatentLinear(nn.Module):
    """A linear whose integers are learned too: `latent` [N, K], in steps of the grid, is rounded
    going forward. Scales as in ScaleLinear.
    """

    def __init__(self, weight: QTensor, bias: Tensor | None) -> None:
        super().__init__()
        self.spec, self.stored = weight.spec, weight.scales.dtype
        self.latent = nn.Parameter(weight.ints.float())
        self.weight_scale = nn.Parameter(weight.scales.float())
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        ints = straight_through(self.latent, to_integers(self.latent.detach(), self.spec))
        return _linear(x, ints, _rounded(self.weight_scale, self.stored), self.bias, self.spec)


@dataclass(frozen=True)
class Adapters:
    """rank: of what is added to a weight; alpha / rank: by what it is multiplied."""

    rank: int
    alpha: float


class AdapterLinear(nn.Module):
    """A linear whose integers are moved by what `adapter_up` [N, r] and `adapter_down` [r, K] make
    in steps of the grid: added to them, and the sum rounded going forward, so that what is learned
    survives the rounding (Bondarenko et al. 2024, arXiv:2406.06385). Scales as in ScaleLinear.

    rounded: whether it is; else the linear computes with the sum as it is.
    """

    def __init__(self, weight: QTensor, bias: Tensor | None, adapters: Adapters) -> None:
        super().__init__()
        self.spec, self.stored = weight.spec, weight.scales.dtype
        self.factor, self.rounded = adapters.alpha / adapters.rank, True
        self.ints = nn.Parameter(weight.ints, requires_grad=False)
        self.weight_scale = nn.Parameter(weight.scales.float())
        n, k = weight.ints.shape
        generator = torch.Generator().manual_seed(0)
        down = torch.randn((adapters.rank, k), generator=generator).to(weight.ints.device)
        self.adapter_down = nn.Parameter(down)
        self.adapter_up = nn.Parameter(down.new_zeros((n, adapters.rank)))
        self.bias: Tensor | None
        self.register_buffer("bias", bias)

    def moved(self, up: Tensor, down: Tensor) -> Tensor:
        """The integers [N, K] with these adapters added, before rounding."""
        return self.ints + self.factor * (up @ down)

    def forward(self, x: Tensor) -> Tensor:
        ints = self.moved(self.adapter_up, self.adapter_down)
        if self.rounded:
            ints = straight_through(ints, to_integers(ints.detach(), self.spec))
        return _linear(x, ints, _rounded(self.weight_scale, self.stored), self.bias, self.spec)


KINDS = (ScaleLinear, LatentLinear, AdapterLinear)


@contextmanager
def unrounded(model: PreTrainedModel) -> Iterator[None]:
    """The model as its adapters would have it, if they were not rounded with the integers."""
    linears = [module for module in model.modules() if isinstance(module, AdapterLinear)]
    for linear in linears:
        linear.rounded = False
    try:
        yield
    finally:
        for linear in linears:
            linear.rounded = True


def to_integers(latent: Tensor, spec: QuantSpec) -> Tensor:
    """What latent weights in steps of the grid stand for, in their own dtype."""
    return latent.round().clamp(spec.qmin, spec.qmax)


def _rounded(scales: Tensor, stored: torch.dtype) -> Tensor:
    return straight_through(scales, scales.detach().to(stored).to(scales.dtype))


def _linear(
    x: Tensor, ints: Tensor, scales: Tensor, bias: Tensor | None, spec: QuantSpec
) -> Tensor:
    n, k = ints.shape
    grouped = ints.view(n, scales.shape[1], -1).to(x.dtype)
    weight = (grouped * scales.to(x.dtype).unsqueeze(-1)).view(n, k)
    if spec.activation_bits is not None:
        x = straight_through_int8(x)
    return nn.functional.linear(x, weight, bias)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, instead: Tensor) -> Tensor:
        return instead.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def straight_through(x: Tensor, instead: Tensor) -> Tensor:
    """`instead` going forward, and its gradient as that of `x` going back (Bengio et al. 2013,
    arXiv:1308.3432).
    """
    return _StraightThrough.apply(x, instead)


def straight_through_int8(x: Tensor) -> Tensor:
    """Each token [..., K] rounded to INT8, by the very arithmetic of the kernels' reference."""
    ints, scale = quantize_per_token(x.detach())
    return straight_through(x, (ints * scale).to(x.dtype))


def load_exact(folder: Path, config: "Config", *, device: str | None = None) -> PreTrainedModel:
    """The model in `folder` in float32, for training and for measuring it, on the run's device
    unless another is given.
    """
    return load(
        folder,
        device=device or config.device,
        dtype=torch.float32,
        trust_remote_code=config.model.trust_remote_code,
        fused=False,
    )


def make_trainable(
    model: PreTrainedModel, *, latent: bool = False, adapters: Adapters | None = None
) -> PreTrainedModel:
    """Swap every QuantLinear of `model`, in place, for one of the same weight that learns."""

    def swapped(module: QuantLinear) -> nn.Module:
        if adapters is not None:
            return AdapterLinear(module.qtensor(), module.bias, adapters)
        return (LatentLinear if latent else ScaleLinear)(module.qtensor(), module.bias)

    for name, module in list(model.named_modules()):
        if isinstance(module, QuantLinear):
            model.set_submodule(name, swapped(module))
    return model.requires_grad_(False)


def scales(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The scales of the quantized linears, by their names in the checkpoint."""
    return {
        f"{name}.weight_scale": module.weight_scale
        for name, module in model.named_modules()
        if isinstance(module, KINDS)
    }


def fewest_bits(model: PreTrainedModel) -> int:
    """Of its quantized linears; 8 where there are none."""
    return min((m.spec.bits for m in model.modules() if isinstance(m, KINDS)), default=8)


def latents(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The latent weights by the names of their linears, with `.latent`; none unless asked for."""
    return {
        f"{name}.latent": module.latent
        for name, module in model.named_modules()
        if isinstance(module, LatentLinear)
    }


def adapters_of(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The adapters by the names of their linears, with `.adapter_up` and `.adapter_down`."""
    return {
        f"{name}.{part}": getattr(module, part)
        for name, module in model.named_modules()
        if isinstance(module, AdapterLinear)
        for part in ADAPTER
    }


def as_stored(model: PreTrainedModel, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was learned, by name, as the checkpoint's tensors: latent weights, and integers with
    their adapters, become integers.
    """
    found: dict[str, Tensor] = {}
    for name, value in learned.items():
        linear, _, part = name.rpartition(".")
        if part not in ("latent", *ADAPTER):
            found[name] = value
        elif part != ADAPTER[1]:  # which goes with the other
            module = cast(LatentLinear | AdapterLinear, model.get_submodule(linear))
            if isinstance(module, AdapterLinear):
                value = module.moved(value.float(), learned[f"{linear}.{ADAPTER[1]}"].float())
            ints = to_integers(value, module.spec).to(torch.int8)
            weight = QTensor(ints, learned[f"{linear}.weight_scale"], module.spec)
            found |= checkpoint.pack(linear, weight)
    return found


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm, by the name of its class."""
    return type(module).__name__.endswith("Norm")


def norms_and(inputs: tuple[str, ...], model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The norms and the linears called one of `inputs` that are in 16 bit, by parameter name."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        is_input = isinstance(module, nn.Linear) and name.rpartition(".")[2] in inputs
        if is_norm(module) or is_input:
            found |= {f"{name}.{n}": p for n, p in module.named_parameters(recurse=False)}
    return found
