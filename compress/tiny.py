"""A small Llama, trained here in under a minute: for tests and for a first look.

    python -m compress.tiny [out=DIR] [steps=N] [seed=N]

It learns the documentation that comes with Python, so it needs no network and no download. What
it makes is a complete Hugging Face folder, and every weight matrix takes groups of 32, 64 or 128.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compress import options
from compress.errors import ConfigError, UserError
from compress.log import progress, quiet_bars
from compress.model_path import home
from compress.text.documents import Data, split

VOCABULARY = 1024
CONTEXT = 256
BATCH = 4
KEEP_EVERY = 40  # steps between two states on disk, 8 s
STEPS = 340  # holds out 3.99 nats a token in 63 s of one core of a busy EPYC; 400: 3.96 in 72 s
PEAK_LEARNING_RATE = 0.01
BOS, EOS, PAD, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(kw_only=True)
class Settings:
    """out: the folder to make. steps: of training. seed: of the weights and the windows drawn."""

    out: str = "runs/models/tiny"
    steps: int = STEPS
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}; wanted 0 or more"
            for name, value in (("steps", self.steps), ("seed", self.seed))
            if value < 0
        ]
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class TinyLosses:
    """Nats a token on text held out of training.

    unigram is the loss of the best model that ignores context (the frequencies of the training
    text, one added to each count); heldout is that of the trained model.
    """

    unigram: float
    heldout: float
    steps: int


def make_tiny(
    folder: Path, *, steps: int = STEPS, seed: int = 0, state: Path | None = None
) -> TinyLosses:
    """Train the model and write its folder, whole or not at all, in place of one that is there.

    The same seed, versions, processor and number of threads give the same bytes. state: a file for
    how far training is; where it is there, from an earlier call, training goes on from it.
    """
    learn, held, _ = split(Data())
    texts, held_texts = ["\n\n".join(str(d) for d in part) for part in (learn, held)]
    tokenizer = _tokenizer(texts)
    ids, held_ids = (
        torch.tensor(tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"])
        for t in (texts, held_texts)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(architecture(tokenizer))
        _train(model, ids, steps, state)
    losses = TinyLosses(_unigram_loss(ids, held_ids), heldout_loss(model, held_ids), steps)
    _save(model, tokenizer, folder)
    return losses


def heldout_loss(model: LlamaForCausalLM, ids: Tensor, windows: int = 32) -> float:
    """Mean loss, nats a token, on the first `windows` windows of the text `ids` [n]."""
    body = CONTEXT - 1
    batch = _with_bos(ids[: windows * body].reshape(-1, body), model.config.bos_token_id)
    with torch.no_grad():
        return float(model.eval()(batch, labels=batch).loss)


def _tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of its own, which leads a text with BOS as Llama's does."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(text.split("\n\n"), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, bpe.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def architecture(tokenizer: PreTrainedTokenizerFast | None = None) -> LlamaConfig:
    """The model's configuration, known before it is trained but for its tokenizer's special ids."""
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        **({name: getattr(tokenizer, name) for name in special} if tokenizer else {}),
    )


def _train(model: LlamaForCausalLM, ids: Tensor, steps: int, state: Path | None) -> None:
    """Random windows; the rate warms up, then falls to zero as a cosine.

    Muon for the matrices (Jordan et al., https://kellerjordan.github.io/posts/muon): at 300 steps
    it holds out 4.06 nats a token where AdamW, at the better of two rates, has 4.71.
    """
    model.train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    warm_up = max(1, steps // 20)
    starts = torch.randint(len(ids) - CONTEXT, (steps, BATCH, 1))
    done = _restore(state, model, optimizers) if state and state.exists() else 0
    what = "training a small Llama"
    for step in progress(range(done, steps), what, "step", total=steps, done=done):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        windows = ids[starts[step] + torch.arange(CONTEXT - 1)]
        batch = _with_bos(windows, model.config.bos_token_id)
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LEARNING_RATE * min((step + 1) / warm_up, cosine)
            optimizer.step()
            optimizer.zero_grad()
        if state and (step + 1) % KEEP_EVERY == 0:
            _keep(state, step + 1, model, optimizers)


def _keep(
    state: Path, step: int, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> None:
    aside = state.with_suffix(".tmp")
    torch.save((step, model.state_dict(), [o.state_dict() for o in optimizers]), aside)
    aside.rename(state)


def _restore(state: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Take model and optimizers from `state`; the steps that they have done."""
    step, weights, kept = torch.load(state, weights_only=True)
    model.load_state_dict(weights)
    for optimizer, own in zip(optimizers, kept, strict=True):
        optimizer.load_state_dict(own)
    return step


def _with_bos(windows: Tensor, bos: int) -> Tensor:
    """Token windows [B, T] led by BOS, [B, T + 1]."""
    return torch.nn.functional.pad(windows, (1, 0), value=bos)


def _unigram_loss(ids: Tensor, held_ids: Tensor) -> float:
    counts = torch.bincount(ids, minlength=VOCABULARY).double() + 1
    return float(-(counts / counts.sum()).log()[held_ids].mean())


@quiet_bars()
def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder beside its place, then rename it: no half-written model is ever seen."""
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=64,
    )
    model.to(torch.bfloat16).save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def main(words: list[str]) -> None:
    """Read `field=value` words, train, and print what came of it."""
    settings = options.parsed(Settings, words)
    folder = home(settings.out)
    if folder.exists():
        raise UserError(f"{folder} is there already; remove it, or name another folder by out=")
    losses = make_tiny(folder, steps=settings.steps, seed=settings.seed)
    print(
        f"{folder}: held-out loss {losses.heldout:.2f} nats a token after {losses.steps} steps "
        f"(word frequencies alone: {losses.unigram:.2f})"
    )


if __name__ == "__main__":
    options.run(main, __doc__ or "")
