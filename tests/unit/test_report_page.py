"""The page and the Markdown: whole, offline, showing the figures and no more."""

import csv
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_run import EVIL, STAGES, Tags, fixture
from shown import unfounded

from compress import judged
from compress.report import words
from compress.report.figures import figures
from compress.report.ledger import Terms
from compress.report.pages import page, sheet, short
from compress.report.tasks import unasked


@pytest.fixture
def run(tmp_path: Path) -> SimpleNamespace:
    return fixture(tmp_path)


def test_page_is_whole_and_needs_nothing_else(run: SimpleNamespace) -> None:
    text = page(figures(run))
    tags = Tags(text)
    assert tags.open == []
    for tag, attributes in tags.seen:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert sum(tag == "article" for tag, _ in tags.seen) == 20
    assert sum(a.get("class") == "marks" for _, a in tags.seen) == 20


def test_page_says_where_the_kv_cache_is_in_8_bit(run: SimpleNamespace) -> None:
    assert "in 8 bit" not in "".join(Tags(page(figures(run))).words)
    run.manifests["plan"]["metrics"]["kv_cache"]["kind"] = "kv8"
    run.manifests["serve"]["metrics"]["kv_cache"] = "v8"
    run.manifests["score"]["metrics"]["fidelity"]["kv_cache"] = "kv8"
    shown = "".join(Tags(page(figures(run))).words)
    assert "KV cache 47.2\u00a0MB with K and V in 8 bit, activations" in shown
    assert "KV cache with K and V in 8 bit, beside the weights" in shown
    assert "the compressed model's KV cache with V in 8 bit, the original's in 16 bit" in shown
    assert "as loaded from disk, its KV cache with K and V in 8 bit, as for the tasks" in shown


UNASKED = [
    {"name": "long_questions", "fit": 0, "of": 12, "context": 1024},
    {"name": "needles", "fit": 1, "of": 3, "context": 1024},
]
NONE_FITS = (
    "long questions was not asked: none of the 12 items taken fits the window of 1,024 tokens, "
    "prompt and answer together."
)
SOME_FIT = (
    "needles was asked 1 of the 3 items taken: the others do not fit the window of 1,024 tokens, "
    "prompt and answer together."
)


@pytest.mark.parametrize(
    ("fit", "of", "said"),
    [
        (0, 1, "was not asked: the 1 item taken does not fit the window"),
        (0, 2, "was not asked: none of the 2 items taken fits the window"),
        (1, 2, "was asked 1 of the 2 items taken: the other does not fit the window"),
        (1, 1200, "was asked 1 of the 1,200 items taken: the others do not fit the window"),
    ],
)
def test_what_of_a_task_does_not_fit_is_said_of_one_as_of_many(
    fit: int, of: int, said: str
) -> None:
    task = {"name": "needles", "fit": fit, "of": of, "context": 512}
    assert unasked(task) == f"needles {said} of 512 tokens, prompt and answer together."


@pytest.mark.parametrize("others", [True, False])
def test_tasks_that_do_not_fit_the_window_are_told_with_the_tasks(
    run: SimpleNamespace, others: bool
) -> None:
    score = run.manifests["score"]["metrics"]
    assert figures(run)["unasked"] == []  # of a run from before this was counted
    score["unasked"] = UNASKED
    if not others:
        score["tasks"] = score["drift"] = []
        run.config.score.gate.tasks = {}
    found = figures(run)
    assert found["unasked"] == UNASKED
    (told,) = [f["text"] for f in found["verdict"]["findings"] if f["about"] == "Not asked"]
    assert told == NONE_FITS
    assert ", 1 task not asked" in found["verdict"]["headline"]
    markup = page(found)
    assert Tags(markup).open == []
    shown = markup[markup.index('<section id="tasks">') : markup.index('<section id="speed">')]
    assert ("<table>" in shown) == others
    assert "was not run" not in shown
    text = short(found)
    shown_text = text[text.index("\n## Tasks\n") : text.index("\n## Stages\n")]
    for sentence in (NONE_FITS, SOME_FIT):
        assert sentence in shown
        assert f"\n{sentence}\n" in shown_text


def test_a_score_without_tasks_or_answers_was_run_all_the_same(run: SimpleNamespace) -> None:
    run.manifests["score"]["metrics"] |= {"tasks": [], "drift": []}
    run.config.score.gate.tasks = {}
    (run.work / "outputs.jsonl").write_text("")
    markup = page(figures(run))
    assert Tags(markup).open == []
    assert "<code>score</code> was not run" not in markup
    assert "No task was asked: <code>score.tasks</code> is empty." in markup
    assert "None to show: the tasks that were asked have no answers, or" in markup


def test_one_is_no_plural(run: SimpleNamespace) -> None:
    score = run.manifests["score"]["metrics"]
    score["fidelity"]["windows"] = 1
    score["tasks"][0] |= {"n": 1, "lost": 1}
    for manifest in run.manifests.values():
        manifest["hardware"] = manifest["hardware"] | {"cores": 1}
    run.manifests["serve"]["metrics"]["after"]["requests"] = 1
    run.manifests["distill"]["metrics"]["tasks"] = {"knowledge": {"items": 1, "original": 65.0}}
    for point in run.manifests["distill"]["metrics"]["curve"]:
        point |= {"tasks": {"knowledge": 65.0}, "falls": []}
    found = figures(run)
    shown = "".join(Tags(page(found)).words)
    for said in ("Fixture CPU, 1 core\n", "On 1 window of", "1 request of", "knowledge, 1 item"):
        assert said in shown, said
    for text in (shown, short(found)):
        assert not re.search(r"\b1 (cores|items|windows|requests|threads|tokens)\b", text)
    assert "; Fixture CPU, 1 core, 25.0" in short(found)


def test_a_checkpoint_that_is_judged_has_the_bits_of_its_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fixture(tmp_path, "plan", "export")
    run.config.checkpoint = "checkpoint"
    run.artifacts |= {"dense": tmp_path, "checkpoint": tmp_path}
    sizes = {"before": 4000, "after": 2250, "measured": True, "by_part": None}
    given = {"scheme": "W8A8", "parameters": 2000, "bytes": sizes, "bits_per_weight": 9.0}
    monkeypatch.setattr(judged, "facts", lambda *_: given)
    found = figures(run)
    assert found["bits_per_weight_before"] == 16
    assert "| bits a weight | 16.0 | 9.00 |" in short(found)
    shown = "".join(Tags(page(found)).words)
    assert "Bits a weight over the whole model: 16.0 → 9.00." in shown
    assert figures(fixture(tmp_path, "plan"))["bits_per_weight_before"] is None


def test_the_tokens_of_the_largest_kl_have_their_article(run: SimpleNamespace) -> None:
    found = figures(run)
    number = len(found["fidelity"]["worst"])
    shown = "".join(Tags(page(found)).words)
    wanted = rf"The {number} tokens? of the largest KL on that text, each with the likeliest"
    assert re.search(wanted, shown)


def test_text_of_a_model_is_shown_not_run(run: SimpleNamespace) -> None:
    text = page(figures(run))
    assert "<script" not in text
    assert "<img" not in text
    shown = "".join(Tags(text).words)
    assert f"Question 2: {EVIL}" in shown
    assert EVIL in shown
    assert 'quantize.keep = ["<b>"]' in shown


def test_page_shows_the_figures(run: SimpleNamespace) -> None:
    run.manifests["serve"]["metrics"]["after"]["attention"] = "SDPA"
    text = page(figures(run)).replace("\u00a0", " ")
    for wanted in (
        "269 MB",
        "180 MB",
        "0.0124",
        "94.31%",
        "29.41",
        "20.1 ms",
        "81.3 tok/s",
        "−17.5 to −2.5",
        "1 min 58 s",
        "Of quantize: search 12.5 s, writing 250 ms.",
        "from an earlier run",
        "24,576 tokens",
        "yarn",
        "2 threads, one request at a time, the two models by turns. Attention: SDPA. The step of "
        "decoding: as its modules are for the original, compiled for the compressed model.",
        "0.000310, over 6 layers that stand for all 48",
        "Paris &lt;i&gt;of course&lt;/i&gt;",
    ):
        assert wanted in text, wanted


@pytest.mark.parametrize("left_out", [*STAGES, "all"])
def test_every_stage_may_be_missing(tmp_path: Path, left_out: str) -> None:
    names = tuple(STAGES) if left_out == "all" else (left_out,)
    found = figures(fixture(tmp_path, *names))
    text = page(found)
    assert Tags(text).open == []
    for name in names:
        assert f"<code>{name}</code> was not run" in text
    assert short(found).startswith("# Fixture-135M: compression report\n\n**Fixture-135M")
    if left_out == "all":
        assert found["verdict"] == {
            "headline": "Fixture-135M: nothing was measured.",
            "findings": [],
        }
        assert found["bytes"]["before"] is None
        assert found["stages"] == []


def test_integers_that_learned_from_another_model(run: SimpleNamespace) -> None:
    assert "while the integers stayed frozen. " in page(figures(run))
    run.manifests["distill"]["metrics"] |= {"teacher": "Model-7B", "train": "latent"}
    text = page(figures(run))
    assert "parameters, the integers among them. " in text
    assert "Soft labels of Model-7B: top" in text


def test_stages_that_changed_nothing(run: SimpleNamespace) -> None:
    run.manifests["extend"]["metrics"] = {
        "method": None,
        "factor": 1.0,
        "window": {"before": 8192, "after": 8192},
        "kept": False,
        "notes": ["off"],
    }
    run.manifests["distill"]["metrics"] |= {"kept": False, "best_step": 0}
    run.manifests["plan"]["metrics"]["memory"] |= {"given": None, "fits": None}
    found = figures(run)
    text = page(found)
    assert "Left as it was: 8,192 positions." in text
    assert "It did not help, and was not kept." in text
    run.manifests["distill"]["metrics"] |= {"held_back": True}
    assert "Where it helped, a task fell: it was not kept." in page(figures(run))
    said = {f["about"]: f["text"] for f in found["verdict"]["findings"]}
    assert said["Memory"].endswith("No limit was given to compare it with.")
    assert said["Distillation"] == "Not kept: held-out KL stays at 0.0131."


def test_task_scores_stand_beside_the_kl_of_each_measure(run: SimpleNamespace) -> None:
    assert "items</th>" not in page(figures(run))
    distill = run.manifests["distill"]["metrics"]
    for point, value in zip(distill["curve"], (62.5, 60.0, 40.0, 61.5, 57.5), strict=True):
        point |= {"tasks": {"knowledge": value, "short_words": 52.5}, "falls": []}
    fall = {"task": "knowledge", "before": 62.5, "after": 40.0, "p": 0.0117}
    distill["curve"][2]["falls"] = [fall]
    told = {
        "knowledge": {"items": 40, "original": 65.0},
        "short_words": {"items": 21, "original": 55},
    }
    distill |= {"tasks": told, "held_back": False}
    found = figures(run)
    text = page(found)
    assert unfounded(text, found, said=SENTENCES) == []
    shown = "".join(Tags(text).words)
    assert "knowledge, 40 itemsshort words, 21 items" in shown.replace("\n", "")
    rows = [re.sub("<.*?>", "|", row) for row in re.findall(r"<tr><td.*</tr>", text)]
    assert "||original||||65.0||55.0||" in rows
    assert "||20||0.0112||60.0||52.5||" in rows
    assert "||40||0.0104||40.0, fell||52.5||" in rows
    assert "Among the tasks that judge the result, too: knowledge; there they judge" in shown
    run.manifests["score"]["metrics"]["tasks"][0]["name"] = "other"
    assert "Among the tasks that judge" not in page(figures(run))


def test_markdown_holds_verdict_and_tables(run: SimpleNamespace) -> None:
    text = short(figures(run)).replace("\u00a0", " ")
    assert "| weights | 269 MB | 180 MB |" in text
    assert "| time to first token, P99 | 138 ms | 106 ms |" in text
    row = "| knowledge | accuracy | 40 | 62.5 | 52.5 | −10.0 | −17.5 to −2.5 | 0 | 4 | 15 |"
    assert row in text
    assert "| plan | 3.70 s | 1.00 GB | 30.0 MB | from an earlier run |" in text
    assert "Of quantize: search 12.5 s, writing 250 ms." in text
    assert "<script" not in text


def test_seconds_by_part_of_a_stage_that_went_on_say_so(run: SimpleNamespace) -> None:
    found = figures(run)
    (row,) = (row for row in found["stages"] if row["seconds_by_part"])
    row["went_on"] = True
    for text in (short(found), page(found)):
        said = "Of quantize, since it went on: search 12.5 s, writing 250 ms."
        assert said in text.replace("\u00a0", " ")


def test_the_sheet_can_be_marked_and_runs_no_formula(run: SimpleNamespace) -> None:
    outputs = [*figures(run)["outputs"], {"task": "t", "before": "=1+1", "after": '-a,"b"\nc'}]
    written = sheet(outputs).encode()
    assert written.startswith(b"\xef\xbb\xbftask,id,")  # without these Excel reads no UTF-8
    rows = list(csv.DictReader(io.StringIO(written.decode("utf-8-sig"), newline="")))
    assert len(rows) == 21
    assert rows[0]["before"] == "The capital of France is Paris."
    assert rows[0]["references"] == "Paris"
    assert rows[4]["broken_after"] == "no_loop"
    assert (rows[0]["score_after"], rows[0]["kl"], rows[1]["kl"]) == ("0.0", "", "0.041")
    assert (rows[20]["before"], rows[20]["after"]) == ("'=1+1", '\'-a,"b"\nc')
    assert {row["mark"] for row in rows} == {""}


def test_page_says_how_what_was_written_changed(run: SimpleNamespace) -> None:
    shown = " ".join(Tags(page(figures(run))).words)
    assert "What was written, right or wrong" in shown
    assert "summaries 12 3 21.5 24.2 0 2" in " ".join(shown.split())


def test_page_weighs_what_the_run_cost_against_what_serving_saves(run: SimpleNamespace) -> None:
    assert "With report.requests=N" in _words(page(figures(run)))
    found = figures(run, Terms(requests=1_000_000, price=2.0, currency="EUR"))
    text = _words(page(found))
    before = found["ledger"]["serving"]["before"]["money"]
    assert f"{words.significant(before)} EUR" in text
    repaid = words.seconds(30 * 86400 * found["ledger"]["months_to_repay"])
    for shown in (text, _words(short(found))):
        assert f"run is paid for after {_words(repaid)} of serving" in shown
    found["ledger"]["months_to_repay"] = None
    found["ledger"]["spent"]["making"] = {"hours": 0.0, "money": 0.0}
    text = _words(page(found))
    assert "What making this checkpoint cost is not known here." in text
    assert "made: all stages" not in text


def _words(html: str) -> str:
    """What a person reads of it, blanks as one."""
    return " ".join(re.sub(r"<[^>]+>", "", html).replace("&nbsp;", " ").split())


SENTENCES = "float16 holds up to 65,504; scores from 0 to 100; the whole is 100%; at 95%"
"""Numbers of the page's own sentences, which are measured nowhere."""


def test_every_figure_of_the_page_is_in_the_data(run: SimpleNamespace) -> None:
    found = figures(run, Terms(requests=1_000_000, price=2.0, price_after=0.7, currency="EUR"))
    data = json.loads(json.dumps(found))
    assert unfounded(page(data), data, said=SENTENCES) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("fidelity", "kl"), 0.71717),
        (("latency", "after", "ttft_ms", "p99"), 731.77),
        (("tasks", 0, "difference"), -13.7),
        (("tasks", 0, "unseen_loss"), 7393.0),
        (("bytes", "shares", "mlp"), 0.7173),
        (("stages", 2, "peak_rss_bytes"), 7_370_000_000),
        (("ledger", "spent", "making", "money"), 7373.0),
        (("extend", "ppl", "after"), 73.73),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_figure_that_the_data_lack_is_found_on_the_page(
    run: SimpleNamespace, place: tuple[str | int, ...], value: float
) -> None:
    found = figures(run, Terms(requests=1_000_000, price=2.0))
    shown = json.loads(json.dumps(found))
    *outer, last = place
    part = shown
    for name in outer:
        part = part[name]
    part[last] = value
    assert unfounded(page(shown), found, said=SENTENCES)
