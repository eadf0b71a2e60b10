"""W8A8 in fewer launches: the norm before an MLP hands it INT8, and gate and up are one product.

    x [..., K]  ->  RMSNorm, quantized  ->  gate and up  ->  SwiGLU, quantized  ->  down

By count of the operations, not traced on a GPU, these are four launches where the modules take
sixteen and write what lies between in 16 bit: eight for the norm, two for SwiGLU, one to quantize
and one to multiply for each of the linears. What is put in place of norm and MLP
holds the checkpoint's tensors under the checkpoint's names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.runtime.linear import QuantLinear

Product = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""int8 [M, K] and their scales [M, 1] to [M, N] of a dtype."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Of transformers: RMSNorm before attention and before a gated MLP, which alone reads the second
norm's output; full RoPE."""
HOMES = [f"transformers.models.{name}.modeling_{name}" for name in FAMILIES]


class Int8Rows(NamedTuple):
    """An activation [..., K] of `dtype` as int8 [M, K] and float32 scales [M, 1]."""

    ints: Tensor
    scales: Tensor
    leading: torch.Size
    dtype: torch.dtype


class Int8Norm(nn.Module):
    """RMSNorm, [..., K] to Int8Rows."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Int8Rows:
        from compress.kernels.quantize import triton as quantize

        call = quantize.rmsnorm_op if torch.compiler.is_compiling() else quantize.rmsnorm
        ints, scales = call(x.reshape(-1, x.shape[-1]), self.weight, self.eps)
        return Int8Rows(ints, scales, x.shape[:-1], x.dtype)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), Int8Rows to [..., N].

    `gate_proj` and `up_proj` keep their weights, from now on as the halves of one matrix [2I, K].
    """

    def __init__(
        self, gate_proj: QuantLinear, up_proj: QuantLinear, down_proj: QuantLinear
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self._products: tuple[Product, Product] | None = None

    def prepare(self) -> None:
        """Join gate and up, and bind the weights to their kernels."""
        from compress.kernels.w8a8 import triton

        halves, down = (self.gate_proj, self.up_proj), self.down_proj
        biases: list[Tensor] = [half.bias for half in halves if half.bias is not None]
        self._products = (
            triton.prepare_product(
                _joined("weight", *halves),
                _joined("weight_scale", *halves),
                torch.cat(biases) if biases else None,
            ),
            triton.prepare_product(
                down.get_buffer("weight"), down.get_buffer("weight_scale"), down.bias
            ),
        )
        for half in halves:
            half.prepare("triton", half.get_buffer("weight_scale").dtype)

    def forward(self, x: Int8Rows) -> Tensor:
        from compress.kernels.quantize import triton as quantize

        if self._products is None:
            self.prepare()
        assert self._products is not None
        gate_up, down = self._products
        swiglu = quantize.swiglu_op if torch.compiler.is_compiling() else quantize.swiglu
        ints, scales = swiglu(*gate_up(x.ints, x.scales, x.dtype).chunk(2, -1))
        return down(ints, scales, x.dtype).reshape(*x.leading, -1)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._products = None
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GatedMlp":
        # What is bound are the tensors from before a move, as in QuantLinear.
        self._products = None
        return super()._apply(fn, recurse)


def _joined(name: str, first: QuantLinear, second: QuantLinear) -> Tensor:
    """Both tensors `name` [I, …] as one [2I, …], of which each linear holds its half."""
    both = torch.cat([first.get_buffer(name), second.get_buffer(name)])
    for linear, half in zip((first, second), both.chunk(2), strict=True):
        linear.register_buffer(name, half)
    return both


def fuse(model: PreTrainedModel) -> int:
    """Put the fused modules into every block of `model` that they fit; returns how many.

    One pair of gate and up is copied at a time.
    """
    if getattr(model.config, "hidden_act", None) != "silu":
        return 0
    blocks = [block for block in model.modules() if _fits(block)]
    for block in blocks:
        norm, mlp = block.post_attention_layernorm, block.mlp
        block.post_attention_layernorm = Int8Norm(norm.weight, norm.variance_epsilon)
        block.mlp = GatedMlp(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        block.mlp.prepare()
    return len(blocks)


def _fits(block: nn.Module) -> bool:
    """Whether `block` is one of FAMILIES, with an MLP that is W8A8 throughout."""
    if type(block).__module__ not in HOMES or not hasattr(block, "post_attention_layernorm"):
        return False
    linears = [getattr(block.mlp, f"{name}_proj") for name in ("gate", "up", "down")]
    return all(isinstance(m, QuantLinear) and m.spec.activation_bits is not None for m in linears)
