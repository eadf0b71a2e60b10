"""A trained model writes the same tokens through the Triton kernels as through the reference.

Each format with V quantized beside Q and K in 16 bit, which our own runtime alone serves, and with
its KV cache that keeps V in 8 bit.

Run by test_triton.py, in a process of its own: in the interpreter, or on a GPU.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from compress import checkpoint
from compress.kernels.check import relative_error
from compress.kernels.tiles import regime
from compress.qtensor import QTensor, QuantSpec, quantize
from compress.quantization_config import quantization_config
from compress.runtime.fused import GatedMlp
from compress.runtime.generate import generate
from compress.runtime.loader import load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside"
NEW_TOKENS = 3
WEIGHTS = "model.safetensors"
ENGINES = ("q_proj", "k_proj", "v_proj")
NATIVE = ("q_proj", "k_proj")


def quantized(source: Path, folder: Path, spec: QuantSpec, kept: tuple[str, ...]) -> Path:
    """`source` rounded to `spec` in a folder of its own, linears named in `kept` left as they are.

    Where a group does not divide K, the linear is quantized per channel.
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    specs: dict[str, QuantSpec] = {}
    ignore, stored = ["lm_head"], {}
    for name, tensor in load_file(source / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if "_proj" not in module:
            stored[name] = tensor.bfloat16()
        elif module.endswith(kept):
            ignore.append(module)
            stored[name] = tensor.bfloat16()
        else:
            divides = spec.group_size is None or tensor.shape[1] % spec.group_size == 0
            own = spec if divides else QuantSpec(spec.bits)
            peaks = tensor.reshape(len(tensor), own.groups(tensor.shape[1]), -1).abs().amax(-1)
            scales = (peaks / own.qmax).bfloat16()
            if own.bits == 4:
                scales[::2] *= -1
            specs[module] = own
            weight = QTensor(quantize(tensor, scales, own), scales, own)
            stored |= checkpoint.pack(module, weight)
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16"}
    config["quantization_config"] = quantization_config(specs, ignore)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "spec",
    [QuantSpec(8, activation_bits=8), QuantSpec(8), QuantSpec(4, 32)],
    ids=lambda s: s.scheme,
)
def test_the_same_tokens(spec: QuantSpec, stories260k: Path, tmp_path: Path) -> None:
    folder = quantized(stories260k, tmp_path / "quantized", spec, NATIVE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert regime(len(tokenizer(PROMPT).input_ids)) == "middle"
    texts = {}
    for backend in ("triton", "reference"):
        model = load(folder, device=DEVICE, backend=backend)
        assert model.dtype == torch.bfloat16
        w8a8 = spec.activation_bits is not None
        assert isinstance(model.model.layers[0].mlp, GatedMlp) == (w8a8 and backend == "triton")
        (texts[backend],) = generate(
            model,
            tokenizer,
            [PROMPT],
            max_new_tokens=NEW_TOKENS,
            batch_size=1,
            kv_cache="v8",
        )
    assert texts["triton"] == texts["reference"]
    assert texts["triton"].strip()


@torch.inference_mode()
def test_fused_blocks_hold_the_checkpoint_and_give_the_logits_of_the_modules(
    stories260k: Path, tmp_path: Path
) -> None:
    spec = QuantSpec(8, activation_bits=8)
    folder = quantized(stories260k, tmp_path / "quantized", spec, ENGINES)
    ids = torch.arange(3, 20, device=DEVICE)[None]
    fused, modules = (load(folder, device=DEVICE, backend="triton", fused=f) for f in (True, False))
    wanted = modules(ids).logits
    # A root or a sum in another order carries a few activations over a rounding boundary.
    first = fused(ids).logits
    assert relative_error(first, wanted) < 0.01

    gate, up = fused.model.layers[1].mlp.gate_proj, fused.model.layers[1].mlp.up_proj
    assert gate.weight.untyped_storage().data_ptr() == up.weight.untyped_storage().data_ptr()
    own = {name: t for name, t in fused.state_dict().items() if name != "lm_head.weight"}
    save_file(own, tmp_path / "saved.safetensors")
    saved, stored = load_file(tmp_path / "saved.safetensors"), load_file(folder / WEIGHTS)
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], stored[name]) for name in stored)

    # Cast and back the tensors are others, which must be bound again; scales in bfloat16 survive.
    gate.weight_scale.mul_(2)
    before = fused(ids).logits
    assert relative_error(before, wanted) > 0.01
    fused.model.layers[1].mlp.float().bfloat16()
    assert torch.equal(fused(ids).logits, before)
    fused.load_state_dict(saved, strict=False)
    assert torch.equal(fused(ids).logits, first)
