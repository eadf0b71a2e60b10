"""The comparison with the peers: the same tokens for all, one judge, and what is reported."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import one_hot
from transformers import PreTrainedTokenizerFast

from compress.engines import Preflight
from compress.eval import fidelity
from compress.eval.items import Item
from compress.qtensor import QuantSpec
from compress.quantization_config import quantization_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts that stand beside each other, no package
bench, make, table, worker = map(
    import_module, ("fidelity", "fidelity_make", "fidelity_table", "worker_judge")
)


def byte_tokenizer(*, bos: bool) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate(alphabet)} | {"<s>": 256, "</s>": 257, "Ġa": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("bos", [False, True])
def test_our_pipeline_draws_just_the_tokens_that_the_peers_get(tmp_path, bos):
    tokenizer = byte_tokenizer(bos=bos)
    text = "\n".join(f"line {i} has a few words, 日本 and a number" for i in range(400))
    ids = fidelity.windows(text, tokenizer, 48, 128)
    assert ids.shape == (48, 128)
    setting = make.Setting(
        chosen=Preflight(["a"], ["b"], QuantSpec(4), []),
        model=tmp_path,
        train=tmp_path / "train.txt",
        ids=ids,
        text=tmp_path / "calibration.txt",
        heldout=tmp_path / "heldout.txt",
        folder=tmp_path,
    )
    setting.heldout.write_text("other words " * 100)
    setting.text.write_text(make.calibration_text(tokenizer, text, ids))
    assert make.drawn(setting, tokenizer).equal(ids)
    setting.text.write_text(text)
    assert not make.drawn(setting, tokenizer).equal(ids)


def test_a_checkpoint_that_quantizes_other_linears_is_not_compared(tmp_path):
    spec = QuantSpec(4, group_size=64)
    chosen = Preflight(["mlp.up", "mlp.down"], ["attn.q", "lm_head"], spec, [])

    def write(spec: QuantSpec, ignore: list[str]) -> None:
        specs = {name: spec for name in (*chosen.quantize, *chosen.ignore) if name not in ignore}
        config = {"quantization_config": quantization_config(specs, ignore)}
        (tmp_path / "config.json").write_text(json.dumps(config))

    write(spec, chosen.ignore)
    make.check_alike(tmp_path, chosen)
    write(spec, ["attn.q", "mlp.up", "lm_head"])
    with pytest.raises(SystemExit, match=r"mlp\.up and 0 others"):
        make.check_alike(tmp_path, chosen)
    write(QuantSpec(4), chosen.ignore)
    with pytest.raises(SystemExit, match=r"mlp\.up and 1 others"):
        make.check_alike(tmp_path, chosen)


def test_a_run_is_measured_from_outside(tmp_path):
    code = (
        "block = bytearray(700_000_000); block[::4096] = bytes(len(block[::4096])); print('done')"
    )
    status, seconds, peak = make.measured([sys.executable, "-c", code], tmp_path / "log")
    assert status == 0
    assert 0 < seconds < 60
    assert 700e6 < peak < 2e9
    assert (tmp_path / "log").read_text() == "done\n"
    assert make.measured([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")[0] == 3


def test_items_are_asked_as_their_task_is():
    choice = {"id": "1", "query": "Why?", "choices": ["a", "b"], "gold": 1}
    pair = {"id": "2", "good": "It is.", "bad": "It are."}
    word = {"id": "3", "context": "Once upon a", "target": "time"}
    assert worker.item(worker.ARC_EASY, choice) == Item(
        "1", "Question: Why?\nAnswer:", ("b",), ("a", "b")
    )
    assert worker.item(worker.BLIMP, pair) == Item("2", "", ("It is.",), ("It is.", "It are."))
    assert worker.item(worker.LAMBADA, word) == Item("3", "Once upon a", ("time",))


def test_items_are_spread_over_their_file(tmp_path):
    file = tmp_path / "lambada.jsonl"
    records = [{"id": str(i), "context": "c", "target": "t"} for i in range(10)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [i.id for i in worker.items(worker.LAMBADA, file, 4)] == ["0", "2", "5", "7"]
    assert len(worker.items(worker.LAMBADA, file, 99)) == 10


class Alphabet:
    """Finds the token after the last one likeliest: after `a`, `b`."""

    device = "cpu"

    def __call__(self, input_ids, use_cache):
        return SimpleNamespace(logits=one_hot(input_ids + 1, 300).float())


def test_a_word_is_right_where_greedy_decoding_writes_it():
    tokenizer = byte_tokenizer(bos=True)
    assert worker.writes(Alphabet(), tokenizer, "letters:a", "bcd")
    assert not worker.writes(Alphabet(), tokenizer, "letters:a", "bce")
    assert not worker.writes(Alphabet(), tokenizer, "letters:b", "bcd")


def test_a_cloze_asks_for_its_word_after_a_space(monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "writes", lambda *said: not asked.append(said[2:]))
    its = [Item("1", "Once upon a", ("time",)), Item("2", "Once upon a ", ("time",))]
    lambada = next(task for task in worker.TASKS if task.kind == "cloze")
    assert worker.correct(Alphabet(), byte_tokenizer(bos=True), lambada, its, 2) == [True, True]
    assert asked == [("Once upon a", " time"), ("Once upon a ", "time")]


def judged(kl: float, right: str, **more: object) -> dict:
    correct = dict.fromkeys(table.TASKS, right)
    return {"kl": [kl, kl], "top1": [0.5, 0.7], "nll": [3.0, 3.0], "correct": correct, **more}


def cost(label: str) -> dict:
    return {
        "label": label,
        "bytes": 2_500_000,
        "bits_per_weight": 4.25,
        "seconds": 12.3,
        "peak_rss_bytes": 1_500_000_000,
        "versions": {"llmcompressor": "1.2.3"},
    }


def report() -> dict:
    hardware = {"cpu": "A CPU", "cores": 2, "memory_bytes": 8_000_000_000}
    return {
        "model": "Model",
        "parameters": 135e6,
        "scheme": "W4A16",
        "quantized": 7,
        "left_alone": ["lm_head", "q_proj"],
        "calibration": {"text": "a.txt", "windows": 48, "tokens": 512},
        "judge": {"windows": 8, "tokens": 1024, "items": 4, "task_dtype": "float32"},
        "hardware": hardware,
        "versions": {"torch": "9", "transformers": "8"},
        "original": judged(0.0, "1110"),
        "results": {
            "rtn": judged(0.4, "1100", **cost("rounding")),
            "gptq": judged(0.2, "1000", **cost("GPTQ")),
            "awq": {"label": "AWQ", "failed": "RuntimeError: no accelerator"},
            "ours-rtn": judged(0.1, "1100", **cost("our rounding")),
            "ours": judged(0.15, "1100", **cost("ours")),
        },
    }


def test_the_average_counts_every_task_alike():
    one = judged(0.0, "1")
    one["correct"] = {"hellaswag": "1000", "arc_easy": "11", "lambada": "0", "blimp": "10"}
    assert table.average(table.rows(one).sum(0)) == pytest.approx((25 + 100 + 0 + 50) / 4)
    assert table.accuracy(one, "hellaswag") == 25
    assert table.beside(one, one) == "+0.0 [+0.0, +0.0]"


def test_a_table_holds_what_was_measured_and_ours_beside_the_best_peer():
    text = table.table(report(), report())
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "7 linears quantized; 4 items of each task at most, in float32." in text
    scores = " | ".join(["50.0"] * 5)
    assert lines["rounding"].startswith(f"| rounding | 0.4000 | 60.0% | 20.09 | {scores} | -25.0 [")
    assert lines["rounding"].endswith("] | 2.5 | 4.25 | 12 | 1.5 |")
    assert "does not run: `RuntimeError: no accelerator`" in lines["AWQ"]
    assert len({line.count("|") for line in lines.values()}) == 1
    assert "Of the KL of the best peer here (GPTQ): our rounding 0.50, ours 0.75; average" in text
    assert "over the tasks, our rounding less that peer: +25.0 [" in text


def test_a_table_says_where_text_or_machine_are_not_those_of_the_first():
    lines = table.table(report(), report()).splitlines()
    other = report()
    other["calibration"]["text"] = "b.txt"
    other["hardware"]["cores"] = 4
    assert lines[0] == "### W4A16"
    assert lines[2] == "7 linears quantized; 4 items of each task at most, in float32."
    lines = table.table(other, report()).splitlines()
    assert lines[0] == "### W4A16, calibrated on `b.txt`"
    assert lines[2].endswith("in float32. A CPU, 4 cores, 8 GB.")


def test_results_on_another_text_stand_beside_the_first_and_do_not_replace_them(tmp_path):
    names = {}
    for train in ("wikitext2_train.txt", "other.txt"):
        chosen = Preflight([], [], QuantSpec(4), [])
        setting = make.Setting(chosen, tmp_path, Path(train), None, None, None, tmp_path / "w4a16")
        names[train] = bench.result_name(setting)
    assert list(names.values()) == ["fidelity-w4a16", "fidelity-w4a16-on-other"]
    for name, text in zip(names.values(), names, strict=True):
        found = report()
        found["calibration"]["text"] = text
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    page = tmp_path / "page.md"
    page.write_text("<!-- tables: begin -->\n<!-- tables: end -->\n")
    table.write_tables(tmp_path, page)
    assert [line for line in page.read_text().splitlines() if line.startswith("###")] == [
        "### W4A16",
        "### W4A16, calibrated on `other.txt`",
    ]


def test_tables_replace_those_that_were_there(tmp_path):
    (tmp_path / "fidelity-w4a16.json").write_text(json.dumps(report()))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nafter\n")
    table.write_tables(tmp_path, page)
    once = page.read_text()
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert "old" not in once
    assert "peers: llmcompressor 1.2.3" in once
    table.write_tables(tmp_path, page)
    assert page.read_text() == once
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="tables: begin"):
        table.write_tables(tmp_path, page)


def test_the_page_says_what_the_committed_results_say(tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs/fidelity.md").read_text(encoding="utf-8"), encoding="utf-8")
    table.write_tables(ROOT / "benchmarks/results", page)
    assert page.read_text(encoding="utf-8") == (ROOT / "docs/fidelity.md").read_text("utf-8")
