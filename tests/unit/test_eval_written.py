"""KL along written answers: the original's head alone says what the whole original says."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from compress.eval.written import head_alone

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.8,
}


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
        GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)),
    ],
    ids=lambda model: model.config.model_type,
)
def test_the_head_alone_gives_the_logits_of_the_whole_model(model: PreTrainedModel) -> None:
    ids = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model.eval()(ids).logits[0]
        hidden = model.base_model(ids).last_hidden_state[0]
    found = head_alone(model)(hidden[3:])
    torch.testing.assert_close(found, expected[3:])
    assert float(expected.std()) > 0.05
