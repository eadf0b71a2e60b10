"""Every family from a model folder to a checkpoint, against a reference made by hand.

The reference is the model in transformers, with the checkpoint's integers times their scales in
the place of its weights and, for W8A8, activations rounded on the way into each such linear.
What each family comes to, for docs/families.md:

    python -m pytest tests/pipeline/test_families.py -k agrees -rP | grep '^|'
"""

import copy
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, family_config, random_model, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import composed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import pipeline
from compress.blocks.structure import LAYOUTS
from compress.config import Config
from compress.runtime.loader import load

SCHEMES = {
    # Quantizes v_proj as well, and any size.
    "w8a8": ("quantize=w8a8", "engine=native"),
    # Every layer that groups of 32 divide: all but down_proj, where K = 176.
    "w4a16": ("quantize=w4a16", "quantize.group_size=32", "engine=transformers"),
}
WINDOWS = (
    "stages=[plan,calibrate,quantize,export]",
    "data.samples=4",
    "data.length=32",
    "calibrate.rows=32",
    "calibrate.heldout_windows=2",
    "calibrate.heldout_length=32",
)
# |y - y'| / |y| over all logits. INT8 activations make a step of the smallest difference, so
# W8A8 is exact to float32 but for the tokens where one value was rounded the other way.
AGREES = {"w8a8": 5e-3, "w4a16": 1e-5}
EXACT = 1e-5  # of the median token
# The same to the model that was quantized: what the integers cost on random weights.
COST = {"w8a8": 0.1, "w4a16": 0.4}
# Blocks like those of another family in the list, for which one scheme is enough.
LIKE_OTHERS = ("olmo3", "gpt_neox-sequential", "smollm3", "seed_oss", "exaone4", "glm4", "cohere2")
LEFT_OUT = {(family, "w4a16") for family in LIKE_OTHERS}
IDS = torch.randint(3, 259, (4, 32), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """The pipeline collects garbage after each stage: 0.4 s, were all that is imported walked."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def recipe(scheme: str) -> Config:
    return composed("recipe=tiny", "model.path=dense", *WINDOWS, *SCHEMES[scheme])


@pytest.fixture
def run(tmp_path: Path, text: Path) -> Callable[..., Path]:
    """Compress a folder in this process; gives the checkpoint's."""

    def work(dense: Path, scheme: str, shard_gb: float = 5.0) -> Path:
        config = copy.deepcopy(recipe(scheme))
        config.model.path, config.data.path = str(dense), str(text)
        config.out = str(tmp_path / "run")
        config.export.shard_gb = shard_gb
        return pipeline.run(config) / "checkpoint"

    return work


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "text.txt"
    letters = torch.randint(32, 126, (4000,), generator=torch.Generator().manual_seed(3))
    file.write_text("".join(map(chr, letters.tolist())))
    return file


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, of which no two hold the same name."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        assert not found.keys() & set(names)
        found |= load_file(file)
    return found


def by_hand(checkpoint: Path, dense: Path, folder: Path) -> tuple[PreTrainedModel, set[str]]:
    """The original's class with the weights that the checkpoint means, and the names of those
    that were quantized.
    """
    tensors = stored(checkpoint)
    names = {n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")}
    for name in names:
        scale = tensors.pop(f"{name}.weight_scale").float()
        if f"{name}.weight_packed" in tensors:
            shape = tensors.pop(f"{name}.weight_shape").tolist()
            words = tensors.pop(f"{name}.weight_packed").numpy().view(np.uint32)
            nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
            flat = nibbles.reshape(shape[0], -1)[:, : shape[1]].astype(np.int64) - 8
            ints = torch.from_numpy(flat)
        else:
            ints = tensors[f"{name}.weight"]
        each = ints.shape[1] // scale.shape[1]
        tensors[f"{name}.weight"] = ints.float() * scale.repeat_interleave(each, 1)
    folder.mkdir()
    shutil.copyfile(dense / "config.json", folder / "config.json")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model, names


def round_inputs(model: PreTrainedModel, names: set[str]) -> None:
    """Make the linears of these names read INT8, a scale a token."""

    def rounded(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = args[0].abs().amax(-1, keepdim=True) / 127
        return ((args[0] / scale).round() * scale,)

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(rounded)


def quantized_of(dense: Path, checkpoint: Path) -> set[str]:
    """Check that the checkpoint holds the original's tensors, each once, some of them as integers;
    the names of these.
    """
    before, after = stored(dense), stored(checkpoint)
    packed = {n.rpartition(".")[0] for n in after if n.endswith(".weight_scale")}
    plain = {n for n in after if n.rpartition(".")[0] not in packed or n.endswith(".bias")}
    assert plain | {f"{name}.weight" for name in packed} == set(before)
    assert all(after[n].shape == before[n].shape for n in plain)
    assert all(after[n].dtype == torch.bfloat16 for n in plain)
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert not packed & set(config["ignore"])
    return packed


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("family", "scheme"),
    [(f, s) for f in FAMILIES for s in SCHEMES if (f, s) not in LEFT_OUT],
)
@torch.no_grad()
def test_a_family_is_compressed_reloads_and_agrees(
    family: str, scheme: str, run: Callable[..., Path], tmp_path: Path
) -> None:
    dense = tmp_path / "dense"
    save(random_model(family_config(family)), dense)
    checkpoint = run(dense, scheme)

    names = quantized_of(dense, checkpoint)
    reference, quantized = by_hand(checkpoint, dense, tmp_path / "by-hand")
    assert quantized == names
    if scheme == "w8a8":
        round_inputs(reference, names)
    served = load(checkpoint, dtype=torch.float32)(IDS).logits
    wanted = reference(IDS).logits
    error = distance(served, wanted)
    by_token = (served - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    original = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)(IDS).logits
    cost = distance(served, original)

    metrics = json.loads((tmp_path / "run" / "stages" / "quantize.json").read_text())["metrics"]
    smoothed = {kind(x["name"]) for x in metrics["layers"] if x["smooth"] is not None}
    kinds = [", ".join(sorted(part)) or "–" for part in ({*map(kind, names)}, smoothed)]
    figures = f"{error:.0e} | {by_token.median():.0e} | {cost:.3f}"
    print(f"| {family} | {scheme} | {' | '.join(kinds)} | {figures} |")
    assert error < AGREES[scheme]
    assert by_token.median() < EXACT
    assert cost < COST[scheme]
    if scheme == "w4a16":  # transformers rounds activations on another grid
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        assert distance(theirs(IDS).logits, served) < AGREES[scheme]


def test_the_page_names_the_families_that_are_known_and_tried() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    table = page.split("| Remarks |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [kind.strip() for row in rows for kind in row.split(",")]
    assert sorted(named) == sorted(LAYOUTS)
    assert {kind for kind, _ in FAMILIES.values()} == set(LAYOUTS)


def kind(name: str) -> str:
    return name.rpartition(".")[2]


@pytest.mark.parametrize("family", ["qwen2", "gpt_neox"])
@torch.no_grad()
def test_shards_in_and_shards_out(family: str, run: Callable[..., Path], tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    save(random_model(family_config(family)), dense, max_shard_size="60KB")
    assert len(list(dense.glob("model-*-of-*.safetensors"))) > 3
    checkpoint = run(dense, "w4a16", shard_gb=6e-5)
    assert len(list(checkpoint.glob("model-*-of-*.safetensors"))) > 3
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored(checkpoint).keys()
    quantized_of(dense, checkpoint)
    reference, _ = by_hand(checkpoint, dense, tmp_path / "by-hand")
    served = load(checkpoint, dtype=torch.float32)(IDS).logits
    assert distance(served, reference(IDS).logits) < AGREES["w4a16"]


def test_a_renamed_head_is_ignored_by_both_its_names(
    run: Callable[..., Path], tmp_path: Path
) -> None:
    save(random_model(family_config("gpt_neox")), tmp_path / "dense")
    checkpoint = run(tmp_path / "dense", "w8a8")
    ignore = json.loads((checkpoint / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignore[-2:] == ["lm_head", "embed_out"]
    assert "embed_out.weight" in stored(checkpoint)
    assert "lm_head.weight" not in stored(checkpoint)


@torch.no_grad()
def test_what_the_model_has_no_place_for_is_left_out_and_told(
    run: Callable[..., Path], tmp_path: Path
) -> None:
    dense = tmp_path / "dense"
    save(random_model(family_config("gpt_neox")), dense)
    tensors = load_file(dense / "model.safetensors")
    odd = {"gpt_neox.layers.0.attention.masked_bias": torch.ones(()), "extra.weight": torch.ones(3)}
    save_file(tensors | odd, dense / "model.safetensors", {"format": "pt"})
    checkpoint = run(dense, "w8a8")
    assert not odd.keys() & stored(checkpoint).keys()
    before, after = (
        load(folder, dtype=torch.float32)(IDS).logits for folder in (dense, checkpoint)
    )
    assert distance(after, before) < COST["w8a8"]
    notes = json.loads((tmp_path / "run" / "stages" / "plan.json").read_text())["metrics"]["notes"]
    assert sum("2 tensors that the model of config.json has no place for" in n for n in notes) == 1
