"""How far a compressed model's predictions are from its original's, on text neither was tuned on.

The reference is the original in float32; the compressed model runs in the dtype that it is served
in. Shapes: n windows of T tokens, H hidden size, V vocabulary.

The original's logits of all windows would take n * T * V numbers. What is kept of it instead is the
last hidden states [n, T, H] and the output head [V, H], from which the logits are had again, a
chunk of positions at a time. So the two models need not be in memory together.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import UserError
from compress.log import progress
from compress.runtime.cache import all_logits
from compress.text.windows import leading_ids

LEAST_WINDOW = 64
WORST, CHOICES = 8, 3  # tokens told of one by one, and what each model would have said there
CHUNK = 128  # positions whose logits are in float32 at once: 78 MB at V = 152 thousand


@dataclass(frozen=True)
class Reference:
    """A model's predictions on some windows: `hidden` [n, T, H] and the head that reads them.

    head [V, H] and bias [V] (zeros where the head has none), all float32.
    """

    hidden: Tensor
    head: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Disagreement:
    """A place where two models expect very different tokens: after `position` of `window`.

    kl: there, in nats. before, after: the likeliest tokens by the original and by the compressed,
    (id, probability) each.
    """

    kl: float
    window: int
    position: int
    before: list[tuple[int, float]]
    after: list[tuple[int, float]]


@dataclass(frozen=True)
class Fidelity:
    """How two models' next-token predictions compare; each list of numbers holds one a window.

    kl: KL(original || compressed) in nats a token, over the whole vocabulary. top1: share of
    positions, 0 to 1, where both find the same token likeliest. nll_before and nll_after: mean
    negative log-likelihood of the text, in nats a token, by the original and by the compressed.
    worst: the places of the largest KL of all, the largest first.
    """

    kl: list[float]
    top1: list[float]
    nll_before: list[float]
    nll_after: list[float]
    worst: list[Disagreement] = field(default_factory=list)

    @property
    def mean_kl(self) -> float:
        return _mean(self.kl)

    @property
    def mean_top1(self) -> float:
        return _mean(self.top1)

    @property
    def perplexity(self) -> tuple[float, float]:
        """Perplexity of the text by the original and by the compressed model."""
        before, after = torch.tensor([_mean(self.nll_before), _mean(self.nll_after)]).exp().tolist()
        return before, after


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def windows(text: str, tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> Tensor:
    """The first `count` windows of `length` tokens of `text`, tokenized as one string: [n, T].

    Windows do not overlap. Where the tokenizer adds a beginning-of-sequence token (Llama and
    Mistral do; SmolLM2 and Qwen do not), each window starts with one, and holds length - 1 tokens
    of text. A text too short gives fewer windows, or one shorter one; under 64 tokens, UserError.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    start = leading_ids(tokenizer)
    size = min(length, len(ids) + len(start)) - len(start)
    if size + len(start) < LEAST_WINDOW:
        raise UserError(
            f"held-out text: {len(ids)} tokens, windows of {length}; wanted at least one window "
            f"of {LEAST_WINDOW} tokens: give a "
            f"{'larger score.window_tokens' if length < LEAST_WINDOW else 'longer score.text'}"
        )
    rows = [ids[i * size : (i + 1) * size] for i in range(min(count, len(ids) // size))]
    return torch.tensor([start + row for row in rows], dtype=torch.int64)


@torch.inference_mode()
def remember(model: PreTrainedModel, windows: Tensor) -> Reference:
    """The predictions of `model`, which is in float32, on `windows` [n, T].

    Raises UserError for a model whose logits are not its output head applied to its last hidden
    states (Gemma 2 caps them, Cohere scales them).
    """
    head: nn.Module = model.get_output_embeddings()
    rows = [
        model.base_model(input_ids=row[None].to(model.device), use_cache=False).last_hidden_state[0]
        for row in progress(windows, "original in float32", "window", total=len(windows))
    ]
    short = windows[:1, :LEAST_WINDOW].to(model.device)
    logits, again = model(input_ids=short).logits[0], head(rows[0][: short.shape[1]])
    if not torch.allclose(logits, again, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"{type(model).__name__}: its logits are not its output head times its last hidden "
            "states; wanted a Llama-, Mistral- or Qwen-style model to measure KL on"
        )
    return _reference(torch.stack([row.cpu() for row in rows]), head)


def _reference(hidden: Tensor, head: nn.Module) -> Reference:
    parameters = dict(head.named_parameters())
    weight = parameters["weight"].detach().float().cpu()
    bias = parameters.get("bias", torch.zeros(len(weight))).detach().float().cpu()
    return Reference(hidden.float(), weight, bias)


@torch.inference_mode()
def compare_to(
    reference: Reference, model: PreTrainedModel, windows: Tensor, kv_cache: str = "16"
) -> Fidelity:
    """How `model`, in whatever dtype it is served in, predicts `windows` [n, T] beside `reference`.

    Position t predicts token t + 1, so a window gives T - 1 predictions. Log-softmax is in float32.
    kv_cache: how `model` keeps keys and values, one of KV_CACHES.
    """
    head, bias = reference.head.to(model.device), reference.bias.to(model.device)
    result = Fidelity([], [], [], [])
    bar = progress(windows, f"{str(model.dtype).removeprefix('torch.')} beside it", "window")
    for index, (row, hidden) in enumerate(zip(bar, reference.hidden, strict=True)):
        ids = row.to(model.device)
        logits = all_logits(model, ids[None], kv_cache)[0, :-1]
        if logits.shape[1] != len(head):
            raise ValueError(f"vocabulary of {logits.shape[1]}; the original's is {len(head)}")
        sums = torch.zeros(4, dtype=torch.float64, device=model.device)
        for part in torch.arange(len(logits), device=model.device).split(CHUNK):
            p = F.linear(hidden.to(model.device)[part], head, bias).log_softmax(-1)
            q = logits[part].float().log_softmax(-1)
            found = _by_position(p, q, ids[part + 1])
            sums += found.sum(1)
            _keep_worst(result.worst, found[0], p, q, index, int(part[0]))
        for values, value in zip(
            (result.kl, result.top1, result.nll_before, result.nll_after),
            (sums / len(logits)).tolist(),
            strict=True,
        ):
            values.append(value)
    return result


def _by_position(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """KL, agreement and both losses [4, C] at every position, from log-probabilities [C, V]."""
    kl = (p.exp() * (p - q)).sum(-1)
    same = p.argmax(-1) == q.argmax(-1)
    loss_p, loss_q = (-x.gather(1, tokens[:, None])[:, 0] for x in (p, q))
    return torch.stack([x.double() for x in (kl, same, loss_p, loss_q)])


def _keep_worst(
    worst: list[Disagreement], kl: Tensor, p: Tensor, q: Tensor, window: int, first: int
) -> None:
    """Put the positions of the largest `kl` [C] among `worst`, which stays WORST long, in order.

    p, q: log-probabilities [C, V]. first: the position in the window that row 0 stands for.
    """
    for row in kl.topk(min(WORST, len(kl))).indices.tolist():
        expected = [
            [(int(i), float(x.exp())) for x, i in zip(*found[row].topk(CHOICES), strict=True)]
            for found in (p, q)
        ]
        worst.append(Disagreement(float(kl[row]), window, first + row, *expected))
    worst.sort(key=lambda found: -found.kl)
    del worst[WORST:]


def compare(original: PreTrainedModel, compressed: PreTrainedModel, windows: Tensor) -> Fidelity:
    """`compressed` beside `original`, a float32 model, both in memory, on `windows` [n, T]."""
    return compare_to(remember(original, windows), compressed, windows)


def kl_floor(original: PreTrainedModel, served: PreTrainedModel, windows: Tensor) -> float:
    """KL of the original in the dtype it is served in to itself in float32, in nats a token.

    What the rounding of arithmetic alone costs: no compression in that dtype can be closer.
    """
    return compare(original, served, windows).mean_kl
