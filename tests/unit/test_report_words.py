"""Numbers in words, differences between texts, axes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from compress.report import words
from compress.report.diff import word_diff
from compress.report.plots import Axis, Bar, Interval, Scales, Series, axis, bars, intervals, xy


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.012345, 3, "0.0123"),
        (29.2215, 4, "29.22"),
        (9.996, 3, "10.0"),
        (1540.4, 3, "1,540"),
        (-0.5, 2, "−0.50"),
        (0, 3, "0"),
        (None, 3, "–"),
        (math.nan, 3, "–"),
        (1e-12, 2, "0.0000000000010"),
    ],
)
def test_significant(value: float | None, digits: int, text: str) -> None:
    assert words.significant(value, digits) == text


@pytest.mark.parametrize(
    ("p", "text"), [(1.0, "p 1.0"), (0.0312, "p 0.031"), (1e-4, "p 0.00010"), (9e-5, "p < 0.0001")]
)
def test_p_value(p: float, text: str) -> None:
    assert words.p_value(p) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (36540, "36.5 kB"), (999_700, "1.00 MB"), (1.234e9, "1.23 GB")],
)
def test_size(value: float, text: str) -> None:
    assert words.said_size(value) == text  # with a blank as any
    assert words.size(value) == text.replace(" ", words.SPACE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.34, "340 ms"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (252, "4 min 12 s"),
        (3599.7, "1 h 00 min"),
        (3840, "1 h 04 min"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert words.seconds(value) == text.replace(" ", words.SPACE)


def test_signs_and_shares() -> None:
    assert words.signed(-3.44) == "−3.4"
    assert words.signed(1.25, 2) == "+1.25"
    assert words.signed(-0.01) == "0.0"
    assert [words.points(x) for x in (-0.012, 0.04, 0.0, 2.0)] == ["−0.01", "+0.04", "0.0", "+2.0"]
    assert [words.several(n, "item") for n in (1, 2)] == ["1 item", "2 items"]
    assert words.percent(0.9431) == "94.3%"
    assert words.many(134515008) == "135\u00a0M"
    assert words.comparison(50, 90, "faster", "slower") == "1.80×\u00a0faster"
    assert words.comparison(90, 50, "faster", "slower") == "1.80×\u00a0slower"
    assert words.comparison(100, 101, "faster", "slower") == "unchanged within 2%"
    assert words.comparison(0, 1, "faster", "slower") == "not comparable"
    assert words.comparison(50, 90, "faster", "slower", (0.4, 1.1)) == "not measurably changed"
    assert words.comparison(50, 90, "faster", "slower", (0.4, 0.9)) == "1.80×\u00a0faster"
    assert words.moment("2026-11-29T14:05:31+00:00") == "2026-11-29 14:05\u00a0UTC"


@pytest.mark.parametrize(
    ("difference", "low", "high", "said"),
    [
        (-7.1, -13.3, -1.02, ("−7.1", "−13.3 to −1.0")),
        (-0.0312, -0.0609, 0.0104, ("−0.031", "−0.061 to +0.010")),
        (0.00061, 0.00012, 0.00118, ("+0.0006", "+0.0001 to +0.0012")),
        (-0.01, -0.03, 0.0, ("−0.010", "−0.030 to 0.000")),
        # An end that is not zero never reads as zero.
        (-5.0, -9.0, -0.0004, ("−5.0", "−9.0 to −0.0004")),
        # The interval of one item is that item.
        (0.004, 0.004, 0.004, ("+0.0040", "+0.0040 to +0.0040")),
        (0.0, 0.0, 0.0, ("0.0", "0.0 to 0.0")),
        (-1e-14, -1e-14, 1e-14, ("0.0", "0.0 to 0.0")),
    ],
)
def test_the_ends_of_an_interval_have_the_digits_that_tell_them_apart(
    difference: float, low: float, high: float, said: tuple[str, str]
) -> None:
    assert words.paired(difference, (low, high)) == said


TASKS = ("cloze, accuracy", "short answers, contained", "summaries")


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ((), ""),
        (("a", "b"), "a and b"),
        (("a", "b", "c"), "a, b and c"),
        (TASKS[:1], "cloze, accuracy"),
        (TASKS[:2], "cloze, accuracy; and short answers, contained"),
        (TASKS, "cloze, accuracy; short answers, contained; and summaries"),
        (("bits=4,seed=1", "bits=4,seed=2"), "bits=4,seed=1; and bits=4,seed=2"),
        (("rows 1,22", "b"), "rows 1,22; and b"),
        (("a,256", "b"), "a,256; and b"),
        (("1,024 tokens", "512"), "1,024 tokens and 512"),
        (("1,234,567", "512", "64"), "1,234,567, 512 and 64"),
    ],
)
def test_a_list_is_parted_so_that_its_entries_can_be_told(
    items: tuple[str, ...], text: str
) -> None:
    assert words.listed(items) == text
    assert words.listed(items, "or") == text.replace(" and ", " or ")


def test_words_that_differ_are_marked() -> None:
    before, after = word_diff("It was a cold day.", "It was a warm day.")
    assert before == [("It was a ", False), ("cold", True), (" day.", False)]
    assert after == [("It was a ", False), ("warm", True), (" day.", False)]


def test_chinese_is_compared_by_character() -> None:
    before, after = word_diff("早上好，你好吗？", "早上好，您好吗？")
    assert [text for text, marked in before if marked] == ["你"]
    assert [text for text, marked in after if marked] == ["您"]


@given(st.text(max_size=60), st.text(max_size=60))
def test_pieces_join_to_the_whole(before: str, after: str) -> None:
    left, right = word_diff(before, after)
    assert "".join(text for text, _ in left) == before
    assert "".join(text for text, _ in right) == after
    same = ["".join(text for text, marked in side if not marked) for side in (left, right)]
    assert same[0] == same[1]


finite = st.floats(-1e9, 1e9, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-9)


@given(st.lists(finite, max_size=20))
def test_every_value_lies_on_its_axis(values: list[float]) -> None:
    scale = axis(values)
    assert all(-1e-9 <= scale.share(v) <= 1 + 1e-9 for v in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    assert all(-1e-9 <= scale.share(t) <= 1 + 1e-9 for t in ticks)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_every_value_lies_on_its_logarithmic_axis(values: list[float]) -> None:
    scale = axis(values, log=True)
    assert all(0 <= scale.share(v) <= 1 for v in values)
    assert len(scale.ticks()) <= 5


def test_ticks_are_round() -> None:
    assert Axis(0, 16384).ticks() == [0, 5000, 10000, 15000]
    assert Axis(0.5, 300, log=True).ticks() == [1, 10, 100]


def test_plot_places_points_and_leaves_gaps() -> None:
    series = Series("s", "after", [(0, 0.0), (1, None), (2, 10.0)])
    drawn = xy([series], Scales(Axis(0, 2), Axis(0, 10), "x", "<y>"), height=100)
    assert drawn.count("<circle") == 2
    assert 'cx="0%" cy="100"' in drawn
    assert 'cx="100%" cy="0"' in drawn
    assert 'class="line' not in drawn  # no line across the gap
    assert "&lt;y&gt;" in drawn


def test_bars_are_in_proportion() -> None:
    drawn = bars([Bar("a", 50.0, "before", "50"), Bar("<b>", 100.0, "after", "100")])
    assert '<rect width="50%"' in drawn
    assert '<rect width="100%"' in drawn
    assert "&lt;b&gt;" in drawn


def test_interval_lies_around_zero() -> None:
    drawn = intervals([Interval("t", 0.0, -4.0, 4.0, "after", "0")], "points", words.significant)
    assert isinstance(drawn, Markup)
    assert 'cx="50%"' in drawn


@pytest.mark.parametrize(
    ("token", "seen"), [(" the", " the"), ("\n", "⏎"), ("  \t", "␣␣⇥"), ("", "")]
)
def test_a_token_of_blanks_is_seen(token: str, seen: str) -> None:
    assert words.visible(token) == seen
