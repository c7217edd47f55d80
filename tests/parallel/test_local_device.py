"""A run on a machine with GPUs does not go on unnoticed on its CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctrl_megatron.parallel import devices
from ctrl_megatron.parallel.groups import initialize_groups
from ctrl_megatron.parallel.layout import Layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch reaches a GPU here")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev as the NVIDIA driver leaves it on a machine with GPUs 0 and 10."""
    for name in ("nvidia10", "nvidia0", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices.cpu_platform, "cpu_platform_installed", lambda: False)
    return tmp_path


def test_gpus_are_the_numbered_files(driver: Path) -> None:
    assert devices.gpu_device_files() == [str(driver / "nvidia0"), str(driver / "nvidia10")]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch is built with CUDA here")
def test_a_gpu_without_a_cuda_build_of_torch_stops_the_start(driver: Path) -> None:
    layout = Layout()
    with pytest.raises(ValueError, match=r"2 NVIDIA GPUs.*without CUDA.*make env-cuda") as caught:
        initialize_groups(layout, seed=1, timeout_seconds=10)
    assert torch.__version__ in str(caught.value) and "\n" not in str(caught.value)
    assert not torch.distributed.is_initialized()


def test_a_cuda_build_that_reaches_no_gpu_says_why(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    with pytest.raises(ValueError, match=r"driver on your system is too old; .*nvidia-smi"):
        devices.local_device(0)


@pytest.mark.parametrize("value", ["", "-1", " -1,0"])
def test_hidden_gpus_mean_the_cpu(
    driver: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert devices.local_device(0) == torch.device("cpu")


def test_shown_gpus_do_not(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="NVIDIA GPUs"):
        devices.local_device(0)


def test_a_machine_without_gpus_computes_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    assert devices.local_device(3) == torch.device("cpu")


def test_more_ranks_than_gpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.local_device(1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local rank 2 has no GPU: torch sees 2"):
        devices.local_device(2)
