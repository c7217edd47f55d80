"""The formula against an enumeration of every matrix product of a decoder."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrl_megatron.metrics import device_peak, mfu, model_flops
from ctrl_megatron.metrics.flops import measure_peak_flops, peak_flops


def matmul(m: int, k: int, n: int) -> int:
    """(m, k) @ (k, n): one multiply and one add per term."""
    return 2 * m * k * n


def enumerated(
    layers: int, h: int, f: int, q: int, kv: int, d: int, v: int, lens: list[int], gated: bool
) -> int:
    """Forward pass, product by product, attention row by row (row i sees i + 1 keys)."""
    total = 0
    for length in lens:
        for _ in range(layers):
            for columns in (q * d, kv * d, kv * d):
                total += matmul(length, h, columns)
            for _head in range(q):
                for row in range(length):
                    total += matmul(1, d, row + 1) + matmul(1, row + 1, d)
            total += matmul(length, q * d, h)
            total += matmul(length, h, f) * (2 if gated else 1) + matmul(length, f, h)
        total += matmul(length, h, v)
    return total


small = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(0, 3),
    sizes=st.tuples(small, small, small, small, small, small),
    lens=st.lists(st.integers(0, 9), max_size=4),
    gated=st.booleans(),
)
def test_formula_equals_enumeration(
    layers: int, sizes: tuple[int, int, int, int, int, int], lens: list[int], gated: bool
) -> None:
    h, f, q, kv, d, v = sizes
    shape = {
        "n_layers": layers,
        "hidden": h,
        "ffn": f,
        "heads": q,
        "kv_heads": kv,
        "head_dim": d,
        "vocab": v,
    }
    counts: dict[str, Any] = {"tokens": sum(lens), "projected_tokens": sum(lens)}
    counts |= {"pairs": sum(row + 1 for length in lens for row in range(length))}
    forward = model_flops(**shape, **counts, backward=False, gated_mlp=gated)
    assert forward == enumerated(layers, h, f, q, kv, d, v, lens, gated)
    assert model_flops(**shape, **counts, backward=True, gated_mlp=gated) == 3 * forward
    counts["projected_tokens"] = 0
    bodies = model_flops(**shape, **counts, backward=False, gated_mlp=gated)
    assert forward - bodies == sum(matmul(length, h, v) for length in lens)


def test_a_known_model_is_close_to_six_flops_per_parameter_and_token() -> None:
    """SmolLM2-135M has 134.5 M parameters; short sequences make attention scores negligible."""
    flops = model_flops(
        n_layers=30,
        hidden=576,
        ffn=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=49152,
        tokens=320,
        pairs=10 * 32 * 33 // 2,
        projected_tokens=320,
        backward=True,
    )
    assert flops / (6 * 134_515_008 * 320) == pytest.approx(1.0, abs=0.02)


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
    assert peak_flops(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "NVIDIA GeForce RTX 3090", "cpu", ""])
def test_an_unknown_device_names_the_key(name: str) -> None:
    with pytest.raises(ValueError, match=r"trainer\.peak_tflops_per_device"):
        peak_flops(name)


def test_the_configured_peak_wins() -> None:
    assert device_peak("anything", configured_tflops=2.5, dtype="bfloat16") == 2.5e12
    assert device_peak("NVIDIA H200", configured_tflops=None, dtype="bfloat16") == 989.4e12


def test_a_cpu_is_measured() -> None:
    assert measure_peak_flops(size=128, seconds=0.01) > 1e7
    assert device_peak("cpu", configured_tflops=None, dtype="float32") > 1e7


def test_mfu() -> None:
    assert mfu(flops=3e12, seconds=2, devices=3, peak=1e12) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="positive"):
        mfu(flops=1, seconds=0, devices=1, peak=1)
