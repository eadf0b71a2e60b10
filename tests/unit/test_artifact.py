"""A stage's result is whole or not there."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import Artifact, differences, fingerprint, write_json, write_text
from compress.errors import UserError

KEY = {"stage": "quantize", "quantize": {"bits": 8, "keep": []}, "inputs": {"dense": "a"}}


def make(tmp_path: Path) -> Artifact:
    return Artifact("quantize", tmp_path / "stages" / "quantize", tmp_path / "stages")


def test_from_begin_to_finish(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    assert artifact.manifest() is None
    assert artifact.begin(KEY) is False
    (artifact.out / "weights").write_text("x")
    assert artifact.manifest() is None
    artifact.finish({"key": KEY})
    assert artifact.manifest() == {"key": KEY}
    assert (artifact.folder / "weights").read_text() == "x"
    assert not artifact.partial.exists()


def test_interrupted_work_goes_on_only_with_the_same_key(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.begin(KEY)
    (artifact.work / "block_0").write_text("done")
    assert artifact.begin(KEY) is True
    assert (artifact.work / "block_0").exists()
    assert artifact.begin({**KEY, "quantize": {"bits": 4}}) is False
    assert not (artifact.work / "block_0").exists()


@pytest.mark.parametrize("left", ['{"key": {"st', "", "[1]", '{"stage": "quantize"}'])
def test_a_manifest_that_was_cut_short_is_told_or_made_again(tmp_path: Path, left: str) -> None:
    artifact = make(tmp_path)
    artifact.begin(KEY)
    artifact.finish({"key": KEY})
    artifact.manifest_file.write_text(left)
    said = rf"^{artifact.manifest_file}: damaged or cut short \(.*\); make .* force=\[quantize\]$"
    with pytest.raises(UserError, match=said):
        artifact.manifest()
    again = replace(artifact, rebuilt=True)
    assert again.manifest() is None
    again.begin(KEY)
    again.finish({"key": KEY})
    assert artifact.manifest() == {"key": KEY}


def test_the_old_result_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.begin(KEY)
    (artifact.out / "weights").write_text("old")
    artifact.finish({"key": KEY})
    artifact.begin({**KEY, "version": 2})
    (artifact.out / "weights").write_text("half")
    assert (artifact.folder / "weights").read_text() == "old"
    assert artifact.manifest() == {"key": KEY}


def test_what_a_killed_run_was_writing_is_not_gone_on_from(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.begin(KEY)
    (artifact.work / "block_0").write_text("done")
    for name in (".tmpA1b2C3", "shard-00000.tmp", ".config.json.tmp"):
        (artifact.out / name).write_text("half")
    assert artifact.begin(KEY) is True
    assert not list(artifact.out.iterdir())
    assert (artifact.work / "block_0").exists()


def test_scratch_whose_result_has_moved_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make(tmp_path)
    artifact.begin(KEY)
    (artifact.work / "block_0").write_text("done")
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if target == artifact.manifest_file:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    with pytest.raises(KeyboardInterrupt):
        artifact.finish({"key": KEY})
    assert artifact.manifest() is None
    assert artifact.begin(KEY) is False
    assert not (artifact.work / "block_0").exists()


def test_a_manifest_without_its_folder_is_no_artifact(tmp_path: Path) -> None:
    artifact = make(tmp_path)
    artifact.begin(KEY)
    artifact.finish({"key": KEY})
    artifact.folder.rmdir()
    assert artifact.manifest() is None


def test_differences_name_each_field_with_both_values() -> None:
    new = {**KEY, "quantize": {"bits": 4, "keep": ["*.0.*"]}}
    assert differences(KEY, new) == [
        "quantize.bits was 8, is now 4",
        'quantize.keep was [], is now ["*.0.*"]',
    ]
    assert differences(KEY, KEY) == []


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), trees, max_size=4))
def test_equal_keys_have_equal_fingerprints_whatever_their_order(key: dict[str, object]) -> None:
    backwards = dict(reversed(list(key.items())))
    assert fingerprint(key) == fingerprint(backwards)
    assert fingerprint({**key, "z": 1}) != fingerprint(key)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_text() == '{\n  "a": 1\n}\n'
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "\ud800")
    assert file.read_text() == '{\n  "a": 1\n}\n'
