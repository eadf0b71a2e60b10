"""A device that is not there: tensors that say `cuda:0`, calculated on the CPU and counted.

Inside `Device()` what is made on or moved to `cuda:0` is `Far`; what would fail on a GPU, an
operator on tensors of both devices, raises here too. `Device.peak` is the most bytes that lived
there. Not seen: what kernels take inside an operator, the allocator's fragments, and gradients.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
FAR = torch.device("cuda:0")
# Operators that take tensors of both devices on a GPU too; INDEXES if what is indexed is there.
MOVES = {aten.copy_.default, aten._to_copy.default}
INDEXES = {aten.index.Tensor, aten.index_put_.default}


class Far(torch.Tensor):
    """A tensor on the far device; `near` is where its values are.

    PyTorch's own code takes it for one on the meta device, the only one that asks for no driver.
    """

    near: Tensor
    device = property(lambda self: FAR)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, near: Tensor) -> "Far":
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device="meta",
        )
        found.near = near
        return found

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Device.current.apply(op, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if op is scaled_dot_product_attention:  # on a meta device it is many operators
                return Device.current.at_once(op, args, kwargs or {})
            if op is Tensor.to and torch.device("meta") in _devices(args[1:]):
                return args[0].near.to("meta")  # where PyTorch takes it to be already
            return op(*args, **(kwargs or {}))

    def item(self) -> Any:
        return self.near.item()

    def tolist(self) -> Any:
        return self.near.tolist()

    def __float__(self) -> float:
        return float(self.near)

    def __bool__(self) -> bool:
        return bool(self.near)

    def __int__(self) -> int:
        return int(self.near)

    def __getitem__(self, index: Any) -> Tensor:
        return Device.current.at_once(Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        near = tree_map(_near, (index, value))
        self.near[near[0]] = near[1]


class Device(TorchDispatchMode):
    """The far device, while it is entered. peak: bytes."""

    current: "Device"

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._living: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> "Device":
        Device.current = self
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.apply(op, args, kwargs or {})

    def at_once(self, op: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """One call on tensors of this device, and what it gives."""
        near_args, near_kwargs = tree_map(_near, (args, kwargs))
        return self._far(op(*near_args, **near_kwargs))

    def apply(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator of PyTorch on tensors here and there."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        far = [t for t in tensors if isinstance(t, Far)]
        near = [t for t in tensors if t.dim() and not isinstance(t, Far)]
        if far and near and not (op in MOVES or (op in INDEXES and isinstance(args[0], Far))):
            raise RuntimeError(f"{op} of {[*far[0].shape]} on cuda and {[*near[0].shape]} on cpu")
        goes = isinstance(args[0], Far) if op is aten.copy_.default else bool(far)
        if kwargs.get("device") is not None:
            kind = torch.device(kwargs["device"]).type
            # PyTorch makes scalars where it believes that its tensors are.
            goes = kind == "cuda" or (kind == "meta" and op is aten.scalar_tensor.default)
            kwargs = kwargs | ({"device": torch.device("cpu")} if goes else {})
        if op is aten._to_copy.default and far and goes and _only_moves(kwargs, far[0].dtype):
            return far[0]  # it is there already, which PyTorch does not believe
        before = {id(t.near): t for t in far}
        near_args, near_kwargs = tree_map(_near, (args, kwargs))

        def placed(value: Any) -> Any:
            return before[id(value)] if id(value) in before else self._far(value)

        given = op(*near_args, **near_kwargs)
        return tree_map(placed, given) if goes else given

    def _far(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._living:
            self.now += size
            self.peak = max(self.peak, self.now)

            def gone(_: object) -> None:
                self.now -= size
                del self._living[key]

            self._living[key] = weakref.ref(storage, gone)
        return Far(value)


def _near(value: Any) -> Any:
    return value.near if isinstance(value, Far) else value


def _devices(values: Any) -> list[torch.device]:
    return [torch.device(value) for value in values if isinstance(value, str | torch.device)]


def _only_moves(kwargs: Mapping[str, Any], dtype: torch.dtype) -> bool:
    given = {name for name, value in kwargs.items() if value is not None}
    return given <= {"device", "dtype", "non_blocking"} and kwargs.get("dtype") in (None, dtype)
