"""A Hugging Face folder as a sequence of decoder blocks, read from disk one at a time.

Peak memory is one block with its workspace, however large the model: the skeleton lives on the
meta device, and a block's tensors are read from safetensors when it is its turn.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from compress import soundness, unknown
from compress.blocks.head import Head
from compress.blocks.structure import knows, stored_name
from compress.errors import UserError
from compress.machine import trim_heap
from compress.runtime.linear import QuantLinear
from compress.runtime.loader import assign, swap_linears, take_quantization, without_weights
from compress.source import UNREADABLE, reason_of
from compress.tensors import TensorFiles


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

    A block's weights are in memory inside `with model.block(i)` alone; the quantized linears of a
    compressed-tensors folder are `QuantLinear`. Of the embedding the rows that are looked up are
    read, and of the head a part at a time; the norms outside the blocks stay in memory. dtype is
    that of the arithmetic: weights are cast as they are read, scales keep theirs. Raises UserError
    for weights that `soundness` refuses, and for blocks that cannot be run one by one.
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
        quantization = take_quantization(self.config)
        self.tensors = TensorFiles(folder)
        self.skeleton = skeleton(self.config, dtype, trust_remote_code)
        if quantization is not None:
            swap_linears(self.skeleton, quantization)
        self.prefix, blocks = find_blocks(self.skeleton)
        self.blocks = list(blocks)
        if not knows(self.config):
            unknown.watch(self.config.model_type, self.blocks)
        self._names = {stored_name(self.config, name) for name in self.skeleton.state_dict()}
        self._leave_on_disk()
        inside = f"{self.prefix}."
        outside = [name for name in _empty(self.skeleton) if not name.startswith(inside)]
        self._fill(self.skeleton, "", outside)
        for name, buffer in list(self.skeleton.named_buffers()):
            if not buffer.is_meta:
                assign(self.skeleton, name, buffer.to(device))
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
        """The block's linear layers in 16 or 32 bit by their full names."""
        return {
            f"{self.block_name(index)}.{name}": module
            for name, module in self.blocks[index].named_modules()
            if isinstance(module, nn.Linear)
        }

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The block with its weights in memory; they are let go at the end."""
        block = self.blocks[index]
        names = _empty(block)
        self._fill(block, f"{self.block_name(index)}.", names)
        try:
            yield block
        finally:
            for name in names:  # not the other buffers, which are in no file
                assign(block, name, _get(block, name).to("meta"))
            for module in block.modules():
                if isinstance(module, QuantLinear):
                    module.forget()  # its kernel holds the weight too
            trim_heap()

    def outside_names(self) -> Iterator[str]:
        """Names of the tensors outside the blocks, as stored; a tied head is left out, and so is
        what the model has no place for.
        """
        tied = {stored_name(self.config, name) for name in tied_names(self.skeleton)}
        for name in self.tensors:
            if not name.startswith(f"{self.prefix}.") and name in self._names - tied:
                yield name

    def embed(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the first block gets for `ids` [B, T]: hidden states [B, T, H]."""
        known, places = ids.unique(return_inverse=True)
        self._look_up_in(self.tensors.rows(self._table, known.cpu()))
        self._frame(places, mask)
        self._look_up_in(self._nothing)
        return self._frames[0].hidden

    def embedded(self, ids: Tensor, mask: Tensor, batch: int) -> Iterator[Tensor]:
        """`embed` for windows of ids and mask [n, T] on any device, `batch` of them at a time."""
        for some, real in zip(ids.split(batch), mask.split(batch), strict=True):
            yield self.embed(some.to(self.device), real.to(self.device))

    def calls(self, ids: Tensor, mask: Tensor | None = None) -> list[dict[str, Any]]:
        """Each block's other arguments (masks, rotary tables) for `ids` [B, T], mask [B, T].

        Made again when needed, since masks of many batches would not fit in memory; without
        padding they depend on the shape alone, and the last ones are kept.
        """
        anything = torch.zeros_like(ids)
        if mask is not None and not bool(mask.all()):
            self._frame(anything, mask)
            return [frame.call for frame in self._frames]
        if self._unpadded is None or self._unpadded[0] != ids.shape:
            self._frame(anything, None)
            self._unpadded = ids.shape, [frame.call for frame in self._frames]
        return self._unpadded[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, T, V] from what the last block gave, by the model's own last norm and head."""
        last = self._frames[-1]
        last.instead = hidden
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        try:
            return self.skeleton(ids, use_cache=False).logits
        finally:
            last.instead = None

    def _frame(self, ids: Tensor, mask: Tensor | None) -> None:
        """Run what lies before and between the blocks, with frames in their place."""
        full = mask is None or bool(mask.all())
        # Without a mask attention takes its fast causal path.
        with nullcontext() if knows(self.config) else unknown.told(self.config.model_type):
            self.skeleton.base_model(ids, attention_mask=None if full else mask, use_cache=False)

    def _look_up_in(self, rows: Tensor) -> None:
        """Make `rows` [n, H] the embedding, which the model's own forward may scale."""
        self._embedding.weight = nn.Parameter(rows.to(self.device, self.dtype), requires_grad=False)

    def _leave_on_disk(self) -> None:
        """Take the embedding and the head out of what is held in memory."""
        names = {module: name for name, module in self.skeleton.named_modules()}
        self._embedding = self.skeleton.get_input_embeddings()
        self._embedding.padding_idx = None  # it would be looked for among the rows looked up
        self._table = f"{names[self._embedding]}.weight"
        soundness.check(self.tensors, self._table, self._embedding.weight)
        # One row, for where ids [B, T] are looked up and only their shape matters.
        self._nothing = torch.zeros(1, self._embedding.weight.shape[1])
        self._look_up_in(self._nothing)
        head = self.skeleton.get_output_embeddings()
        own = stored_name(self.config, f"{names[head]}.weight")
        stored = self._table if tied_names(self.skeleton) else own
        if stored != own:
            soundness.check_tied(self.tensors, stored, own)
        soundness.check(self.tensors, stored, head.weight)
        self.skeleton.set_submodule(names[head], Head(self.tensors, stored, head.bias))

    def _fill(self, module: nn.Module, prefix: str, names: Iterable[str]) -> None:
        for name in names:
            empty, full = _get(module, name), stored_name(self.config, prefix + name)
            soundness.check(self.tensors, full, empty)
            # A copy, so that the file can be closed.
            dtype = self.dtype if isinstance(empty, nn.Parameter) else None
            value = self.tensors[full].to(self.device, dtype, copy=True)
            assign(module, name, value)


def _empty(module: nn.Module) -> list[str]:
    """Names of the parameters that are still to be read, and of the buffers that files hold."""
    buffers = {name for name, _ in module.named_buffers()}
    return [n for n, tensor in module.state_dict().items() if tensor.is_meta or n in buffers]


def _get(module: nn.Module, name: str) -> Tensor:
    parent, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(parent), leaf)


def skeleton(
    config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with no weights: parameters on the meta device, buffers computed.

    Raises UserError for a configuration of which transformers can make no model.
    """
    config = copy.deepcopy(config)  # which would be told this dtype in place of the stored one
    try:
        with without_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except UNREADABLE as error:
        raise UserError(
            f"config.json: transformers can make no {config.model_type} of it ({reason_of(error)})"
        ) from error
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
    """The dtype of what stays in 16 bit: as stored, and bfloat16 for a model in 32 bit or more."""
    if wanted != "auto":
        return getattr(torch, wanted)
    return torch.float16 if config.dtype == torch.float16 else torch.bfloat16


def tensor_counts(config: PretrainedConfig, trust_remote_code: bool = False) -> dict[str, int]:
    """Weights of each tensor of such a model, by the name it is stored under."""
    model = skeleton(config, torch.bfloat16, trust_remote_code)
    tied = tied_names(model)
    return {
        stored_name(config, name): parameter.numel()
        for name, parameter in model.named_parameters()
        if name not in tied
    }


def outside_linears(model: PreTrainedModel) -> list[str]:
    """Names of the linears outside the blocks; the output layer is one of them."""
    prefix, _ = find_blocks(model)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linears if not name.startswith(f"{prefix}.")]


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
