"""What the blocks to come are rounded for: inputs that passed the blocks quantized so far."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.blocks.streams import FULL, QUANTIZED, CalibrationStreams, swapped
from compress.model import BlockModel

IDS = torch.randint(5, 1000, (3, 16), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[2, 9:] = 0


def streams_of(model: BlockModel, folder: Path, *, targets: bool) -> CalibrationStreams:
    (folder / "work").mkdir()
    save_file({"ids": IDS, "mask": MASK}, folder / "windows.safetensors")
    return CalibrationStreams(
        model, folder / "windows.safetensors", folder / "work", 2, targets=targets
    )


@torch.no_grad()
def after_first(model: BlockModel, down: nn.Module | None = None) -> Tensor:
    """What block 0 gives, with another down_proj if there is one."""
    with model.block(0) as block, swapped(block, {} if down is None else {"mlp.down_proj": down}):
        return block(model.embed(IDS, MASK), **model.calls(IDS, MASK)[0])


def half(linear: nn.Linear) -> nn.Linear:
    """A stand-in for a quantized linear that no one takes for the original."""
    found = nn.Linear(linear.in_features, linear.out_features, bias=False).requires_grad_(False)
    found.weight.copy_(linear.weight / 2)
    return found


@torch.no_grad()
def test_hessians_are_of_what_quantized_blocks_give_without_padding(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = BlockModel(tiny_model)
    streams = streams_of(model, tmp_path, targets=False)
    with model.block(0) as block:
        down = half(block.get_submodule("mlp.down_proj"))
        with swapped(block, {"mlp.down_proj": down}):
            streams.advance(QUANTIZED, block, 0)
        streams.commit()
    names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    seen: dict[str, Tensor] = {}
    hidden = after_first(model, down)
    with model.block(1) as block:
        found = streams.hessians(block, 1, names)
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: seen.update({name: args[0][MASK.bool()]})
            )
            for name in names
        ]
        block(hidden, **model.calls(IDS, MASK)[1])
        for hook in hooks:
            hook.remove()
    assert [readers for readers, _ in found] == [names[:2], names[2:]]
    for readers, hessian in found:
        rows = seen[readers[0]]
        assert len(rows) == 16 + 16 + 9
        torch.testing.assert_close(hessian, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_window_has_inputs_of_quantized_blocks_and_outputs_of_the_original(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = BlockModel(tiny_model)
    streams = streams_of(model, tmp_path, targets=True)
    with model.block(0) as block:
        streams.advance(FULL, block, 0)
        down = half(block.get_submodule("mlp.down_proj"))
        with swapped(block, {"mlp.down_proj": down}):
            streams.advance(QUANTIZED, block, 0)
        streams.commit()
    full, quantized = after_first(model), after_first(model, down)
    assert not torch.allclose(full, quantized, atol=0.1)
    with model.block(1) as block:
        streams.advance(FULL, block, 1)
        wanted = block(full, **model.calls(IDS, MASK)[1])
        window = streams.window(2, 1)
    real = MASK[2].bool()
    torch.testing.assert_close(window.inputs[0][real], quantized[2][real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(window.targets[0][real], wanted[2][real], rtol=1e-4, atol=1e-5)
    assert torch.equal(window.tokens, MASK[[2]].float())


def test_a_step_has_no_window_twice_and_none_comes_twice_before_all_came(
    tiny_model: Path, tmp_path: Path
) -> None:
    streams = streams_of(BlockModel(tiny_model), tmp_path, targets=True)
    drawn: list[int] = []
    streams.window = lambda number, _: drawn.append(number)  # type: ignore[assignment, method-assign, return-value]
    steps = streams.drawn(0, seed=1)
    for _ in range(30):  # two of three windows each
        list(next(steps))
    assert all(one != other for one, other in zip(drawn[::2], drawn[1::2], strict=True))
    assert all({*drawn[first : first + 3]} == {0, 1, 2} for first in range(0, 60, 3))
