"""How far each block of a compressed model is from the original's, and embedding and head alone.

Every block reads what the original's block read, so that errors do not add up along the model and
each shows what that block alone does wrong. Shapes: L blocks, T tokens, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from compress.eval.fidelity import Reference
from compress.model import find_blocks

TOKENS = 256
"""Tokens of the first window that are looked at, at most."""


@dataclass(frozen=True)
class Blocks:
    """A model beside its original, both on the original's inputs.

    error: of each block, |u' - u| / |u|, where u is what the original's block adds to its input and
    u' what the model's adds. gain: the factor g by which g * u comes nearest to u'; 1 where right.
    head_kl: KL of the final norm and the output head alone, in nats a token. head_scheme: how the
    head is quantized, None where it is not. embedding: |e' - e| / |e| of what the first block is
    given.
    """

    error: list[float]
    gain: list[float]
    head_kl: float
    head_scheme: str | None = None
    embedding: float = 0.0


@torch.inference_mode()
def trace(model: PreTrainedModel, window: Tensor) -> Tensor:
    """What each block reads, and last what the last one gives, on `window` [T]: [L + 1, T, H]."""
    states: list[Tensor] = []

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(_hidden(args, kwargs)[0].float().cpu())

    def keep_last(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states.append(_first(output)[0].float().cpu())

    _, blocks = find_blocks(model)
    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    hooks.append(blocks[-1].register_forward_hook(keep_last))
    with _removed(hooks):
        model(input_ids=window[None, :TOKENS].to(model.device), use_cache=False)
    return torch.stack(states)


@torch.inference_mode()
def beside(reference: Reference, states: Tensor, model: PreTrainedModel, window: Tensor) -> Blocks:
    """`model` beside the original of which `reference` and `states` are, on the same `window`."""
    _, blocks = find_blocks(model)
    numbers = {block: i for i, block in enumerate(blocks)}
    errors, gains = [0.0] * len(blocks), [0.0] * len(blocks)
    embedded = [states[0]]

    def read_the_original(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _hidden(args, kwargs)
        if block is blocks[0]:
            embedded.append(given[0].float().cpu())
        wanted = states[numbers[block]].to(given.device, given.dtype)[None]
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": wanted}
        return (wanted, *args[1:]), kwargs

    def judge(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        i = numbers[block]
        given = _first(output)
        update = states[i + 1] - states[i]
        made = given[0].float().cpu() - states[i]
        size = float(update.square().sum())
        errors[i] = float((made - update).square().sum() / size) ** 0.5
        gains[i] = float((made * update).sum() / size)
        wanted = states[i + 1].to(given.device, given.dtype)[None]
        return (wanted, *output[1:]) if isinstance(output, tuple) else wanted

    hooks = [
        block.register_forward_pre_hook(read_the_original, with_kwargs=True) for block in blocks
    ]
    hooks += [block.register_forward_hook(judge) for block in blocks]
    with _removed(hooks):
        logits = model(input_ids=window[None, :TOKENS].to(model.device), use_cache=False).logits[0]
    truth = F.linear(reference.hidden[0, : len(logits)], reference.head, reference.bias)
    p, q = truth.log_softmax(-1), logits.float().cpu().log_softmax(-1)
    spec = getattr(model.get_output_embeddings(), "spec", None)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    wanted, given = embedded
    embedding = float((given - wanted).norm() / wanted.norm())
    return Blocks(errors, gains, kl, spec.scheme if spec else None, embedding)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _removed(hooks: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
