"""How the next token is drawn, request by request, inside one batch.

transformers' continuous batching takes the likeliest token of the scores that it is given, for the
whole batch. A request that samples has Gumbel noise added to its scores: the largest is then a
draw from their softmax (Gumbel 1954; Maddison et al., arXiv:1411.0030, section 2.1), while one
that is greedy keeps its scores as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState


@dataclass(frozen=True)
class Sampling:
    """temperature above 0; top_k: the likeliest so many, 0 for all; top_p: the likeliest that
    together have this probability; the same seed and scores draw the same tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def draw_scores(scores: Tensor, sampling: Sampling, position: int) -> Tensor:
    """Scores [V] whose largest is a draw from `scores` [V], for the token at `position`."""
    # By no less than float32 holds, of differences: a tiny temperature is as good as none. Rows of
    # one, since that is what the warpers take.
    coldest = torch.finfo(torch.float32).tiny
    warped = (scores - scores.max()).unsqueeze(0) / max(sampling.temperature, coldest)
    if sampling.top_k:
        warped = TopKLogitsWarper(sampling.top_k)(None, warped)
    if sampling.top_p < 1:
        warped = TopPLogitsWarper(sampling.top_p)(None, warped)
    # By position, so that a request that is computed again goes on as it was.
    generator = torch.Generator(scores.device).manual_seed(hash((sampling.seed, position)) % 2**63)
    noise = torch.empty_like(scores).exponential_(generator=generator).log_()
    return warped[0] - noise


class SampleEach(ContinuousBatchingLogitsProcessor):
    """Puts `draw_scores` in place of the scores of those requests that have a `sampling`.

    each_batch: called for each, in the batching thread, once its part of the KV cache is taken.
    """

    supported_kwargs = {"sampling": Sampling}  # noqa: RUF012 (declared so by its base)
    ignored_kwargs = ()

    def __init__(self, each_batch: Callable[[], None]) -> None:
        self._each_batch = each_batch
        self._rows: list[tuple[Sampling | None, int]] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Nothing is handed on by tensors but a row that has to be there."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Note who gets a token in this batch, in the order of the scores' rows."""
        self._each_batch()
        states = [request.state for request in requests_with_new_token]
        self._rows = [(s.logit_processor_kwargs.get("sampling"), s.position_offset) for s in states]
        return torch.zeros(len(states), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores [N, V] of the N requests that get a token."""
        for row, (sampling, position) in enumerate(self._rows):
            if sampling is not None:
                scores[row] = draw_scores(scores[row], sampling, position)
        return scores


def processors(each_batch: Callable[[], None]) -> ContinuousBatchingLogitsProcessorList:
    """What a continuous batching manager takes for its processing of scores."""
    listed = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([SampleEach(each_batch)]))
    listed.tensors_required = 1
    return listed
