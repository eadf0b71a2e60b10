"""Greedy generation: batches through transformers' `generate`, one prompt by our decoder."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from compress.runtime.cache import cache_for
from compress.runtime.decode import Decoder


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """`question` as the model's chat template puts it, or as it is where there is none."""
    if not tokenizer.chat_template:
        return question
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text)


def greedy_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> GenerationConfig:
    """The likeliest token each time: the model's end tokens, none of its sampling or penalties."""
    own = model.generation_config
    end = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    pad = own.pad_token_id if own.pad_token_id is not None else tokenizer.pad_token_id
    if pad is None:
        pad = end[0] if isinstance(end, list) else end
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        max_new_tokens=max_new_tokens,
        bos_token_id=own.bos_token_id,
        eos_token_id=end,
        pad_token_id=0 if pad is None else pad,
    )


@contextmanager
def _generating_by(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """`config` as the model's own meanwhile: what a call's leaves open, as the length of n-grams
    that may not return, transformers takes from there.
    """
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [len(prompts), longest], padded on the left.

    A prompt that already opens with the tokenizer's BOS, as chat templates make it, gets no second.
    """
    bos = tokenizer.bos_token
    rows = [
        tokenizer(p, add_special_tokens=not (bos and p.startswith(bos)), verbose=False).input_ids
        for p in prompts
    ]
    longest = max(1, *(len(row) for row in rows))
    ids = torch.full((len(rows), longest), pad_token_id)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        if row:
            ids[i, -len(row) :] = torch.tensor(row)
            mask[i, -len(row) :] = 1
    return ids, mask


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int,
    batch_size: int,
    kv_cache: str = "16",
) -> list[str]:
    """What the model writes after each prompt, greedily, without prompt and special tokens.

    Prompts go in batches in the order given, so the caller puts those of like length together.
    kv_cache: how keys and values are kept, one of KV_CACHES.
    """
    config = greedy_config(model, tokenizer, max_new_tokens)
    texts: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        ids, mask = encode(tokenizer, batch, config.pad_token_id)
        with _generating_by(model, config):
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=config,
                # transformers' own in 16 bit: a model's own Python may name it as it likes.
                cache=None if kv_cache == "16" else cache_for(model, kv_cache),
            )
        texts += tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return texts


def answer(
    decoder: Decoder, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int
) -> str:
    """What the model writes after `prompt`, greedily, without prompt and special tokens."""
    config = greedy_config(decoder.model, tokenizer, max_new_tokens)
    end = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ids, _ = encode(tokenizer, [prompt], config.pad_token_id)
    written: list[int] = []
    for token in decoder.tokens(ids, max_new_tokens):
        written.append(int(token))
        if written[-1] in end:
            break
    return str(tokenizer.decode(written, skip_special_tokens=True))
