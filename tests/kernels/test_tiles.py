"""Which tile a launch takes: the regimes, parts of K, and tiles that were measured."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import UserError
from compress.kernels.tiles import A100, LOCKS, Gpu, Tile, bucket, default_tile, regime, space

H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 132)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 89, 128)
GPUS = (A100, H100, RTX_4090, Gpu("AMD Instinct MI300X", 0, 304))


@pytest.mark.parametrize(
    ("m", "name"),
    [(1, "decode"), (16, "decode"), (17, "middle"), (256, "middle"), (257, "prefill")],
)
def test_the_regimes(m: int, name: str) -> None:
    assert regime(m) == name


def test_decode_of_a_7b_fills_the_gpu_by_splitting_k() -> None:
    # 4096 channels are 64 tiles of 64; K is 32 steps of 128, or 16 of 256.
    assert default_tile("w8a8", 1, 4096, 32, H100).SPLITS == 8
    assert default_tile("w4a16", 1, 4096, 16, H100).SPLITS == 8
    assert default_tile("w4a16", 1, 14336, 16, H100).SPLITS == 2
    assert default_tile("w8a8", 4096, 4096, 32, H100) == Tile(128, 256, 1, 8, 3)
    assert default_tile("w8a8", 4096, 4096, 32, A100) == Tile(128, 128, 1, 8, 3)


@given(
    m=st.integers(1, 10_000),
    n=st.integers(1, 200_000),
    steps=st.integers(1, 500),
    gpu=st.sampled_from(GPUS),
    kernel=st.sampled_from(["w8a8", "w4a16"]),
)
def test_parts_of_k_have_two_steps_and_every_shared_tile_a_lock(
    m: int, n: int, steps: int, gpu: Gpu, kernel: str
) -> None:
    tile = default_tile(kernel, m, n, steps, gpu)
    assert tile.SPLITS == 1 or steps >= 2 * tile.SPLITS
    assert tile.SPLITS == 1 or tile.count(m, n) <= LOCKS
    assert space(kernel, m, gpu)[0].BLOCK_N == tile.BLOCK_N


@given(m=st.integers(1, 10_000))
def test_tokens_share_few_buckets(m: int) -> None:
    b = bucket(m)
    assert b == min(4096, max(16, b))
    assert m <= b or b == 4096
    assert b == 16 or 2 * m > b
    assert regime(b) == regime(m)


@pytest.mark.parametrize("kernel", ["w8a8", "w8a16", "w4a16"])
@pytest.mark.parametrize("n", [64, 512, 1024])
def test_more_tokens_than_the_last_bucket_never_lack_locks(kernel: str, n: int) -> None:
    pytest.importorskip("triton", reason="triton is installed on Linux only")
    from compress.kernels.tuned import tile_for

    for m in (4096, 4097, 20_000, 200_000):
        tile = tile_for(kernel, m, n, 4096, 32, torch.device("cpu"))
        assert tile.SPLITS == 1 or tile.count(m, n) <= LOCKS
    # Without the limit, 200000 tokens would share K as 4096 do.
    assert tile_for(kernel, 4096, 64, 4096, 32, torch.device("cpu")).SPLITS > 1


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_measured_tile_goes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is installed on Linux only")
    from compress.kernels import tuned

    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    tuned.forget()
    arguments = ("w8a8", 5, 64, 256, 2, torch.device("cpu"))
    assert tuned.tile_for(*arguments) == default_tile("w8a8", 16, 64, 2, A100)
    measured = Tile(16, 32, 2, 4, 6)
    file = tuned.cache_file(A100)
    tuned.keep(file, {tuned.key("w8a8", 7, 64, 256): measured})
    assert tuned.tile_for(*arguments) == measured
    assert tuned.tile_for("w8a8", 5, 64, 512, 4, torch.device("cpu")) != measured
    tuned.keep(file, {tuned.key("w4a16", 7, 64, 256): measured})
    assert len(tuned.table(file)) == 2
    with monkeypatch.context() as homeless:
        homeless.delenv(tuned.VARIABLE)
        homeless.setattr(Path, "home", _no_home)
        tuned.forget()
        assert tuned.tile_for(*arguments) == default_tile("w8a8", 16, 64, 2, A100)
    file.write_text("[]")
    tuned.forget()
    with pytest.raises(UserError, match="delete it"):
        tuned.tile_for(*arguments)
    tuned.forget()
