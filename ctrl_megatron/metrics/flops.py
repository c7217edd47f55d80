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


def measure_cpu_peak_flops(
    dtype: str = "float32", *, size: int = 1024, seconds: float = 0.3
) -> float:
    """Best flop/s of a square matrix product on this CPU, with torch's current threads.

    ``dtype`` is a torch type name. A CPU has no data sheet peak that its cores could reach.
    """
    import torch

    a = torch.ones(size, size, dtype=getattr(torch, dtype))
    torch.mm(a, a)
    best, deadline = 0.0, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        torch.mm(a, a)
        end = time.perf_counter()
        best = max(best, 2 * size**3 / (end - start))
        if end > deadline:
            return best


def device_peak_flops(device_name: str, *, configured_tflops: float | None, dtype: str) -> float:
    """Peak flop/s of one device: the configured value; on ``cpu`` a measurement in ``dtype``; else
    the table's dense bf16 peak, whatever ``dtype`` is. UserError for a device that is not in the
    table."""
    if configured_tflops is not None:
        return configured_tflops * 1e12
    return measure_cpu_peak_flops(dtype) if device_name == "cpu" else table_peak_flops(device_name)
