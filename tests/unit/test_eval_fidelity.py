"""KL, agreement and perplexity against closed forms, and against the plain computation."""

import copy
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compress.errors import UserError
from compress.eval.fidelity import (
    CHOICES,
    CHUNK,
    WORST,
    compare,
    compare_to,
    kl_floor,
    remember,
    windows,
)
from compress.text.windows import leading_ids

STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K"
VOCABULARY = 258


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
    )
    return LlamaForCausalLM(config).eval()


def bytes_tokenizer(*, bos: bool) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def some_windows():
    return torch.randint(0, 256, (3, 140), generator=torch.Generator().manual_seed(1))


def test_a_model_is_equal_to_itself(model, some_windows):
    found = compare(model, model, some_windows)
    assert len(found.kl) == len(found.top1) == 3
    assert max(map(abs, found.kl)) < 1e-7
    assert found.top1 == [1.0, 1.0, 1.0]
    assert found.nll_before == pytest.approx(found.nll_after, abs=1e-6)


def test_kl_of_a_shifted_logit_equals_the_closed_form(model, some_windows):
    """Adding c to one logit of probability p: KL = log(1 - p + p * e^c) - p * c."""
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    shifted = copy.deepcopy(model)
    shifted.lm_head.bias.data[7] = 2.0
    found = compare(model, shifted, some_windows)
    with torch.no_grad():
        p = model(some_windows).logits[:, :-1].double().softmax(-1)[..., 7]
    expected = (torch.log(1 - p + p * math.e**2) - 2 * p).mean(1)
    assert found.kl == pytest.approx(expected.tolist(), rel=1e-4)
    assert min(found.kl) > 1e-4


def test_the_worst_places_are_those_of_the_largest_kl(model, some_windows):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight += 0.5 * torch.randn(
            other.lm_head.weight.shape, generator=torch.Generator().manual_seed(2)
        )
        p, q = (m(some_windows).logits[:, :-1].log_softmax(-1) for m in (model, other))
    kl = (p.exp() * (p - q)).sum(-1)
    largest, places = kl.flatten().topk(WORST)
    found = compare(model, other, some_windows).worst
    assert [place.kl for place in found] == pytest.approx(largest.tolist(), rel=1e-3)
    columns = kl.shape[1]  # more than a chunk of positions
    assert columns > CHUNK
    wanted = [divmod(place, columns) for place in places.tolist()]
    assert [(place.window, place.position) for place in found] == wanted
    for place in found:
        here = (place.window, place.position)
        for told, logprobs in ((place.before, p), (place.after, q)):
            likeliest = logprobs[here].exp().topk(CHOICES)
            assert [token for token, _ in told] == likeliest.indices.tolist()
            assert [x for _, x in told] == pytest.approx(likeliest.values.tolist(), rel=1e-3)


def test_perplexity_and_agreement_equal_the_plain_computation(model, some_windows):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight += 0.2 * torch.randn(other.lm_head.weight.shape)
        p, q = (m(some_windows).logits[:, :-1].double().log_softmax(-1) for m in (model, other))
    targets = some_windows[:, 1:, None]
    found = compare(model, other, some_windows)
    losses = [math.exp(-x.gather(2, targets).mean()) for x in (p, q)]
    assert found.perplexity == pytest.approx(losses, rel=1e-5)
    assert found.mean_top1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found.mean_kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert 0 < found.mean_top1 < 1


def test_rounding_of_arithmetic_has_a_floor(model, some_windows):
    floor = kl_floor(model, copy.deepcopy(model).bfloat16(), some_windows)
    assert 0 < floor < 0.05


def test_a_head_that_is_not_the_last_step_is_refused(model, some_windows):
    plain = model.forward

    def capped(*args, **kwargs):
        found = plain(*args, **kwargs)
        found.logits = 5 * torch.tanh(found.logits / 5)
        return found

    model.forward = capped
    with pytest.raises(UserError, match="not its output head"):
        remember(model, some_windows)


def test_another_vocabulary_is_refused(model, some_windows):
    reference = remember(model, some_windows)
    model.resize_token_embeddings(VOCABULARY + 6)
    with pytest.raises(ValueError, match="vocabulary of 264"):
        compare_to(reference, model, some_windows)


def test_windows_follow_each_other_without_overlap():
    text = "".join(chr(97 + i % 26) for i in range(700))
    found = windows(text, bytes_tokenizer(bos=False), 8, 200)
    assert found.shape == (3, 200)
    assert bytes_tokenizer(bos=False).decode(found.flatten().tolist()) == text[:600]


def test_windows_start_with_bos_where_the_tokenizer_adds_it():
    plain, starting = bytes_tokenizer(bos=False), bytes_tokenizer(bos=True)
    assert (leading_ids(plain), leading_ids(starting)) == ([], [starting.bos_token_id])
    found = windows("a" * 300, starting, 2, 100)
    assert found.shape == (2, 100)
    assert (found[:, 0] == 256).all()
    assert (found[:, 1:] != 256).all()


def test_a_short_text_gives_one_short_window_and_a_shorter_one_is_refused():
    tokenizer = bytes_tokenizer(bos=False)
    assert windows("a" * 100, tokenizer, 8, 1024).shape == (1, 100)
    with pytest.raises(UserError, match=r"63 tokens.*wanted at least one window of 64"):
        windows("a" * 63, tokenizer, 8, 1024)
    with pytest.raises(UserError, match="windows of 32"):
        windows("a" * 200, tokenizer, 8, 32)


@pytest.mark.skipif(not STORIES.is_dir(), reason="no ../shared/models/stories260K")
def test_a_trained_model_predicts_stories():
    model = LlamaForCausalLM.from_pretrained(STORIES).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(STORIES)
    text = (STORIES.parents[1] / "data" / "tinystories_sample.txt").read_text(encoding="utf-8")
    found = compare(model, model, windows(text, tokenizer, 4, 256))
    before, after = found.perplexity
    assert 3 < before < 12
    assert after == pytest.approx(before, rel=1e-6)
