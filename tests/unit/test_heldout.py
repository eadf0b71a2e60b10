"""The distance of a folder, a block at a time, is that of the same model in memory."""

import json
from pathlib import Path

import pytest
import torch
from families import family_config, random_model, save
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress import checkpoint, heldout
from compress.algorithms.rtn import rtn
from compress.blocks import head
from compress.model import BlockModel
from compress.qtensor import QuantSpec
from compress.quantization_config import quantization_config
from compress.runtime.linear import QuantLinear
from compress.runtime.loader import load
from compress.tensors import write_stream

SPECS = {  # by the last part of a linear's name; the others stay in 16 bit
    "o_proj": QuantSpec(8, activation_bits=8),
    "gate_proj": QuantSpec(4, 32),
    "up_proj": QuantSpec(4, 32),
    "down_proj": QuantSpec(8),
}
WINDOWS = torch.randint(3, 259, (3, 24), generator=torch.Generator().manual_seed(3))


def mixed(family: str, folder: Path) -> dict[str, QuantSpec]:
    """Write a random model of mixed precision; how each quantized linear is."""
    whole = random_model(family_config(family))
    linears = [name for name, m in whole.named_modules() if isinstance(m, nn.Linear)]
    save(whole, folder)
    specs = {n: SPECS[n.rpartition(".")[2]] for n in linears if n.rpartition(".")[2] in SPECS}
    tensors = load_file(folder / "model.safetensors")
    for name, spec in specs.items():
        weight = tensors.pop(f"{name}.weight")
        tensors |= checkpoint.pack(name, rtn(weight, spec, torch.bfloat16))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    ignore = [name for name in linears if name not in specs]
    config["quantization_config"] = quantization_config(specs, ignore)
    (folder / "config.json").write_text(json.dumps(config))
    return specs


def statistics(folder: Path, vocabulary: int) -> Path:
    """Log-probabilities of no model at all; the last window has padding."""
    folder.mkdir()
    mask = torch.ones_like(WINDOWS)
    mask[2, 15:] = 0
    logits = torch.randn(*WINDOWS.shape, vocabulary, generator=torch.Generator().manual_seed(4))
    heldout.save(folder, WINDOWS, mask, logits.log_softmax(-1))
    return folder


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite"])
def test_folder_and_memory_agree_to_the_bit(family: str, tmp_path: Path) -> None:
    mixed(family, tmp_path / "model")
    whole = load(tmp_path / "model", dtype=torch.float32)
    kept = statistics(tmp_path / "statistics", whole.config.vocab_size)
    found = heldout.distance(tmp_path / "model", kept)
    assert found == heldout.distance_of(whole, kept)
    assert found.kl > 0.5


def test_chunks_of_everything_change_nothing_but_the_last_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed("gemma2", tmp_path / "model")
    kept = statistics(tmp_path / "statistics", 272)
    at_once = heldout.distance(tmp_path / "model", kept)
    monkeypatch.setattr(head, "CHUNK", 50 * 96)
    monkeypatch.setattr(heldout, "LOGITS", 272 * 7)
    monkeypatch.setattr(heldout, "HIDDEN_BYTES", 4 * 96 * 30)
    in_parts = heldout.distance(tmp_path / "model", kept)
    assert in_parts.kl == pytest.approx(at_once.kl, rel=1e-5)
    assert in_parts.ppl == pytest.approx(at_once.ppl, rel=1e-5)
    assert in_parts.top1 == at_once.top1


def test_a_block_comes_quantized_and_goes(tmp_path: Path) -> None:
    specs = mixed("llama", tmp_path)
    blocks = BlockModel(tmp_path)
    with blocks.block(1) as block:
        found = {
            f"{blocks.block_name(1)}.{name}": module.spec
            for name, module in block.named_modules()
            if isinstance(module, QuantLinear)
        }
        assert found == {n: s for n, s in specs.items() if n.startswith("model.layers.1.")}
        assert {n.rpartition(".")[2] for n in blocks.block_linears(1)} == {
            "q_proj",
            "k_proj",
            "v_proj",
        }
        block(torch.zeros(1, 4, 96), **blocks.calls(torch.zeros(1, 4, dtype=torch.int64))[1])
    for name, module in block.named_modules():
        if isinstance(module, QuantLinear):
            assert module._kernel is None, name
    assert all(tensor.is_meta for tensor in (*block.parameters(), *block.buffers()))


@pytest.mark.parametrize(("o_proj", "within"), [(QuantSpec(8), 1e-5), (SPECS["o_proj"], 0.05)])
@torch.no_grad()
def test_transformers_reads_mixed_precision_alike(
    o_proj: QuantSpec, within: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bits without INT8 activations, whose scale is absmax / 127.5 there, 127 here."""
    monkeypatch.setitem(SPECS, "o_proj", o_proj)
    mixed("llama", tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load(tmp_path, dtype=torch.float32)
    wanted, found = theirs(WINDOWS).logits, ours(WINDOWS).logits
    assert (wanted - found).norm() < within * wanted.norm()


def test_what_is_streamed_is_what_safetensors_writes(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "ids": torch.arange(6).reshape(2, 3),
        "tokens": torch.tensor([3, 2]),
        "logprobs": torch.randn(2, 3, 5).half(),
    }
    save_file(tensors, tmp_path / "theirs")
    sizes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    parts = [tensors["ids"], tensors["tokens"], *tensors["logprobs"]]
    write_stream(tmp_path / "ours", sizes, parts)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(ValueError, match="94 bytes of tensors for 124"):
        write_stream(tmp_path / "short", sizes, parts[:-1])


@torch.no_grad()
def test_a_block_that_is_read_again_is_what_the_file_holds(tmp_path: Path) -> None:
    mixed("llama", tmp_path / "model")
    model = BlockModel(tmp_path / "model")

    def weights(block: nn.Module) -> dict[str, Tensor]:
        linears = {n: m for n, m in block.named_modules() if isinstance(m, QuantLinear)}
        return {name: linear.qtensor().ints.clone() for name, linear in linears.items()}

    with model.block(1) as block:
        before = weights(block)
        packed = [m for m in block.modules() if hasattr(m, "weight_packed")]
        for linear in packed:
            linear._words(planar=True)  # as when Triton's kernels are bound
    assert len(before) == 4
    assert len(packed) == 3
    with model.block(1) as block:
        assert all(torch.equal(ints, before[name]) for name, ints in weights(block).items())
