"""The benchmark of an update on a machine without a GPU: what a rate is compared with."""

from __future__ import annotations

import pytest
import torch

from tools.bench.update import peak_of, report


def test_a_rate_is_a_share_of_the_peak_of_its_own_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu = torch.device("cuda", 0)
    peak = peak_of(gpu, "bfloat16", None)
    assert peak == 989.4e12
    assert peak_of(gpu, "bfloat16", 500.0) == 500e12
    assert 1e7 < peak_of(torch.device("cpu"), "float32", None) < 50e12
    turn = {"seconds": 2.0, "user": 1.0, "system": 1.0, "peak_gib": 2.0, "resident_gib": 1.0}
    turn["device_gib"] = 0.0
    report("ours", 3000, [{"peak": peak, "flops": 494.7e12, "threads": 1}], [[turn]])
    assert "1500 tokens/s, 2.00 s, 25 % of 989400 GFLOP/s" in capsys.readouterr().out
