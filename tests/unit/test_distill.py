"""What distill is told and refuses, and the text that it puts together."""

import pytest
import torch

from compress.errors import ConfigError, UserError
from compress.stages.distill import Distill, _joined
from compress.text.windows import Windows
from compress.training.learning import RATES


def test_every_wrong_setting_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        Distill(samples=0, rate=0.0, loss="kld", train="all", precision="fp8", beta=1.0, hard=2.0)
    assert str(error.value).splitlines() == [
        "distill.samples is 0; wanted at least 1",
        "distill.rate is 0.0; wanted above 0",
        "distill.loss is 'kld'; wanted one of kl, reverse_kl, jensen_shannon",
        "distill.train is 'all'; wanted one of scales, latent, adapters",
        "distill.precision is 'fp8'; wanted one of float32, bfloat16",
        "distill.beta is 1.0; wanted between 0 and 1",
        "distill.hard is 2.0; wanted 0 to 1",
    ]


def test_rates_are_known_for_every_number_of_bits() -> None:
    assert set(RATES) == {4, 8}
    assert RATES[8].scales < RATES[4].scales


def test_a_teacher_that_is_no_model_is_refused() -> None:
    assert Distill().teacher_folder() is None
    with pytest.raises(UserError, match=r"^distill\.teacher=nowhere: no config\.json there"):
        Distill(teacher="nowhere").teacher_folder()


def test_what_the_model_wrote_is_cut_into_windows_of_the_text_s_length() -> None:
    ids = torch.arange(12).view(3, 4)
    text = Windows(ids, torch.ones_like(ids), 0, "text")
    found = _joined(text, torch.arange(100, 114).view(2, 7))
    assert found.ids[:3].tolist() == ids.tolist()
    assert found.ids[3:].tolist() == [[100 + 4 * row + i for i in range(4)] for row in range(3)]
    assert bool(found.mask.all())
    assert found.tokens == 24
