"""Environment variables: the only file of the package that reads them.

Three sources, in this order: torchrun's variables, SLURM's, and none (a single process).
Variables of our own start with ``CTRL_``.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ctrl_megatron.errors import UserError, nearest_name
from ctrl_megatron.torch_features import ALLOCATOR_VARIABLES

Launcher = Literal["torchrun", "slurm", "single"]
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|CTRL)_.*", re.DOTALL
)
_KERNEL_ORDER = "CUDA_DEVICE_MAX_CONNECTIONS"
_EXPANDABLE = "expandable_segments:True"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SLURM_TASK = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_OURS = ("CTRL_LOG_LEVEL", "CTRL_MASTER_PORT")
_RESTARTS = "CTRL_RESTARTS"
"""Set by a launcher that starts ranks again: how often it has done so."""
_RUN_KEY = "CTRL_RUN_KEY"
"""Set by a launcher, the same on all hosts: what ranks send each other is signed with it."""
_OF_SCRIPTS = "CTRL_VENV"
"""Read by the scripts of slurm/ alone."""
_OF_MACHINE = ("CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_PROVIDERS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "e2b": ({"api_key": "E2B_API_KEY"}, {}),
    "morph": ({"api_key": "MORPH_API_KEY"}, {}),
    "sandbox_fusion": ({"endpoint": "SANDBOX_FUSION_ENDPOINT"}, {}),
}
"""Provider -> (required options, optional ones), each with its variable."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank of this process, the number of processes, and the address of their rendezvous.

    Raises UserError for numbers that do not fit each other.
    """

    launcher: Launcher
    """The program that started the process."""
    rank: int
    world_size: int
    """Rank of this process, and the number of processes, over all hosts."""
    local_rank: int
    local_world_size: int
    """Rank of this process, and the number of processes, on this host."""
    master_addr: str
    master_port: int
    """The port on which rank 0 listens; 0 (single process only) lets the system choose."""
    has_store: bool = False
    """Whether the launcher serves a store at that address, so that rank 0 must not."""

    def __post_init__(self) -> None:
        if not self.rank < self.world_size:
            raise UserError(f"rank {self.rank} must be smaller than world size {self.world_size}")
        if not self.local_rank < self.local_world_size <= self.world_size:
            raise UserError(
                f"local rank {self.local_rank} of {self.local_world_size} does not fit a world of "
                f"{self.world_size} ranks"
            )


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launch of this process. Raises UserError naming a variable that is missing or wrong."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        launcher = "torchrun"
        rank, world_size, local_rank, local_world_size = (_integer(environ, n) for n in _RANKS)
        address, port = _text(environ, "MASTER_ADDR"), _integer(environ, "MASTER_PORT")
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        launcher = "slurm"
        rank, world_size, local_rank = (_integer(environ, name) for name in _SLURM_TASK)
        tasks = re.match(r"\d+", _text(environ, "SLURM_STEP_TASKS_PER_NODE"))
        if tasks is None:
            raise UserError("SLURM_STEP_TASKS_PER_NODE must start with a number")
        local_world_size = int(tasks.group())
        address, port = _slurm_meeting_point(environ)
    else:
        launcher, rank, world_size, local_rank, local_world_size = "single", 0, 1, 0, 1
        address, port = "127.0.0.1", 0
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        launcher, rank, world_size, local_rank, local_world_size, address, port, has_store
    )


def read_restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """How often the launcher (``--max-restarts`` of torchrun or of the command), the script of the
    job and its scheduler (SLURM) have started this run's processes again.
    """
    counts = (_RESTARTS, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(_integer(environ, name) for name in counts if name in environ)


def set_restart_count(total: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let the processes that this one starts from now on count ``total`` restarts."""
    environ[_RESTARTS] = str(total)


def make_run_key(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give the processes that this one starts from now on a key of their run, unless it has one."""
    environ.setdefault(_RUN_KEY, secrets.token_hex(32))


def read_run_key(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The key of the run; None where a launcher of somebody else's started the ranks."""
    return environ[_RUN_KEY].encode() if environ.get(_RUN_KEY) else None


def read_log_level(environ: Mapping[str, str] = os.environ) -> str:
    """``CTRL_LOG_LEVEL``, by default WARNING; UserError for any other name with ``CTRL_``."""
    for name in environ:
        if name.startswith("CTRL_") and name not in (*_OURS, _OF_SCRIPTS, _RESTARTS, _RUN_KEY):
            near = nearest_name(name, _OURS, cutoff=0.0)
            raise UserError(f"unknown environment variable {name}; did you mean {near}?")
    level = environ.get("CTRL_LOG_LEVEL", "WARNING").upper()
    if level not in _LEVELS:
        raise UserError(f"CTRL_LOG_LEVEL={level} must be one of {', '.join(_LEVELS)}")
    return level


def read_provider_options(
    provider: str, environ: Mapping[str, str] = os.environ
) -> dict[str, str | None]:
    """Options of a code provider that environment variables set, by the names of the options.

    A required option whose variable is not set is None.
    """
    demanded, optional = _PROVIDERS.get(provider, ({}, {}))
    found: dict[str, str | None] = {key: environ.get(name) for key, name in demanded.items()}
    return found | {key: environ[name] for key, name in optional.items() if name in environ}


def read_openai_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """``OPENAI_API_KEY``, for servers of OpenAI's protocol; None if it is not set."""
    return environ.get("OPENAI_API_KEY") or None


def child_environment(
    environ: Mapping[str, str] = os.environ, *, devices: Sequence[int] = ()
) -> dict[str, str]:
    """The environment of a child process: this process's without the launcher's variables.

    An engine that saw RANK or MASTER_ADDR would try to join the trainer's process group, and of
    ``set_device_variables`` it gets none.
    ``devices`` are the GPUs of this process that the child sees; empty for all. UserError for one
    that this process does not see.
    """
    kept = {name: value for name, value in environ.items() if not _OF_LAUNCHER.fullmatch(name)}
    kept.pop(_KERNEL_ORDER, None)
    if kept.get(ALLOCATOR_VARIABLES[0]) == _EXPANDABLE:
        del kept[ALLOCATOR_VARIABLES[0]]
    if devices:
        ours = environ.get("CUDA_VISIBLE_DEVICES")
        names = ours.split(",") if ours else [str(device) for device in range(max(devices) + 1)]
        if max(devices) >= len(names):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={ours} shows {len(names)} GPUs, an engine needs number "
                f"{max(devices)} (counted from 0); let every process of a machine see all its GPUs"
            )
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(names[device] for device in devices)
    return kept


def read_ray_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """``RAY_ADDRESS``, the Ray cluster to join; None if it is not set."""
    return environ.get("RAY_ADDRESS") or None


def environment_for_other_machines(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that its ranks on other machines have too: all but Ray's."""
    return {name: value for name, value in environ.items() if not name.startswith("RAY_")}


def machine_local_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that belong to its machine, whatever other machines send."""
    return {name: environ[name] for name in _OF_MACHINE if name in environ}


def set_device_variables(
    tensor_parallel_size: int, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables that CUDA and PyTorch read when a trainer's rank loads them; what the user
    has set stays. Engines do not get them (``child_environment``).

    With ``expandable_segments`` the memory that one micro-batch has freed serves the next one,
    whose packed length differs. vLLM's pool of memory that sleeps does not allow them.

    ``CUDA_DEVICE_MAX_CONNECTIONS=1`` lets CUDA run kernels in launch order. Megatron-Core relies on
    that order where it overlaps the communication of ``tensor_parallel_size`` ranks with matrix
    products (``tensor_parallel/layers.py``). It prevents all other overlaps, also in an engine, so
    it is set only for ``tensor_parallel_size`` > 1.
    """
    if not environ.keys() & set(ALLOCATOR_VARIABLES):
        environ[ALLOCATOR_VARIABLES[0]] = _EXPANDABLE
    if tensor_parallel_size > 1:
        environ.setdefault(_KERNEL_ORDER, "1")


def bind_collectives_to_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo and NCCL listen on loopback in this process and its children, unless the user names
    an interface: by themselves they take the one that the machine's name leads to.
    """
    for name in _INTERFACES:
        environ.setdefault(name, "lo")


def gpus_are_hidden(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` hides every GPU: it is set, and empty or begins with -1."""
    return environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")


def first_slurm_host(node_list: str) -> str:
    """First host of SLURM's compressed list: ``gpu[03-05,9],x1`` gives ``gpu03``."""
    match = re.match(r"([^\[\],]+)(?:\[([^\]]+)\])?([^,]*)", node_list.strip())
    if match is None:
        raise UserError(f"SLURM_JOB_NODELIST={node_list!r} is not a host list")
    prefix, numbers, suffix = match.groups()
    return prefix + (re.split(r"[-,]", numbers)[0] if numbers else "") + suffix


def _slurm_meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    nodes = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    address = environ.get("MASTER_ADDR") or first_slurm_host(_text(environ, nodes))
    for name in ("MASTER_PORT", "CTRL_MASTER_PORT"):
        if name in environ:
            return address, _integer(environ, name)
    # Every rank must compute the same port, and two jobs on one machine different ones.
    job = re.sub(r"\D", "", _text(environ, "SLURM_JOB_ID")) or "0"
    return address, 20000 + int(job) % 10000


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UserError(f"the variable {name} is not set; start the ranks with torchrun or srun")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"\d+", text):
        raise UserError(f"the environment variable {name}={text!r} must be a whole number")
    return int(text)
