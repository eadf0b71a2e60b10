"""A teacher behind an OpenAI-compatible server, asked for the log-probabilities of given tokens.

The server has to take tokens as a prompt and to answer with `prompt_logprobs`, as vLLM's does:

    vllm serve TEACHER --max-logprobs 64
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compress.algorithms.soft_labels import LEAST_MASS
from compress.errors import UserError
from compress.log import logger
from compress.training.teacher import Label

TOGETHER = 4  # requests that are under way
TRIES, PAUSE = 3, 2.0  # seconds, doubled after each try that failed in passing
PATIENCE = 600.0  # seconds for an answer
KEY = "OPENAI_API_KEY"
PROBE = "Tokens differ: 12,345 déjà vu…\n    return x  # 日本"


@dataclass(frozen=True)
class Endpoint:
    """url: up to /v1. model: by the server's name for it. k: likeliest tokens asked for."""

    url: str
    model: str
    k: int

    @property
    def kept(self) -> int:
        """How many tokens are kept of each distribution."""
        return self.k

    def identity(self) -> dict[str, Any]:
        """All that its labels depend on, but the text; not where it is served."""
        return {"endpoint": self.model, "top_k": self.k}

    def flops(self, tokens: int) -> None:
        """Not known: nothing says how large the model is."""
        return None

    def opened(self) -> Label:
        """What labels windows."""
        return self.label

    def label(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the teacher says (see Label), zeros where padded. Raises UserError where the server
        does not give that.
        """
        tokens = torch.zeros((*ids.shape, self.k), dtype=torch.int32)
        probabilities = torch.zeros((*ids.shape, self.k), dtype=torch.float16)
        rest = torch.zeros(ids.shape, dtype=torch.float16)
        real = [mask[row].nonzero().flatten() for row in range(len(ids))]
        with ThreadPoolExecutor(TOGETHER) as pool:
            answers = pool.map(self._ask, [ids[row, places] for row, places in enumerate(real)])
            for row, (places, answer) in enumerate(zip(real, answers, strict=True)):
                tokens[row, places], probabilities[row, places], rest[row, places] = answer
        return tokens, probabilities, rest

    def _ask(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # A prompt's log-probabilities are those of its own tokens, so one token more shows what is
        # expected after the last; which one it is does not matter.
        prompt = [*ids.tolist(), int(ids[-1])]
        asked = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        answer = post(f"{self.url}/completions", {**asked, "prompt_logprobs": self.k})
        choices = answer.get("choices") or [{}]
        positions = choices[0].get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(prompt):
            raise UserError(
                f"{self.url}: the answer holds no prompt_logprobs for {len(prompt)} tokens; wanted "
                "a server that gives them, as vLLM's does"
            )
        return likeliest(positions[1:], self.k)


def likeliest(positions: list[dict[str, Any]], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest of each position's {token id: {"logprob": ...}}, in the form of `top_k`
    (compress.algorithms.soft_labels). The server adds the token that is there, which may be no
    likely one.
    """
    rows = [
        sorted(((said["logprob"], int(token)) for token, said in row.items()), reverse=True)[:k]
        for row in positions
    ]
    if short := next((row for row in rows if len(row) < k), None):
        raise UserError(
            f"the server gives {len(short)} tokens at a position; wanted distill.top_k={k}: start "
            f"it with --max-logprobs {k}, or lower distill.top_k"
        )
    tokens = torch.tensor([[token for _, token in row] for row in rows], dtype=torch.int32)
    kept = torch.tensor([[p for p, _ in row] for row in rows], dtype=torch.float64).exp()
    rest = (1 - kept.sum(-1)).clamp_min(LEAST_MASS)
    return tokens, kept.half(), rest.half()


def connect(
    url: str, model: str | None, k: int, tokenizer: PreTrainedTokenizerBase | None
) -> Endpoint:
    """The endpoint at `url`, once it is known to serve `model` (None: the only one that it has) by
    the tokenizer given, and to say what is asked of a teacher; without a tokenizer that is not
    tried. Raises UserError where it does not.
    """
    url = url.rstrip("/")
    served = [str(entry["id"]) for entry in get(f"{url}/models").get("data", [])]
    if model is None and len(served) == 1:
        model = served[0]
    if model not in served:
        raise UserError(
            f"distill.endpoint={url}: serves {', '.join(served) or 'nothing'}; wanted "
            f"{model or 'one model'}; name it by distill.teacher"
        )
    found = Endpoint(url, model, k)
    if tokenizer is not None:
        _check_tokens(url, model, tokenizer)
        ids = torch.tensor([tokenizer(PROBE)["input_ids"]])
        found.label(ids, torch.ones_like(ids))
    return found


def _check_tokens(url: str, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare tokens of one text, where the server says how it reads it, as vLLM's does."""
    own = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    asked = {"model": model, "prompt": PROBE, "add_special_tokens": False}
    try:
        found = post(f"{url.removesuffix('/v1')}/tokenize", asked).get("tokens")
    except UserError:
        logger.warning(f"  {url} does not tokenize; that its tokens are the model's is not checked")
        return
    if found != own:
        raise UserError(
            f"distill.endpoint={url}: another tokenizer; {PROBE[:14]!r}… is {found} there and "
            f"{own} here; wanted a teacher with the model's own"
        )


def get(url: str) -> dict[str, Any]:
    """The JSON at `url`. Raises UserError as `post` does."""
    return _read(urllib.request.Request(url, headers=_headers()))


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON that answers `body`; what fails in passing is tried again. Raises UserError with
    what the server said.
    """
    data = json.dumps(body).encode()
    headers = {**_headers(), "Content-Type": "application/json"}
    return _read(urllib.request.Request(url, data=data, headers=headers))


def _headers() -> dict[str, str]:
    key = os.environ.get(KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read(request: urllib.request.Request) -> dict[str, Any]:
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                found = json.load(answer)
            if isinstance(found, dict):
                return found
            failed = "its answer is no JSON object"
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300].replace("\n", " ")
            if error.code < 500 and error.code != 429:  # ours to mend: asking again is no use
                raise UserError(f"{request.full_url}: status {error.code}: {said}") from error
            failed = f"status {error.code}: {said}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            failed = str(getattr(error, "reason", error))
        if attempt + 1 < TRIES:
            time.sleep(PAUSE * 2**attempt)
    raise UserError(
        f"distill.endpoint: {request.full_url}: {failed}; once it answers, the same command goes on"
    )
