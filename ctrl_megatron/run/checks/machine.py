"""Checks of the machine: disk, GPU, directories, installed libraries."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from ctrl_megatron.checkpoint.files import require_free_disk_bytes
from ctrl_megatron.checkpoint.run_directory import require_writable_run_directory
from ctrl_megatron.checkpoint.store import EXPORT_FOLDER, CheckpointStore, read_trainer_state
from ctrl_megatron.config import Config, Purpose
from ctrl_megatron.config.environment import read_launch
from ctrl_megatron.config.schema import TRACKERS
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError, convert_input_errors
from ctrl_megatron.memory.disk import disk_use
from ctrl_megatron.memory.fit import describe_misfit
from ctrl_megatron.memory.shapes import model_shapes
from ctrl_megatron.metrics.flops import table_peak_flops
from ctrl_megatron.metrics.sinks import load_user_sink_class
from ctrl_megatron.models.layer_spec import has_transformer_engine

_SOCKET_PATH = 107
"""Bytes of the longest path of a Unix socket (``sun_path``, without its end)."""


def check_writable_run_directory(config: Config) -> None:
    """UserError if the run cannot write its directory."""
    with convert_input_errors("trainer.default_local_dir"):
        require_writable_run_directory(Path(config.trainer.run_dir))


def check_temporary_directory(config: Config) -> None:
    """UserError if the path of this host's temporary directory is too long for an engine's sockets
    in it."""
    family, folder = config.actor_rollout_ref, tempfile.gettempdir()
    names = {family.rollout.name, *([family.proxy.engine.name] if config.has_proxy_engines else ())}
    longest = max(names, key=lambda name: ENGINES[name].socket_name)
    most, size = _SOCKET_PATH - ENGINES[longest].socket_name, len(os.fsencode(folder))
    if ENGINES[longest].socket_name and size > most:
        raise UserError(
            f"the temporary directory {folder} has {size} bytes: the paths of the sockets that "
            f"engine {longest} creates in it would be longer than the {_SOCKET_PATH} bytes that "
            "the system allows",
            key="TMPDIR",
            remedy=f"set TMPDIR to a directory whose path has at most {most} bytes, such as /tmp",
        )


def check_gpu(config: Config, purpose: Purpose) -> None:
    """UserError if the run does not fit this rank's GPU, with phase, largest items and remedy, and
    if the GPU's peak is neither known nor configured.

    Nothing is checked on a CPU, whose memory other processes share.
    """
    if (gpu := gpu_of_rank()) is None:
        return
    name, memory = gpu
    if config.trainer.peak_tflops_per_device is None:
        table_peak_flops(name)
    kernels = "te" if has_transformer_engine() else "torch"
    shapes = model_shapes(config, purpose)
    if wrong := describe_misfit(
        config, shapes, gpu_memory=memory, purpose=purpose, kernels=kernels
    ):
        raise UserError(wrong)


def check_disk(config: Config, purpose: Purpose) -> None:
    """UserError if the disk of the run's directory is too small for the run's files."""
    run_dir = Path(config.trainer.run_dir)
    use = disk_use(config, model_shapes(config, purpose).trained_shapes, purpose)
    there = sum(
        path.stat().st_size
        for name in ("checkpoints", EXPORT_FOLDER, "hf")
        for path in (run_dir / name).rglob("*")
        if path.is_file()
    )
    with convert_input_errors("trainer.default_local_dir"):
        require_free_disk_bytes(
            run_dir, use.bytes_still_needed(there), f"a run that keeps {use} at once"
        )


def gpu_of_rank() -> tuple[str, int] | None:
    """Name and memory, in bytes, of this rank's CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(read_launch().local_rank)
    return device.name, device.total_memory


def check_loggers(config: Config) -> None:
    """UserError for a logger whose library is not installed, or whose class cannot be used."""
    for name in config.trainer.logger:
        if ":" in name:
            load_user_sink_class(name)
        elif name in ("tensorboard", *TRACKERS) and find_spec(name) is None:
            raise UserError(
                f"trainer.logger names {name}, which is not installed; pip install {name}, or "
                "remove it from the list"
            )


def check_checkpoint(config: Config, models: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """UserError if the checkpoint to continue from is incomplete, or from another kind of run."""
    trainer = config.trainer
    store = CheckpointStore(
        Path(trainer.run_dir) / "checkpoints", keep=-1, side_files=Path(trainer.run_dir)
    )
    checkpoint = store.find_undamaged(trainer.resume_mode, models)
    if checkpoint is not None:
        with convert_input_errors():
            read_trainer_state(checkpoint, models, parts)


def check_profile(config: Config) -> None:
    """Raise UserError if ``trainer.profile_memory`` is set and there is no GPU."""
    if config.trainer.profile_memory and not torch.cuda.is_available():
        raise UserError(
            "there is no GPU whose memory can be recorded",
            key="trainer.profile_memory",
            remedy="leave it out; trainer.profile_torch=true works without one",
        )
