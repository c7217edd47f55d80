from __future__ import annotations

import pytest

from ctrl_megatron.metrics import device_peak_flops, mfu
from ctrl_megatron.metrics.flops import measure_cpu_peak_flops, table_peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_data_sheet_peaks(name: str, tflops: float) -> None:
    assert table_peak_flops(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "NVIDIA GeForce RTX 3090", "cpu", ""])
def test_an_unknown_device_names_the_key(name: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.peak_tflops_per_device"):
        table_peak_flops(name)


def test_the_configured_peak_wins() -> None:
    assert device_peak_flops("anything", configured_tflops=2.5, dtype="bfloat16") == 2.5e12
    assert device_peak_flops("NVIDIA H200", configured_tflops=None, dtype="bfloat16") == 989.4e12


def test_a_cpu_is_measured() -> None:
    assert measure_cpu_peak_flops(sizes=(128, 64), seconds=0.01) > 1e7
    assert device_peak_flops("cpu", configured_tflops=None, dtype="float32") > 1e7


def test_mfu() -> None:
    assert mfu(flops=3e12, seconds=2, devices=3, peak=1e12) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="positive"):
        mfu(flops=1, seconds=0, devices=1, peak=1)
