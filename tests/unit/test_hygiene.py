"""What bends calibration statistics is told, what makes them worthless is refused."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer

from compress.blocks.collector import Collector, picked_rows
from compress.errors import UserError
from compress.model import BlockModel
from compress.text import hygiene
from compress.text.documents import PYTHON_DOCS
from compress.text.windows import Windows, draw

T = 24


def windows(ids: list[list[int]], template: int = 0, **more: int) -> Windows:
    """Windows of these tokens, padded on the right by token 0."""
    longest = max(map(len, ids))
    rows = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    return Windows(rows, mask, template, "a text", **more)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> BlockModel:
    return BlockModel(tiny_model)


@torch.no_grad()
def measured(
    model: BlockModel, batches: list[tuple[Tensor, Tensor]], pick: Tensor
) -> dict[str, Tensor]:
    """Statistics of the first two blocks over batches of ids and mask [B, T]."""
    found: dict[str, Tensor] = {}
    hidden = [model.embed(ids, mask) for ids, mask in batches]
    for index in range(2):
        with model.block(index) as block:
            collector, first = Collector(model.block_linears(index), pick), 0
            with collector:
                for number, (ids, mask) in enumerate(batches):
                    collector.start(first, mask)
                    call = model.calls(ids, mask)[index]
                    hidden[number] = block(hidden[number], **call)
                    first += len(ids)
            found |= collector.tensors()
    return found


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, T), min_size=2, max_size=4),
    pad=st.integers(0, 1000),
    seed=st.integers(0, 10**6),
)
def test_padding_enters_no_statistic(
    model: BlockModel, lengths: list[int], pad: int, seed: int
) -> None:
    """Windows padded together give what the same windows give one by one and unpadded."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(5, 1000, (n,), generator=generator) for n in lengths]
    ids = torch.full((len(texts), T), pad)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    pick = picked_rows(mask, 16)
    assert bool((pick < mask.sum(1, keepdim=True)).all())
    padded = measured(model, [(ids, mask)], pick)
    alone = measured(model, [(t[None], torch.ones_like(t[None])) for t in texts], pick)
    assert padded.keys() == alone.keys()
    for key, value in padded.items():
        torch.testing.assert_close(value, alone[key], rtol=1e-3, atol=1e-5, msg=key)
    assert int(padded["model.layers.1.mlp.down_proj.tokens"]) == sum(lengths)


@torch.no_grad()
def test_outliers_are_those_of_their_own_token() -> None:
    linear = torch.nn.Linear(64, 1, bias=False)
    x = torch.ones(1, 2, 64)
    x[0, 0, 3] = 10  # root mean square 1.6
    x[0, 1] *= 1000  # all alike, and 100 times as large as that
    with Collector({"l": linear}, torch.zeros(1, 1, dtype=torch.int64)) as collector:
        collector.start(0, torch.ones(1, 2))
        linear(x)
    share = collector.tensors()["l.outlier_share"]
    assert share[3] == 0.5
    assert share.sum() == 0.5


@torch.no_grad()
def test_what_a_linear_gives_and_channels_that_nothing_uses_are_seen() -> None:
    linear = torch.nn.Linear(3, 2, bias=False)
    linear.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, -2.0, 0.0]]))
    collector = Collector({"l": linear}, torch.zeros(2, 1, dtype=torch.int64))
    mask = torch.tensor([[1, 1], [1, 0]])
    x = torch.tensor([[[1.0, 2.0, 0.0], [-4.0, 1.0, 0.0]], [[2.0, 5.0, 0.0], [99.0, 99.0, 99.0]]])
    with collector:
        collector.start(0, mask)
        linear(x)
    found = collector.tensors()
    assert found["l.absmax"].tolist() == [4.0, 5.0, 0.0]
    assert found["l.output_absmax"].tolist() == [4.0, 10.0]
    assert found["l.mean_abs"].tolist() == pytest.approx([7 / 3, 8 / 3, 0.0])
    assert found["l.tokens"] == 3
    layer = {"name": "l", "dead_channels": int((found["l.absmax"] == 0).sum()), "divergence": 0}
    other = {"name": "m", "dead_channels": 0, "divergence": 0}
    (note,) = hygiene.layer_notes([layer, other], windows([[1]]), windows([[1]]))
    assert note.startswith("1 linear with input channels that no calibration token used")
    assert "l with 1" in note


def test_too_few_tokens_are_refused_by_name() -> None:
    hygiene.refuse_few("model.layers.3.mlp.up_proj", 128, 128)
    with pytest.raises(
        UserError, match=r"layers\.3\.mlp\.up_proj: 127 calib.* wanted at least 128"
    ):
        hygiene.refuse_few("model.layers.3.mlp.up_proj", 127, 128)


def test_what_is_not_finite_is_refused_by_the_block() -> None:
    hidden = torch.ones(5, 4)
    hygiene.refuse_not_finite("model.layers.2", hidden)
    hidden[1, 2], hidden[4, 0] = math.nan, math.inf
    with pytest.raises(UserError, match=r"model\.layers\.2: its output is NaN or Inf for 2 of 5"):
        hygiene.refuse_not_finite("model.layers.2", hidden)


@pytest.mark.parametrize(
    ("held", "ratio"),
    [
        # Each calibration token by the other window's: (2 + 1) / (2 + 2). Held out: by all four.
        ([[0, 0]], (3 / 4) / (5 / 6)),
        ([[1, 1]], (3 / 4) / (1 / 6)),
        ([[1], [0]], (3 / 4) / math.sqrt(5 / 36)),
    ],
)
def test_divergence_is_a_ratio_of_unigram_perplexities(held: list[list[int]], ratio: float) -> None:
    found = hygiene.token_divergence(windows([[0, 0], [0, 0]]), windows(held), 2)
    assert found == pytest.approx(ratio)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"gives token 7, and the model has embeddings for 7; want"):
        hygiene.token_divergence(windows([[1, 2], [3]]), windows([[7, 2]]), 7)


def test_divergence_sees_no_padding() -> None:
    padded, held = windows([[1, 2, 1], [2, 1], [1]]), windows([[1, 2], [2]])
    tail = torch.zeros(3, 2, dtype=torch.int64)
    more = Windows(torch.cat([padded.ids, tail], 1), torch.cat([padded.mask, tail], 1), 0, "x")
    assert hygiene.token_divergence(padded, held, 5) == hygiene.token_divergence(more, held, 5)


def test_profiles_diverge_by_jensen_and_shannon() -> None:
    one = torch.tensor([3.0, 1.0, 0.0])
    assert hygiene.profile_divergence(one, 5 * one) == 0
    # p = (3/4, 1/4, 0), q = (1/4, 1/4, 1/2), m = (1/2, 1/4, 1/4).
    other = torch.tensor([1.0, 1.0, 2.0])
    wanted = (0.75 * math.log(1.5) + 0.25 * math.log(0.5) + 0.5 * math.log(2)) / 2
    assert float(hygiene.profile_divergence(one, other)) == pytest.approx(wanted)
    ends = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert float(hygiene.profile_divergence(*ends)) == pytest.approx(math.log(2))
    nothing = torch.zeros(3)
    assert float(hygiene.profile_divergence(one, nothing)) == pytest.approx(math.log(2))
    assert float(hygiene.profile_divergence(nothing, one)) == pytest.approx(math.log(2))
    assert hygiene.profile_divergence(nothing, nothing) == 0


def test_a_model_without_linears_is_told_nothing_of_them() -> None:
    assert hygiene.layer_notes([], windows([[1] * 2000]), windows([[1] * 2000])) == []


@pytest.mark.parametrize(
    ("divergences", "tokens", "told"),
    [((0.002, 0.0039), 1024, False), ((0.002, 0.0041), 1024, True), ((0.1, 0.1), 1023, False)],
)
def test_inputs_unlike_those_of_the_calibration_text_are_told(
    divergences: tuple[float, ...], tokens: int, told: bool
) -> None:
    layers = [
        {"name": name, "dead_channels": 0, "divergence": value}
        for name, value in zip("ab", divergences, strict=True)
    ]
    notes = hygiene.layer_notes(layers, windows([[1] * 2000]), windows([[1] * tokens]))
    assert len(notes) == told
    assert not told or "most those of b; calibrate by data.path" in notes[0]


def test_notes_tell_padding_cuts_template_and_another_kind_of_text() -> None:
    text = windows([[1] * 8, [2] * 8, [3] * 4], template=6, short=1, cut=2, dropped=1)
    notes = hygiene.text_notes(text, windows([[5]]), 1.9)
    assert notes[0].startswith("only 20 calibration tokens")
    assert notes[1].startswith("17% of the calibration windows is padding, which is not counted")
    assert notes[1].endswith(": 1 conversation shorter than a window")
    assert notes[2:4] == [
        "2 conversations cut at 8 tokens",
        "1 document with nothing in them left out",
    ]
    assert notes[4].startswith("30% of the calibration tokens are of the chat template, the same")
    assert len(notes) == 5
    (kind,) = hygiene.text_notes(text, windows([[5]]), 2.1)[5:]
    assert "of another kind than the calibration text" in kind
    assert "2.1 times as unlikely" in kind


def test_a_clean_text_is_told_nothing_and_a_default_one_what_it_is() -> None:
    text = windows([list(range(512))] * 2)
    assert hygiene.text_notes(text, text, 1.0) == []
    docs = Windows(text.ids, text.mask, 0, PYTHON_DOCS)
    (note,) = hygiene.text_notes(docs, docs, 1.0)
    assert note.startswith("calibrated on 1,024 tokens of CPython's documentation")
    assert hygiene.counts(text) == {
        "samples": 2, "available": 0, "length": 512, "tokens": 1024, "padding_tokens": 0,
        "template_tokens": 0, "short": 0, "cut": 0, "dropped": 0,
    }  # fmt: skip


def test_real_texts_of_one_kind_are_near_and_of_others_far(
    shared_data: Path, tiny_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def cut(name: str, count: int, length: int) -> Windows:
        text = (shared_data / name).read_text(encoding="utf-8")[:200_000]
        return draw([text], tokenizer, count=count, length=length, seed=0, description=name)

    wiki = cut("wikitext2_train.txt", 32, 512)
    ratios = {
        name: hygiene.token_divergence(wiki, cut(name, 8, 256), 1024)
        for name in ("wikitext2_test.txt", "zh_wiki_calibration.txt", "humaneval.jsonl")
    }
    assert ratios["wikitext2_test.txt"] < 1.2
    assert ratios["zh_wiki_calibration.txt"] > 2 * hygiene.TOKENS_DIVERGE
    assert ratios["humaneval.jsonl"] > hygiene.TOKENS_DIVERGE
