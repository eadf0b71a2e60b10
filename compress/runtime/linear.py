"""A quantized linear as a module: a checkpoint's tensors, and a kernel bound to them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compress import checkpoint
from compress.kernels import w8a8, wna16
from compress.kernels.backend import pick_backend
from compress.kernels.wna16.planar import from_planar, to_planar
from compress.qtensor import QTensor, QuantSpec


class QuantLinear(nn.Module):
    """Stands in for `nn.Linear(in_features, out_features)`: [..., K] to [..., N].

    Its buffers carry the names and shapes of the checkpoint: `weight` and `weight_scale` for W8A8;
    `weight_packed`, `weight_scale` and `weight_shape` for W8A16 and W4A16. For Triton's kernels
    `weight_packed` is put in another order when it is bound, while `state_dict` has the
    checkpoint's; the CPU's keep theirs beside it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        spec: QuantSpec,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.spec = in_features, out_features, spec
        for name, tensor in _empty(in_features, out_features, spec, dtype, device).items():
            self.register_buffer(name, tensor)
        self.bias: nn.Parameter | None = None
        if bias:
            empty = torch.empty(out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)
        self._kernel: Callable[[Tensor], Tensor] | None = None
        self._backend: str | None = None
        self._planar = False

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., K] to [..., N], in the dtype of `x`."""
        if self._kernel is None:
            self._kernel = self._bind(x.dtype)
        return self._kernel(x)

    def prepare(self, backend: str | None, dtype: torch.dtype) -> None:
        """Bind the tensors to a kernel for inputs of `dtype`; backend None: the device's own.

        Raises UserError where that backend cannot run on the tensors' device.
        """
        self._backend = backend
        self._kernel = self._bind(dtype)

    @property
    def kernel(self) -> Callable[[Tensor], Tensor] | None:
        """What the tensors are bound to; None before `prepare` or the first forward."""
        return self._kernel

    def forget(self) -> None:
        """Let go of the tensors, and of the kernel and the order that it put them in: others, as a
        checkpoint holds them, will take their places.
        """
        self.to("meta")
        if self._planar:
            empty = _empty(self.in_features, self.out_features, self.spec, torch.float32, "meta")
            self.register_buffer("weight_packed", empty["weight_packed"])
            self._planar = False

    def qtensor(self) -> QTensor:
        """The weight as integers [N, K] and scales [N, G]."""
        tensors = {f".{n}": t for n, t in self.named_buffers()}
        if self._planar:
            tensors[".weight_packed"] = self._from_planar(tensors[".weight_packed"])
        return checkpoint.unpack("", tensors, self.spec)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.spec.scheme}"

    def _bind(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        buffers = dict(self.named_buffers())
        scale = buffers["weight_scale"]
        backend = pick_backend(scale.device, self._backend)
        if self.spec.activation_bits is not None:
            return w8a8.prepare(buffers["weight"], scale, self.bias, backend)
        return wna16.prepare(
            self._words(planar=backend == "triton"),
            scale,
            self.bias,
            spec=self.spec,
            in_features=self.in_features,
            backend=backend,
            dtype=dtype,
        )

    def _words(self, *, planar: bool) -> Tensor:
        """`weight_packed`, put in the order that the kernel wants: a second copy is not kept."""
        words = self.get_buffer("weight_packed")
        if planar != self._planar:
            words = self._to_planar(words) if planar else self._from_planar(words)
            self.register_buffer("weight_packed", words)
            self._planar = planar
        return words

    def _to_planar(self, words: Tensor) -> Tensor:
        return to_planar(words, self.spec.bits, self.spec.group_size)

    def _from_planar(self, words: Tensor) -> Tensor:
        return from_planar(words, self.spec.bits, self.spec.group_size, self.in_features)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._planar:
            name = f"{prefix}weight_packed"
            destination[name] = self._from_planar(destination[name])

    def _load_from_state_dict(self, *arguments: Any) -> None:
        # What comes is in the checkpoint's order, and a kernel may hold sums of what was there.
        if self._planar:
            self._words(planar=False)
        self._kernel = None
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The kernel holds the tensors from before a move: bind it again at the next forward.
        self._kernel = None
        return super()._apply(fn, recurse)


def _empty(
    k: int, n: int, spec: QuantSpec, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Tensor]:
    """The checkpoint's tensors for a weight [n, k], unfilled."""
    scale = torch.empty((n, spec.groups(k)), dtype=dtype, device=device)
    if spec.activation_bits is not None:
        weight = torch.empty((n, k), dtype=torch.int8, device=device)
        return {"weight": weight, "weight_scale": scale}
    words = -(-k * spec.bits // 32)
    return {
        "weight_packed": torch.empty((n, words), dtype=torch.int32, device=device),
        "weight_scale": scale,
        "weight_shape": torch.empty(2, dtype=torch.int64, device=device),
    }
