"""A model folder, dense or quantized, as a transformers model that runs through our kernels."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from compress.blocks.structure import model_name
from compress.errors import UserError
from compress.kernels.backend import pick_backend
from compress.kernels.native import build
from compress.machine import keep_heap
from compress.quantization_config import read_quantization_config
from compress.runtime import attention, dense
from compress.runtime.configs import first_line, generation_config, model_config
from compress.runtime.fused import fuse
from compress.runtime.linear import QuantLinear
from compress.runtime.pages import Pages
from compress.tensors import TensorFiles
from compress.text.tokenizer import BROKEN

# Old Llama checkpoints store these frequencies; they follow from the configuration.
FOLLOWS_FROM_CONFIG = "rotary_emb.inv_freq"
_PATCHING = threading.Lock()


def load(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    trust_remote_code: bool = False,
    fused: bool = True,
) -> PreTrainedModel:
    """Load `folder` in eval mode; its quantized linears are `QuantLinear`.

    dtype: of weights and activations in 16 or 32 bit; None as stored, but float16 on CPU runs as
    bfloat16 (float16 matrix products are many times slower there). Scales keep the dtype they are
    stored in. On CPU attention is that of compress.runtime.attention, and the process keeps what it
    frees (`machine.keep_heap`). trust_remote_code: run the Python that lies in the folder, where
    config.json asks for it. fused: on Triton, run W8A8 blocks
    as in compress.runtime.fused; False where linears are to be exchanged. `save_pretrained` and
    `state_dict` give the checkpoint's layout, whatever order a kernel keeps. Peak memory is the
    model and one tensor, or where fused one block's gate and up. Raises UserError for a folder that
    is no causal language model, a damaged file, and a tensor that is missing, doubled, of the wrong
    shape or, beside quantized linears, unknown; for a backend that cannot run on `device`.
    """
    backend = pick_backend(device, backend)
    generation = generation_config(folder)
    skeleton = build_empty(folder, device, dtype, trust_remote_code)
    names = _fill(skeleton, folder, device)
    _check_complete(skeleton, names, folder)
    with _PATCHING:  # or the tied weight would be on meta while another thread builds
        skeleton.tie_weights()
    # What was real from the start: buffers that follow from the configuration.
    skeleton.to(device)
    make_ready(skeleton, backend, fused=fused)
    if generation is not None:
        skeleton.generation_config = generation
    return skeleton.eval().requires_grad_(False)


def check(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raise UserError where `load` would, as far as configurations and headers tell: no weight is
    read, so that what two tied tensors or damaged values hold is left to it.
    """
    generation_config(folder)
    skeleton = build_empty(folder, "cpu", None, trust_remote_code)
    slots = _Slots(skeleton, folder)
    for stored, (shape, dtype) in TensorFiles(folder).shapes().items():
        slots.take(model_name(skeleton.config, stored), shape, dtype)
    _check_complete(skeleton, slots.found, folder)


def make_ready(model: PreTrainedModel, backend: str, *, fused: bool) -> None:
    """Bind what `model` holds to the kernels of `backend`, its blocks fused as `load` says."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.prepare(backend, model.dtype)
    if fused and backend == "triton":
        with _PATCHING:
            fuse(model)
    attention.install(model)
    if model.device.type == "cpu":
        keep_heap()
        if build.has_amx():
            dense.use(model)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and model.device.type == "cpu":
        head.register_forward_pre_hook(_in_one_piece)


def _in_one_piece(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """The head's input without the strides of the prompt that it is cut from.

    With them torch's CPU product copies the whole weight: 136 ms in place of 12 for the last of 128
    tokens of SmolLM2 in bfloat16 (one thread), most of its time to first token.
    """
    return (inputs[0].clone(memory_format=torch.contiguous_format),)


def load_with_tokenizer(
    folder: Path, *, device: str, backend: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, as from `load`, and its tokenizer, which is read first: it takes no time.

    Raises UserError where `load` does, and for a folder without a config or a tokenizer.
    """
    if not (folder / "config.json").exists():
        found = "is a file" if folder.is_file() else "no config.json there"
        raise UserError(f"{folder}: {found}; wanted a checkpoint's folder")
    model_config(folder, trust_remote_code)  # or a broken one would pass for a broken tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except BROKEN as error:
        raise UserError(
            f"{folder}: no tokenizer that loads ({first_line(error)}); copy the files of the "
            "original model's there"
        ) from error
    model = load(folder, device=device, backend=backend, trust_remote_code=trust_remote_code)
    return model, tokenizer


@contextmanager
def without_weights() -> Iterator[None]:
    """Models built here have their parameters on the meta device, in one thread at a time:
    accelerate patches torch's modules for all threads, two at once would leave them patched, and a
    parameter that another thread registers meanwhile goes to meta too. Buffers stay real: rotary
    frequencies are computed when a module is built, and not stored.
    """
    with _PATCHING, init_empty_weights(include_buffers=False):
        yield


def build_empty(
    folder: Path, device: str, dtype: torch.dtype | None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model's modules, parameters on the meta device, quantized linears put in place."""
    config = model_config(folder, trust_remote_code)
    try:
        quantization = take_quantization(config)
        dtype = dtype or config.dtype or torch.float32
        if dtype == torch.float16 and torch.device(device).type == "cpu":
            dtype = torch.bfloat16
        with without_weights():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{folder}: not a causal language model that loads: {first_line(error)}"
        ) from error
    if quantization is not None:
        swap_linears(model, quantization)
        # Again, so that a model that is saved is one that loads.
        model.config.quantization_config = quantization
    return model


def take_quantization(config: PretrainedConfig) -> dict[str, Any] | None:
    """The `quantization_config` of a model, None where it has none; it is taken out of `config`,
    or transformers would look for its own quantizer in what it builds from that.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    del config.quantization_config
    return quantization if isinstance(quantization, dict) else quantization.to_dict()


def swap_linears(model: PreTrainedModel, quantization: Mapping[str, Any]) -> None:
    """Put an empty QuantLinear in the place of every linear that is quantized."""
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    for name, spec in read_quantization_config(quantization, linears).items():
        module = model.get_submodule(name)
        try:
            linear = QuantLinear(
                module.in_features,
                module.out_features,
                spec,
                bias=module.bias is not None,
                dtype=model.dtype,
                device="meta",
            )
        except ValueError as error:
            raise UserError(f"{name}: {error}; the checkpoint does not fit its config") from error
        model.set_submodule(name, linear)


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors files by name, one at a time, as views of the file.

    Raises UserError for a file that is missing, damaged or cut short.
    """
    for path in TensorFiles.files(folder):
        if not path.exists():
            raise UserError(f"{path}: missing; the folder's index names it, get it again")
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
            for name in names:
                # Opened for each: what is read of a mapped file stays resident until it closes.
                with safe_open(path, framework="pt") as file:
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            size = path.stat().st_size
            raise UserError(
                f"{path}: damaged or cut short at {size} bytes ({error}); get it again"
            ) from error


class _Slots:
    """The places of a model's tensors, by name, and which of them are `found` in files."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.folder = folder
        self.found: set[str] = set()
        self._wanted = model.state_dict()
        self._tied = model.all_tied_weights_keys
        self._quantized = any(isinstance(module, QuantLinear) for module in model.modules())

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The empty tensor that the stored one fills; None for one that is another's, or no part
        of the model. Raises UserError where it cannot be there, or not be so.
        """
        folder = self.folder
        if name in self.found:
            raise UserError(f"{folder}: {name} is stored twice; every tensor must be there once")
        self.found.add(name)
        if name.endswith(FOLLOWS_FROM_CONFIG):
            return None
        if name not in self._wanted and not self._quantized:
            return None  # as transformers does: old GPT-NeoX files hold masks
        if name not in self._wanted:
            raise UserError(
                f"{folder}: {name} is stored, but the model of config.json has no such tensor; "
                "wanted one that fits the weights: its sizes, and full names in the ignore of "
                "quantization_config"
            )
        if name in self._tied:
            return None
        target = self._wanted[name]
        if tuple(shape) != tuple(target.shape):
            raise UserError(
                f"{folder}: {name} has shape {tuple(shape)}; wanted {tuple(target.shape)}"
            )
        if dtype.is_floating_point != target.is_floating_point():
            lost = "" if self._quantized else ", or the quantization_config that config.json lacks"
            raise UserError(f"{folder}: {name} is {dtype}; wanted {target.dtype}{lost}")
        return target


def _fill(model: PreTrainedModel, folder: Path, device: str) -> set[str]:
    """Put the stored tensors into the model; returns the names found."""
    slots, tied = _Slots(model, folder), model.all_tied_weights_keys
    on_cpu, pages = torch.device(device).type == "cpu", Pages()
    for stored, tensor in stored_tensors(folder):
        name = model_name(model.config, stored)
        target = slots.take(name, tensor.shape, tensor.dtype)
        if target is None:
            if name in tied:
                _check_tied(tied[name], name, tensor, folder)
            continue
        dtype = tensor.dtype if name.endswith(".weight_scale") else target.dtype
        # A copy, so that the file can be closed.
        if on_cpu:
            assign(model, name, pages.place(tensor, dtype))
        else:
            assign(model, name, tensor.to(device=device, dtype=dtype, copy=True))
    return slots.found


def _check_tied(source: str, name: str, tensor: Tensor, folder: Path) -> None:
    """A tied tensor that is stored beside its source must be the same; the source is loaded."""
    try:
        same = torch.equal(TensorFiles(folder)[source], tensor)
    except KeyError:
        return
    if not same:
        raise UserError(
            f"{folder}: {name} differs from {source}, but config.json ties them; set "
            "tie_word_embeddings to false there, or leave one out"
        )


def assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` the parameter or buffer `name` of the module, whatever stood there."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def _check_complete(model: PreTrainedModel, found: set[str], folder: Path) -> None:
    tied = model.all_tied_weights_keys
    missing = [name for name in model.state_dict() if name not in found and name not in tied]
    if missing:
        more = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserError(
            f"{folder}: {missing[0]} is missing from the safetensors files{more}; wanted every "
            "tensor of the model in config.json once"
        )
