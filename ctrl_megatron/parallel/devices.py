"""The device of a rank: its CUDA device, or the CPU on a machine without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ctrl_megatron.config.environment import gpus_are_hidden
from ctrl_megatron.errors import UserError
from ctrl_megatron.parallel import cpu_platform

_DEVICES = Path("/dev")


def local_device(local_rank: int) -> torch.device:
    """The device of the rank with that number on its machine.

    Raises ValueError if torch cannot use the machine's NVIDIA GPUs or if there are fewer GPUs than
    ranks: a run must not continue unnoticed on the CPU. ``CUDA_VISIBLE_DEVICES=`` (empty) selects
    the CPU.
    """
    if cpu_platform.cpu_platform_installed():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if fault := why_gpus_unusable():
            raise UserError(fault)
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()} here; "
            "start one rank per GPU (--nproc-per-node), and let every rank see all of them"
        )
    return torch.device("cuda", local_rank)


def visible_gpus() -> int:
    """The number of NVIDIA GPUs that torch can use in this process."""
    return torch.cuda.device_count()


def why_gpus_unusable() -> str | None:
    """Why torch cannot use this machine's NVIDIA GPUs, with the remedy; None if it can or there are
    none.

    GPUs are counted by the driver's files ``/dev/nvidiaN``.
    """
    gpus = gpu_device_files()
    if not gpus or torch.cuda.is_available() or gpus_are_hidden():
        return None
    here = f"this machine has {len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''} ({gpus[0]}, ...)"
    cpu = "set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU on purpose"
    if not torch.backends.cuda.is_built():
        return (
            f"{here}, but torch {torch.__version__} is built without CUDA; install "
            f"requirements/cuda.txt (make env-cuda), or {cpu}"
        )
    try:
        torch.cuda.init()
        why = "it finds no device"
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
    return (
        f"{here}, but torch {torch.__version__} cannot use them: {why}; check the driver with "
        f"nvidia-smi (CUDA {torch.version.cuda} is needed), or {cpu}"
    )


def gpu_device_files() -> list[str]:
    """The device files of NVIDIA GPUs, by number."""
    names = [p.name for p in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    return [str(_DEVICES / name) for name in sorted(names, key=lambda n: int(n[6:]))]
