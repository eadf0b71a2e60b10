"""Tiny random models of every family, made from their configuration classes."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
SIZES: dict[str, Any] = {
    "vocab_size": 272,  # of which the tokenizer fills 259
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
# By a name of ours: the configuration's class, and what makes the model worth a test.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied-biased": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA),
    "phi3": ("phi3", {}),
    "olmo": ("olmo", {"tie_word_embeddings": True}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.5}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 16}),
    "granite": (
        "granite",
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
        },
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "smollm3": ("smollm3", {}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "exaone4": ("exaone4", {"sliding_window": 16}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 16}),
    "starcoder2": ("starcoder2", {}),
}


def family_config(name: str, **sizes: Any) -> PretrainedConfig:
    kind, special = FAMILIES[name]
    return AutoConfig.for_model(kind, **SIZES | special | sizes)


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose norms and biases are random too, with a few channels far above the others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        offset = 1.0 if config.model_type.startswith("gemma") else 0.0
        with torch.no_grad():
            for module in model.modules():
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_(std=0.1)
                if "norm" in type(module).__name__.lower() and list(module.parameters()):
                    factor = torch.randn_like(module.weight).mul(0.3).exp()
                    factor[torch.randperm(len(factor))[:3]] *= 8
                    module.weight.copy_(factor - offset)
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and name.endswith(("v_proj", "up_proj")):
                    module.weight[torch.randperm(module.out_features)[:3]] *= 8
    return model.requires_grad_(False)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, no training; texts are led by BOS."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([BOS, EOS, PAD, *letters])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )


def save(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Write a model folder, in bfloat16, as its users find it."""
    model.to(torch.bfloat16).save_pretrained(folder, **options)
    byte_tokenizer().save_pretrained(folder)
