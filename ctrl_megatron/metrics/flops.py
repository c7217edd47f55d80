"""The peak of a device, and the share of it that a run uses."""

from __future__ import annotations

import re
import time

from ctrl_megatron.errors import UserError

_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
    (r"\bH200 NVL\b", 835.5e12),
    (r"\bG?H200\b", 989.4e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH[18]00\b", 989.4e12),
    (r"\bA[18]00\b", 312e12),
)
"""Dense bf16 peaks in flop/s from NVIDIA's data sheets; the first pattern that matches counts."""
SQUARE = (1024, 1024)
"""Widths of a linear layer whose products are fast on any processor."""
_MOST_MEASURED = 2048


def mfu(*, flops: float, seconds: float, devices: int, peak: float) -> float:
    """Model-flops utilisation: the share of ``devices`` times ``peak`` flop/s that was used."""
    if seconds <= 0 or devices < 1 or peak <= 0:
        raise ValueError(f"MFU needs positive {seconds=}, {devices=}, {peak=}")
    return flops / (seconds * devices * peak)


def table_peak_flops(device_name: str) -> float:
    """Dense bf16 peak in flop/s of a device as the driver names it.

    Raises ValueError for a device that is not in the table.
    """
    for pattern, peak in _PEAKS:
        if re.search(pattern, device_name.replace("-", " "), re.IGNORECASE):
            return peak
    raise UserError(
        f"the peak of the device {device_name!r} is not known",
        key="trainer.peak_tflops_per_device",
        remedy="set it to the device's dense bf16 peak in TFLOP/s",
    )


def measure_matmul_rates(
    dtype: str, *, sizes: tuple[int, int] = SQUARE, tokens: int = 512, seconds: float = 0.1
) -> tuple[float, float, float]:
    """Best flop/s on this CPU, with torch's current threads, of the three products of a linear
    layer: its output (``tokens``, out), and the gradients of its input and of its weight (out, in).

    ``dtype`` is a torch type name; ``sizes`` are in and out, of which at most 2,048 are measured;
    each product takes at least ``seconds``.
    """
    import torch

    inner, outer = (min(size, _MOST_MEASURED) for size in sizes)
    kind = getattr(torch, dtype)
    given, weight = torch.ones(tokens, inner, dtype=kind), torch.ones(outer, inner, dtype=kind)
    gradient = torch.ones(tokens, outer, dtype=kind)

    def rate(left: torch.Tensor, right: torch.Tensor) -> float:
        torch.mm(left, right)
        best, deadline = 0.0, time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            torch.mm(left, right)
            end = time.perf_counter()
            best = max(best, 2 * tokens * inner * outer / (end - start))
            if end > deadline:
                return best

    return rate(given, weight.t()), rate(gradient, weight), rate(gradient.t(), given)


def measure_cpu_peak_flops(
    dtype: str = "float32", *, sizes: tuple[int, int] = SQUARE, seconds: float = 0.1
) -> float:
    """Best flop/s that this CPU reaches in any of ``measure_matmul_rates``, of a layer of ``sizes``
    or of a square one. A CPU has no data sheet peak that its cores could reach."""
    return max(
        rate
        for shape in {sizes, SQUARE}
        for rate in measure_matmul_rates(dtype, sizes=shape, tokens=1024, seconds=seconds)
    )


def device_peak_flops(
    device_name: str,
    *,
    configured_tflops: float | None,
    dtype: str,
    sizes: tuple[int, int] = SQUARE,
) -> float:
    """Peak flop/s of one device: the configured value; on ``cpu`` a measurement in ``dtype`` with
    products of ``sizes`` (``measure_cpu_peak_flops``); else the table's dense bf16 peak, whatever
    ``dtype`` is. UserError for a device that is not in the table."""
    if configured_tflops is not None:
        return configured_tflops * 1e12
    if device_name == "cpu":
        return measure_cpu_peak_flops(dtype, sizes=sizes)
    return table_peak_flops(device_name)
