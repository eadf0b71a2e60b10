"""The peaks that plans reckon with: those of the kernels' floors, and dense, not sparse."""

import pytest

from compress.kernels.roofline import PEAKS, Peak
from compress.planning.devices import BANDWIDTH_SHARE, COMPUTE_SHARE, GPUS, Roofline

OTHERS = (
    # Its sheet gives both, with sparsity and without.
    Peak("A10G", 600e9, 70e12, 140e12, ""),
    # Its sheet gives 242 and 485 with sparsity, which doubles them.
    Peak("L4", 300e9, 242e12 / 2, 485e12 / 2, ""),
)


@pytest.mark.parametrize("peak", [*PEAKS, *OTHERS], ids=lambda peak: peak.name)
def test_plans_have_the_peaks_of_floors_and_data_sheets(peak: Peak) -> None:
    rates = GPUS[peak.name.lower().replace(" ", "")].rates
    half, int8 = rates["16"], rates["W8A8"]
    assert isinstance(half, Roofline)
    assert isinstance(int8, Roofline)
    assert half == rates["W8A16"] == rates["W4A16"]
    assert half.bytes_per_s == int8.bytes_per_s
    assert half.bytes_per_s == pytest.approx(BANDWIDTH_SHARE * peak.memory)
    assert half.flops_per_s == pytest.approx(COMPUTE_SHARE * peak.half, rel=5e-3)
    assert int8.flops_per_s == pytest.approx(COMPUTE_SHARE * peak.int8, rel=5e-3)


def test_no_gpu_is_left_unchecked() -> None:
    assert len(GPUS) == len(PEAKS) + len(OTHERS)
