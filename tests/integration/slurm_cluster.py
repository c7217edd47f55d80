"""A real SLURM on one machine: a controller, and nodes that have names and shared memories of their
own but one network. Needs root and the packages slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from patience import PATIENCE

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "unshare")

# Sites that bind tasks to processors by default are the ones that fail, so this one does.
# Requeued jobs wait until their credentials have expired, two minutes by default.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=autobind=threads
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdTimeout=6
KillWait=15
ReturnToService=2
GresTypes=gpu
"""
ON_NODE = """
hostname "$0" && mount -t tmpfs none /dev/shm && mount --bind "$1" /etc/hosts && shift && exec "$@"
"""


def missing() -> str | None:
    """The reason why no cluster can be started here; None if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}; apt install slurmctld slurmd slurm-client munge util-linux"
    if os.geteuid() != 0:
        return "SLURM's daemons need root to start jobs"
    spaces = subprocess.run(
        ["unshare", "--uts", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"],
        capture_output=True,
    )
    return None if spaces.returncode == 0 else "no namespaces for the nodes (unshare is refused)"


@dataclass(kw_only=True)
class Cluster:
    """Daemons that run, and SLURM's commands against them."""

    folder: Path
    environment: dict[str, str]
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Name -> its slurmd."""

    def run(self, *command: str, extra: dict[str, str] | None = None) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(
            command,
            env={**self.environment, **(extra or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition: Callable[[], bool], what: str, output: Path) -> None:
        """Return when the condition holds; fails with the end of ``output``."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            text = output.read_text(errors="replace") if output.exists() else "(no output)"
            assert time.monotonic() < deadline, f"no {what}\n{self.logs()}\n{text[-6000:]}"
            time.sleep(0.25)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}"
            for log in sorted(self.folder.glob("*.log"))
        )

    def processes(self, number: str) -> list[psutil.Process]:
        """Processes on all nodes that the job has started and that still run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                mine = process.environ().get("SLURM_JOB_ID") == number
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@contextmanager
def cluster(names: Sequence[str], *, cpus: int, gpus: int) -> Iterator[Cluster]:
    """A cluster of these nodes; its GPUs are only counted. Nothing of it outlives the block."""
    with TemporaryDirectory(prefix="slurm-", dir="/tmp") as text, ExitStack() as daemons:
        folder = Path(text)
        folder.chmod(0o755)
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        for name in ("munge", "state", *(f"spool-{n}" for n in names)):
            (folder / name).mkdir()
        write_configuration(folder, names, cpus=cpus, gpus=gpus)

        def start(*command: str) -> subprocess.Popen[bytes]:
            with (folder / "daemons.log").open("ab") as log:
                daemon = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            daemons.callback(end, daemon)
            return daemon

        munge = folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        files |= {"log-file": "log", "seed-file": "seed"}
        start(
            *("munged", "--foreground", "--force"),
            *(f"--{flag}={munge / name}" for flag, name in files.items()),
        )
        made = Cluster(folder=folder, environment=environment)
        made.wait_for((munge / "socket").exists, "munged", folder / "daemons.log")
        start("slurmctld", "-D")
        hosts = str(folder / "hosts")
        for name in names:
            inside = ("sh", "-c", ON_NODE, name, hosts, "slurmd", "-D", "-N", name)
            made.nodes[name] = start("unshare", "--uts", "--mount", *inside)
        try:
            made.wait_for(lambda: idle(made) == set(names), "idle nodes", folder / "daemons.log")
            yield made
        finally:
            with suppress(AssertionError):
                made.run("scancel", "--user=root")
                made.wait_for(
                    lambda: made.run("squeue", "--noheader") == "", "empty queue", folder / "none"
                )


def write_configuration(folder: Path, names: Sequence[str], *, cpus: int, gpus: int) -> None:
    """slurm.conf, gres.conf and the nodes' /etc/hosts."""
    ports = free_ports(1 + len(names))
    machine = socket.gethostname().partition(".")[0]
    lines = [CONFIGURATION.format(machine=machine, port=ports[0], folder=folder)]
    hosts = ["127.0.0.1 localhost"]
    for place, name in enumerate(names):
        address = f"127.0.0.{10 + place}"
        hosts.append(f"{address} {name}")
        lines.append(
            f"NodeName={name} NodeAddr={address} Port={ports[1 + place]} CPUs={cpus} "
            f"RealMemory=4096 Gres=gpu:{gpus} State=UNKNOWN\n"
        )
    nodes = ",".join(names)
    lines.append(f"PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines))
    files = [folder / f"gpu{number}" for number in range(gpus)]
    for file in files:
        file.touch()
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={file}\n" for file in files))
    (folder / "hosts").write_text("\n".join(hosts) + "\n")


def free_ports(count: int) -> list[int]:
    """Free ports of loopback."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


def idle(made: Cluster) -> set[str]:
    """The nodes that have reported and have nothing to do."""
    try:
        return set(made.run("sinfo", "--noheader", "-N", "--states=idle", "-o", "%N").split())
    except AssertionError:  # the controller is not up yet
        return set()


def end(daemon: subprocess.Popen[bytes]) -> None:
    """Stop a daemon and wait for it."""
    if daemon.poll() is None:
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(20)
