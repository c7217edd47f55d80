"""Environment variables: the only file of the package that reads them.

Three sources, in this order: torchrun's variables, SLURM's, and none (a single process).
Variables of our own start with ``CTRL_``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Launcher = Literal["torchrun", "slurm", "single"]
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM_TASK = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_OURS = ("CTRL_LOG_LEVEL", "CTRL_MASTER_PORT")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_PROVIDERS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "e2b": ({"api_key": "E2B_API_KEY"}, {}),
    "morph": ({"api_key": "MORPH_API_KEY"}, {}),
    "piston": ({"endpoint": "PISTON_ENDPOINT"}, {"api_key": "PISTON_API_KEY"}),
    "sandbox_fusion": ({"endpoint": "SANDBOX_FUSION_ENDPOINT"}, {}),
}
"""Per provider: options it needs and options it may have, with their variables."""
_FIRST_PORT, _PORTS = 20000, 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Which of how many processes this one is, and where they meet."""

    launcher: Launcher
    """What started the process."""
    rank: int
    """Number of the process over all machines."""
    world_size: int
    """Number of processes over all machines."""
    local_rank: int
    """Number of the process on its machine."""
    local_world_size: int
    """Number of processes on its machine."""
    master_addr: str
    """Host on which rank 0 listens."""
    master_port: int
    """Port on which rank 0 listens; 0 (single process only) lets the system choose."""


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Where this process stands. Raises ValueError naming a variable that is missing or wrong."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _validated(_torchrun(environ))
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _validated(_slurm(environ))
    return Launch(
        launcher="single",
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=0,
    )


def read_log_level(environ: Mapping[str, str] | None = None) -> str:
    """``CTRL_LOG_LEVEL``, or WARNING; ValueError for a ``CTRL_`` name that is not ours."""
    environ = os.environ if environ is None else environ
    for name in environ:
        if name.startswith("CTRL_") and name not in _OURS:
            near = difflib.get_close_matches(name, _OURS, n=1, cutoff=0.0)
            raise ValueError(f"unknown environment variable {name}; did you mean {near[0]}?")
    level = environ.get("CTRL_LOG_LEVEL", "WARNING").upper()
    if level not in _LEVELS:
        raise ValueError(f"CTRL_LOG_LEVEL={level} must be one of {', '.join(_LEVELS)}")
    return level


def read_provider_keys(
    provider: str, environ: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """What the environment says about a code provider, by the name of its option.

    Names that the provider cannot do without are there even if they are not set, as None.
    """
    environ = os.environ if environ is None else environ
    demanded, optional = _PROVIDERS.get(provider, ({}, {}))
    found: dict[str, str | None] = {key: environ.get(name) for key, name in demanded.items()}
    return found | {key: environ[name] for key, name in optional.items() if name in environ}


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a helper process: ours without the launcher's variables.

    An engine that saw RANK or MASTER_ADDR would try to join the trainer's process group.
    """
    environ = os.environ if environ is None else environ
    dropped = {*_TORCHRUN, "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
    return {
        name: value
        for name, value in environ.items()
        if name not in dropped and not name.startswith(("TORCHELASTIC_", "CTRL_"))
    }


def first_host(node_list: str) -> str:
    """First host of SLURM's compressed list: ``gpu[03-05,9],x1`` gives ``gpu03``."""
    match = re.match(r"([^\[\],]+)(?:\[([^\]]+)\])?([^,]*)", node_list.strip())
    if match is None:
        raise ValueError(f"SLURM_JOB_NODELIST={node_list!r} is not a host list")
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[-,]", numbers)[0] if numbers else "") + suffix


def _torchrun(environ: Mapping[str, str]) -> Launch:
    return Launch(
        launcher="torchrun",
        rank=_integer(environ, "RANK"),
        world_size=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE"),
        master_addr=_text(environ, "MASTER_ADDR"),
        master_port=_integer(environ, "MASTER_PORT"),
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    rank, world_size, local_rank = (_integer(environ, name) for name in _SLURM_TASK)
    tasks = re.match(r"\d+", _text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if tasks is None:
        raise ValueError("SLURM_STEP_TASKS_PER_NODE must start with a number")
    # Every rank must compute the same port, and two jobs on one machine different ones.
    port = _FIRST_PORT + int(re.sub(r"\D", "", _text(environ, "SLURM_JOB_ID")) or "0") % _PORTS
    nodes = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    named = next((name for name in ("MASTER_PORT", "CTRL_MASTER_PORT") if name in environ), None)
    return Launch(
        launcher="slurm",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(tasks.group()),
        master_addr=environ.get("MASTER_ADDR") or first_host(_text(environ, nodes)),
        master_port=_integer(environ, named) if named else port,
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ValueError(
            f"the environment variable {name} is not set; start the ranks with torchrun or srun"
        )
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"the environment variable {name}={text!r} must be a whole number")
    return int(text)


def _validated(launch: Launch) -> Launch:
    if not launch.rank < launch.world_size:
        raise ValueError(f"rank {launch.rank} must be smaller than world size {launch.world_size}")
    if not launch.local_rank < launch.local_world_size <= launch.world_size:
        raise ValueError(
            f"local rank {launch.local_rank} of {launch.local_world_size} does not fit a world of "
            f"{launch.world_size} ranks"
        )
    return launch
