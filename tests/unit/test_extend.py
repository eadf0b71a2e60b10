"""A long window: its losses a part at a time, over jumps of positions, and by position."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from compress.eval.length import PARTS, read
from compress.training import long_window
from compress.training.long_window import before_head, losses
from compress.training.scaling import raise_limit


def small(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(rows))


def whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The losses with all logits in memory."""
    found = model(ids).logits[:, :-1].float().transpose(1, 2)
    return cross_entropy(found, ids[:, 1:], reduction="none")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])  # the last two cap or scale logits
def test_losses_in_parts_are_those_of_the_whole_window(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_window, "CHUNK", 16)
    ids, model, widest = tokens(1, 101), small(kind), []
    body = model.base_model
    model.get_output_embeddings().register_forward_hook(
        lambda _, inputs, __: widest.append(inputs[0].shape[1])
    )
    query = model.model.layers[0].self_attn.q_proj.weight
    gradients = []
    for of in (losses, whole):
        found = of(model, ids)
        (gradient,) = torch.autograd.grad(found.mean(), query)
        gradients.append(gradient)
        if of is losses:
            assert max(widest) == 16
            assert len(widest) == 14  # seven parts, each again on the way back
            parts = found
    assert parts.shape == (1, 100)
    assert float(parts.detach().std()) > 0.1
    torch.testing.assert_close(parts, found)
    torch.testing.assert_close(*gradients)
    assert model.base_model is body


def test_tokens_attend_over_a_jump_of_positions() -> None:
    model, ids = small("llama"), tokens(1, 12)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 97
    jump = torch.arange(12)
    jump[6:] += 20
    with torch.no_grad():
        plain, jumped, changed = (
            before_head(model, *given).last_hidden_state
            for given in ((ids,), (ids, jump), (other, jump))
        )
    torch.testing.assert_close(plain[:, :6], jumped[:, :6])
    assert float((plain[:, 6:] - jumped[:, 6:]).abs().max()) > 1e-3  # the distances are others
    assert float((jumped[:, 6:] - changed[:, 6:]).abs().max()) > 1e-3  # the first token is seen


def test_the_same_tokens_are_read_whole_by_position_and_in_short_windows() -> None:
    model, ids = small("llama"), tokens(2, 81)
    found = read(model, ids, 21, bos=[5])
    with torch.no_grad():
        each = whole(model, ids)
        rows = ids[:, 1:].reshape(8, 20)
        short = whole(model, torch.cat([torch.full((8, 1), 5), rows], 1))
    assert found.long == pytest.approx(float(each.mean().exp()), rel=1e-4)
    assert found.short == pytest.approx(float(short.mean().exp()), rel=1e-4)
    by_position = each.mean(0).reshape(PARTS, 10).mean(1).exp()
    torch.testing.assert_close(torch.tensor(found.by_position), by_position)


@pytest.mark.parametrize(("limit", "wanted"), [(512, 1024), (4096, 4096), (None, None)])
def test_a_tokenizer_s_own_limit_is_raised_where_it_is_lower(
    tmp_path: Path, limit: int | None, wanted: int | None
) -> None:
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"model_max_length": limit}))
    raise_limit(tmp_path, 1024)
    assert json.loads(file.read_text())["model_max_length"] == wanted
