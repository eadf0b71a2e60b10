"""A Hugging Face folder as a sequence of decoder blocks, read from disk one at a time.

Peak memory is one block with its workspace, however large the model: the skeleton lives on the
meta device, and a block's tensors are read from safetensors when it is its turn.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from compress.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of = {name: file for file in self.files(folder) for name in _names(file)}
        index = folder / INDEX
        if index.exists():
            wanted = json.loads(index.read_text())["weight_map"]
            for name in wanted.keys() - self.file_of.keys():
                raise UserError(
                    f"{folder}: {INDEX} lists {name} in {wanted[name]}, which does not hold it; "
                    "the download is incomplete"
                )

    @staticmethod
    def files(folder: Path) -> list[Path]:
        """The safetensors files that make up the model."""
        index = folder / INDEX
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [folder / name for name in names]
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        raise UserError(f"{folder}: no {SINGLE} and no {INDEX}; wanted weights in safetensors")

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor, from the headers alone."""
        found = {}
        for path in sorted(set(self.file_of.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    part = file.get_slice(name)
                    found[name] = tuple(part.get_shape()), DTYPES[part.get_dtype()]
        return found


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def _names(file: Path) -> list[str]:
    if not file.exists():
        raise UserError(f"{file}: missing; the folder's index names it, download it again")
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        size = file.stat().st_size
        raise UserError(
            f"{file}: damaged or cut short at {size} bytes ({error}); fetch it again"
        ) from error


class _Frame(nn.Module):
    """Stands in a block's place: notes how it was called, and passes on what it is told to."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # Some models choose a block's mask by this attribute.
        self.attention_type = getattr(block, "attention_type", None)
        self.call: dict[str, Any] = {}
        self.hidden = torch.empty(0)
        self.instead: Tensor | None = None

    def forward(self, hidden: Tensor, **call: Any) -> Tensor:
        self.call = call
        self.hidden = hidden
        return hidden if self.instead is None else self.instead


class BlockModel:
    """A causal language model whose blocks come and go.

    What lies outside the blocks (embedding, last norm, head) stays in memory; a block's weights
    are there inside `with model.block(i)` alone. dtype is that of the arithmetic: tensors are cast
    as they are read. Raises UserError for a weight that is missing or not finite.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        trust_remote_code: bool = False,
    ) -> None:
        self.folder = folder
        self.device = device
        self.dtype = dtype
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self.tensors = TensorFiles(folder)
        self.skeleton = skeleton(self.config, dtype, trust_remote_code)
        self.prefix, blocks = find_blocks(self.skeleton)
        self.blocks = list(blocks)
        inside = f"{self.prefix}."
        outside = {
            name: parameter
            for name, parameter in self.skeleton.named_parameters()
            if not name.startswith(inside)
        }
        self._fill(self.skeleton, "", outside)
        self.skeleton.tie_weights()
        for name, buffer in self.skeleton.named_buffers():
            set_module_tensor_to_device(self.skeleton, name, device, value=buffer)
        self._frames = [_Frame(block) for block in self.blocks]
        self._unpadded: tuple[torch.Size, list[dict[str, Any]]] | None = None
        parent, _, name = self.prefix.rpartition(".")
        setattr(self.skeleton.get_submodule(parent), name, nn.ModuleList(self._frames))

    def __len__(self) -> int:
        return len(self.blocks)

    def block_name(self, index: int) -> str:
        """The block's name in the checkpoint, `model.layers.3`."""
        return f"{self.prefix}.{index}"

    def block_linears(self, index: int) -> dict[str, nn.Linear]:
        """The block's linear layers by their full names."""
        return {
            f"{self.block_name(index)}.{name}": module
            for name, module in self.blocks[index].named_modules()
            if isinstance(module, nn.Linear)
        }

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The block with its weights in memory; they are let go at the end."""
        block = self.blocks[index]
        parameters = dict(block.named_parameters())
        self._fill(block, f"{self.block_name(index)}.", parameters)
        try:
            yield block
        finally:
            for name in parameters:  # not the buffers, which are in no file
                set_module_tensor_to_device(block, name, "meta")

    def outside_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What lies outside the blocks, as stored, read one by one; a tied head is left out."""
        tied = tied_names(self.skeleton)
        for name in self.tensors:
            if not name.startswith(f"{self.prefix}.") and name not in tied:
                yield name, self.tensors[name]

    def embed(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the first block gets for `ids` [B, T]: hidden states [B, T, H]."""
        self._frame(ids, mask)
        return self._frames[0].hidden

    def calls(self, ids: Tensor, mask: Tensor | None = None) -> list[dict[str, Any]]:
        """Each block's other arguments (masks, rotary tables) for `ids` [B, T], mask [B, T].

        Made again when needed, since masks of many batches would not fit in memory; without
        padding they depend on the shape alone, and the last ones are kept.
        """
        if mask is not None and not bool(mask.all()):
            self._frame(ids, mask)
            return [frame.call for frame in self._frames]
        if self._unpadded is None or self._unpadded[0] != ids.shape:
            self._frame(ids, None)
            self._unpadded = ids.shape, [frame.call for frame in self._frames]
        return self._unpadded[1]

    def _frame(self, ids: Tensor, mask: Tensor | None) -> None:
        """Run what lies before and between the blocks, with frames in their place."""
        full = mask is None or bool(mask.all())
        # Without a mask attention takes its fast causal path.
        self.skeleton.base_model(ids, attention_mask=None if full else mask, use_cache=False)

    def logits(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Logits [B, T, V] from what the last block gave, by the model's own last norm and head."""
        last = self._frames[-1]
        last.instead = hidden
        try:
            return self.skeleton(ids, use_cache=False).logits
        finally:
            last.instead = None

    def _fill(self, module: nn.Module, prefix: str, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            full = prefix + name
            if full not in self.tensors:
                if full in tied_names(self.skeleton):
                    continue
                raise UserError(f"{self.folder}: no tensor {full}; the checkpoint is incomplete")
            value = self.tensors[full]
            if value.shape != parameter.shape:
                raise UserError(
                    f"{self.folder}: {full} has shape {list(value.shape)}, "
                    f"wanted {list(parameter.shape)} by config.json"
                )
            if not torch.isfinite(value).all():
                raise UserError(
                    f"{self.folder}: {full} holds NaN or Inf; wanted finite weights: "
                    "fetch the model again or repair that layer"
                )
            set_module_tensor_to_device(module, name, self.device, value=value, dtype=self.dtype)


def skeleton(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with no weights: parameters on the meta device, buffers computed."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model.eval().requires_grad_(False)


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks and its name, `model.layers`."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UserError(
        f"{type(model).__name__}: no list of {count} decoder blocks in it; wanted a decoder-only "
        "model such as Llama, Mistral or Qwen"
    )


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of the weights that are another's, and so are stored once: a tied head."""
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return set()
    return {f"{name}.weight" for name, module in model.named_modules() if module is head}


def storage_dtype(config: PretrainedConfig, wanted: str) -> torch.dtype:
    """The dtype of what stays in 16 bit: as stored, and bfloat16 for a model stored in float32."""
    if wanted != "auto":
        return getattr(torch, wanted)
    stored = config.dtype or torch.bfloat16
    return torch.bfloat16 if stored == torch.float32 else stored


def linear_shapes(
    config: PretrainedConfig, trust_remote_code: bool = False
) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of every linear inside the blocks, by its full name."""
    prefix, blocks = find_blocks(skeleton(config, torch.bfloat16, trust_remote_code))
    return {
        f"{prefix}.{name}": (module.out_features, module.in_features)
        for name, module in blocks.named_modules()
        if isinstance(module, nn.Linear)
    }
