"""How far a model has moved from the original, on text held out from everything it learned from.

The original's log-probabilities are computed once, in float32, when its blocks are in memory for
calibration; every stage that changes weights is measured against them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import nll_loss, pad
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from compress.model import BlockModel
from compress.source import shortest_window
from compress.stage import Run
from compress.tensors import write_stream
from compress.text import documents
from compress.text.windows import Windows, draw

FILE = "heldout.safetensors"
LOGITS = 1 << 24
"""Logits that are compared at a time: 67 MB in float32, of which a few copies are held."""
HIDDEN_BYTES = 1 << 28
"""Hidden states of windows that go through the blocks together."""


@dataclass(frozen=True)
class Distance:
    """kl: KL(original || model), nats a token. top1: share of tokens with the same first choice.
    ppl: the model's perplexity on the text.
    """

    kl: float
    top1: float
    ppl: float

    def asdict(self) -> dict[str, float]:
        return asdict(self)


def save(folder: Path, ids: Tensor, mask: Tensor, logprobs: Iterable[Tensor]) -> None:
    """Keep token ids and mask [n, T], padded on the right, and the original's log-probabilities
    of each window [T, V], in float16, which are written as they come.

    That is enough: at a log-probability of -8 its step is 0.008, and the steps average out.
    """
    windows = iter(logprobs)
    first = next(windows)
    sizes = {
        "ids": (ids.dtype, ids.shape),
        "tokens": (torch.int64, ids.shape[:1]),
        "logprobs": (torch.float16, (len(ids), *first.shape)),
    }
    rest = (window.half() for window in windows)
    write_stream(folder / FILE, sizes, itertools.chain([ids, mask.sum(1), first.half()], rest))


def windows(run: Run, config: PretrainedConfig) -> Windows:
    """The held-out text by the settings of calibrate, for a model of this configuration."""
    settings, own = run.config.data, run.config.calibrate
    _, held, description = documents.split(settings)
    return draw(
        held,
        AutoTokenizer.from_pretrained(
            run.original, trust_remote_code=run.config.model.trust_remote_code
        ),
        count=own.heldout_windows,
        length=min(
            own.heldout_length,
            settings.length,
            config.get_text_config().max_position_embeddings,
            shortest_window([run.original], run.config.model.trust_remote_code),
        ),
        seed=settings.seed,
        description=description,
    )


def record(run: Run, held: Windows, folder: Path) -> float:
    """Keep what the original says of `held`, as `save` does, one block of it in memory at a time;
    its perplexity there.
    """
    model = BlockModel(
        run.original,
        device=run.config.device,
        trust_remote_code=run.config.model.trust_remote_code,
    )
    rows = [ids[:size] for ids, size in zip(held.ids, held.mask.sum(1).tolist(), strict=True)]
    losses = []

    @torch.no_grad()
    def logprobs() -> Iterator[Tensor]:
        for row, logits in zip(rows, block_logits(model, rows), strict=True):
            found = logits.log_softmax(-1).cpu()
            losses.append(nll_loss(found[:-1], row[1:], reduction="none"))
            yield pad(found, (0, 0, 0, held.ids.shape[1] - len(row)))

    save(folder, held.ids, held.mask, logprobs())
    return float(torch.cat(losses).mean().exp())


def _windows(folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids [t] and log-probabilities [t, V] of one window after the other, no padding."""
    with safe_open(folder / FILE, framework="pt") as file:
        tokens = file.get_tensor("tokens").tolist()
        ids = file.get_tensor("ids")
    for index, row in enumerate(ids):
        # Opened for each: what is read of a mapped file stays resident until it closes.
        with safe_open(folder / FILE, framework="pt") as file:
            yield row[: tokens[index]], file.get_slice("logprobs")[index, : tokens[index]]


def distance(
    folder: Path, statistics: Path, *, device: str = "cpu", trust_remote_code: bool = False
) -> Distance:
    """The distance to the original of the model in `folder`, dense or quantized, read from disk a
    block at a time. `statistics`: where the original's log-probabilities are.

    Memory is that of one block and of HIDDEN_BYTES of hidden states; for more windows than fill
    these, the blocks are read again.
    """
    model = BlockModel(folder, device=device, trust_remote_code=trust_remote_code)
    return _measure(statistics, lambda rows: block_logits(model, rows))


def distance_of(model: PreTrainedModel, statistics: Path) -> Distance:
    """The same for a model in memory."""

    def logits(rows: Iterable[Tensor]) -> Iterator[Tensor]:
        for row in rows:
            yield model(row.unsqueeze(0).to(model.device), use_cache=False).logits[0]

    return _measure(statistics, logits)


@torch.no_grad()
def _measure(
    statistics: Path, logits_of: Callable[[Iterable[Tensor]], Iterator[Tensor]]
) -> Distance:
    kl, same, loss, tokens, predicted = 0.0, 0, 0.0, 0, 0
    rows = (row for row, _ in _windows(statistics))
    for logits, (row, reference) in zip(logits_of(rows), _windows(statistics), strict=True):
        step = max(1, LOGITS // logits.shape[-1])
        for first in range(0, len(row), step):
            part, follows = slice(first, first + step), row[first + 1 : first + 1 + step]
            found = logits[part].float().log_softmax(-1).cpu()
            wanted = reference[part].float().log_softmax(-1)
            kl += float((wanted.exp() * (wanted - found)).sum())
            same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
            losses = nll_loss(found[: len(follows)], follows, reduction="sum")
            loss += float(losses)
        tokens, predicted = tokens + len(row), predicted + len(row) - 1
    return Distance(kl / tokens, same / tokens, float(torch.tensor(loss / predicted).exp()))


def block_logits(model: BlockModel, rows: Iterable[Tensor]) -> Iterator[Tensor]:
    """Logits [t, V] of each row of token ids [t]."""
    width = model.config.get_text_config().hidden_size
    for chunk in _together(rows, HIDDEN_BYTES // (4 * width)):
        ids = [row.unsqueeze(0).to(model.device) for row in chunk]
        hidden = [model.embed(row).cpu() for row in ids]
        for index in range(len(model)):
            with model.block(index) as block:
                for number, row in enumerate(ids):
                    states = hidden[number].to(model.device)
                    hidden[number] = block(states, **model.calls(row)[index]).cpu()
        for states in hidden:
            yield model.logits(states.to(model.device))[0]


def _together(rows: Iterable[Tensor], tokens: int) -> Iterator[list[Tensor]]:
    """The rows in lists of at most `tokens` tokens, or of one row."""
    waiting: list[Tensor] = []
    for row in rows:
        if waiting and sum(map(len, waiting)) + len(row) > tokens:
            yield waiting
            waiting = []
        waiting.append(row)
    if waiting:
        yield waiting
