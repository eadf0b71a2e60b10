"""The loss of a long window needs no logits of all of it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from compress.stages import extend
from compress.stages.extend import losses_in_chunks, next_token_losses, perplexity_by_position


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


def test_losses_in_chunks_are_those_of_the_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend, "CHUNK", 16)
    ids = torch.randint(97, (1, 101), generator=torch.Generator().manual_seed(1))
    for kind in ("llama", "gemma2", "granite"):  # the second caps its logits, the third scales them
        model = small(kind)
        widest = []
        head = model.get_output_embeddings()
        head.register_forward_hook(lambda _, inputs, __, to=widest: to.append(inputs[0].shape[1]))
        found = losses_in_chunks(model, ids)
        assert max(widest) == 16
        with torch.no_grad():
            wanted = next_token_losses(model, ids)
        assert found.shape == wanted.shape == (1, 100)
        assert float(wanted.std()) > 0.1
        torch.testing.assert_close(found, wanted)
        assert not model.base_model._forward_hooks


def test_perplexity_by_position_is_over_equal_parts() -> None:
    model = small("llama")
    ids = torch.randint(97, (2, 81), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        parts = next_token_losses(model, ids).mean(0).reshape(extend.POSITIONS, 10).mean(1).exp()
    torch.testing.assert_close(torch.tensor(perplexity_by_position(model, ids)), parts)
