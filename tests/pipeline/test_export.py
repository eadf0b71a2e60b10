"""A checkpoint that is not what was measured does not leave export."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compress import checkpoint, pipeline
from compress.config import Config
from compress.errors import UserError
from compress.tensors import TensorFiles

Small = Callable[..., Config]
PLAIN = ("quantize.smooth=false", "quantize.clip=false")
UNTIL_QUANTIZE = ("stages=[calibrate,quantize]", *PLAIN)
SHARDS = ("stages=[calibrate,quantize,export]", *PLAIN, "export.shard_gb=0.0005")


def verified(out: Path) -> dict:
    return json.loads((out / "stages" / "export.json").read_text())["metrics"]["verified"]


def test_what_is_written_anew_is_read_back_and_a_flipped_byte_is_found(
    small: Small, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = pipeline.run(small("stages=[calibrate,quantize,export]", *PLAIN))
    assert verified(out)["read_back"] == 0
    assert "tensors, linked" in capsys.readouterr().err

    reshard = checkpoint.reshard

    def damaging(source: Path, folder: Path, *, shard_bytes: int) -> None:
        reshard(source, folder, shard_bytes=shard_bytes)
        file = TensorFiles.files(folder)[1]
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "reshard", damaging)
        with pytest.raises(UserError, match="read back from disk differs from what was written"):
            pipeline.run(small(*SHARDS, "force=[export]"))
    pipeline.run(small(*SHARDS, "force=[export]"))
    assert len(TensorFiles.files(out / "checkpoint")) > 1
    assert verified(out)["read_back"] == verified(out)["tensors"]
    assert verified(out)["kl_moved"] == 0
    assert "tensors, read back and equal" in capsys.readouterr().err


def test_another_kl_than_was_measured_is_refused_by_the_stage(small: Small) -> None:
    out = pipeline.run(small(*UNTIL_QUANTIZE))
    file = out / "stages" / "quantize.json"
    manifest = json.loads(file.read_text())
    manifest["metrics"]["heldout_kl"]["after"] += 0.01
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"KL 0\.\d+ as exported, 0\.\d+ as quantize measured it"):
        pipeline.run(small("stages=[calibrate,quantize,export]", *PLAIN))
