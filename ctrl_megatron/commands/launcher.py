"""Ranks on this machine: their start under torch's launcher, their end, and their restart.

``python -m ctrl_megatron.commands.launcher FLAG ... PROGRAM ARGUMENT ...`` is ``torchrun`` with
these flags, for jobs on several machines. Its exit code is that of the rank that ended first, 128
and more after a signal, where torchrun has exit code 1 for every failure. Its stores listen on
loopback for one machine, else at the address by which the machines meet, and hold no pickles.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from ctrl_megatron.config.environment import make_run_key, read_launch, set_restart_count
from ctrl_megatron.errors import SERVICE, STOPPED, WRONG_INPUT, UserError, user_code_running_in
from ctrl_megatron.parallel.hosts import LOOPBACK
from ctrl_megatron.torch_features import torchrun_arguments

SHUTDOWN_SECONDS = 1800
"""Seconds that ranks have after a signal to finish the current update and to save."""
_FROZEN_SECONDS = 10.0
"""Seconds that a suspended rank may outlive another one."""
_LEFT_SECONDS = 20.0
"""Seconds that engines and sandboxes have to end by themselves after their ranks."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
"""Seconds before the first restart in a row and before later ones, which double up to a limit."""
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of linux/prctl.h."""


@dataclass(frozen=True, slots=True)
class RestartLimit:
    """How often in a row, without a new checkpoint, the ranks of a run are started again after a
    failure."""

    most: int
    """Restarts in a row without a new checkpoint."""
    saved: Callable[[], int]
    """The step of the run's newest checkpoint, 0 without one."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How one start of all ranks ended: an exit code, and the rank that it is of."""

    code: int = 0
    """Exit code of the rank that ended first in error, 0 if none did; negative: the signal that
    killed it."""
    rank: int = 0
    ran: str = ""
    """The user's code that the rank was in (``user_code_running_in``)."""

    @property
    def may_restart(self) -> bool:
        """Whether the same command may succeed if it is started again.

        Not after the work is done, a stop, or an error of the user's input or code. A signal that
        killed a rank is not the user's fault: the kernel sends it where memory is scarce.
        """
        return self.code not in (0, WRONG_INPUT, STOPPED) and (self.code < 0 or not self.ran)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"rank {self.rank} ended with exit code {self.code}{self.ran}"
        return f"rank {self.rank} was killed by signal {-self.code}{self.ran}"


def ranks_to_start(options: argparse.Namespace) -> int | None:
    """``--nproc-per-node``; UserError where a launcher has started this process as a rank, and for
    ``--max-restarts`` without it.
    """
    launch, ranks = read_launch(), options.nproc_per_node
    if ranks is not None and (launch.launcher == "torchrun" or launch.world_size > 1):
        raise UserError(
            f"--nproc-per-node starts ranks, and {launch.launcher} has started this one; leave it "
            "out"
        )
    if ranks is None and getattr(options, "max_restarts", 0):
        raise UserError(
            "it restarts the ranks that --nproc-per-node starts",
            key="--max-restarts",
            remedy="add --nproc-per-node; under torchrun, give --max-restarts to torchrun",
        )
    return ranks


def start_ranks(
    name: str,
    ranks: int,
    arguments: Sequence[str],
    *,
    restarts: RestartLimit | None = None,
    expected: Collection[int] = (),
) -> int:
    """Run this program again as ``ranks`` processes under torch's launcher and return its exit
    code. The code is reported, unless the ranks have printed the reason themselves: it is one of
    ``expected``, or they refuse their input or were stopped.
    """

    return run_with_restarts(name, lambda: _start_once(ranks, arguments), restarts, expected)


def run_with_restarts(
    name: str,
    once: Callable[[], LaunchResult],
    restarts: RestartLimit | None = None,
    expected: Collection[int] = (),
) -> int:
    """The exit code of the ranks that ``once`` starts and waits for, reported as in
    ``start_ranks``; with ``restarts`` it is called again after a failure.
    """

    def start() -> LaunchResult:
        return once() if restarts is None else _start_again(name, once, restarts)

    return _exit_code(name, start, expected)


def main(arguments: Sequence[str] | None = None) -> int:
    """``torchrun`` with these arguments; see the module's docstring. Reports a rank's end as
    ``start_ranks`` does.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return _exit_code("launcher", lambda: _torchrun(words))


def _exit_code(name: str, start: Callable[[], LaunchResult], expected: Collection[int] = ()) -> int:
    """The exit code of the ranks that ``start`` starts; reported as in ``start_ranks``."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    # The ranks report why they end; the launcher's report has thirty lines and no reason.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").disabled = True
    try:
        end = start()
    except SignalException:
        return STOPPED
    if end.code not in (0, WRONG_INPUT, STOPPED, SERVICE, *expected):
        print(f"{name}: {end}", file=sys.stderr)
    return end.code if end.code >= 0 else 128 - end.code


def _start_again(
    name: str, once: Callable[[], LaunchResult], restarts: RestartLimit
) -> LaunchResult:
    """Start the ranks by ``once`` until they end in a way that no restart changes, or until there
    have been too many restarts in a row.
    """
    _adopt_orphans()
    others = set(psutil.Process().children(recursive=True))
    total, in_a_row, newest = 0, 0, restarts.saved()
    while (end := once()).may_restart:
        step = restarts.saved()
        in_a_row, newest = (1, step) if step > newest else (in_a_row + 1, newest)
        if in_a_row > restarts.most:
            print(
                f"{name}: given up: the last restart ({restarts.most} of {restarts.most} in a row) "
                "has brought no new checkpoint",
                file=sys.stderr,
            )
            break
        total += 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (in_a_row - 1))
        place = f"the checkpoint of step {step}" if step else "the start, without a checkpoint"
        print(
            f"{name}: {end}; restart {in_a_row} of at most {restarts.most} from {place} in "
            f"{pause:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        _end_left(others)
        time.sleep(pause)
        set_restart_count(total)
    return end


def _start_once(ranks: int, arguments: Sequence[str]) -> LaunchResult:
    """Start the ranks and wait for their end. Raises torch's SignalException after a signal."""
    flags = ["--nproc-per-node", str(ranks)]
    flags += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
        flags += ["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT"]
    return _torchrun([*flags, *own_command(), *arguments])


def own_command() -> list[str]:
    """This program, as arguments of Python."""
    spec = sys.modules["__main__"].__spec__  # set by python -m
    return [sys.argv[0]] if spec is None else ["-m", spec.name]


def _torchrun(words: Sequence[str]) -> LaunchResult:
    """Run torch's launcher with these arguments in this process. Raises torch's SignalException
    after a signal.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from ctrl_megatron.parallel.rendezvous_state import install_json_state
    from ctrl_megatron.parallel.store import install_single_address_store

    install_single_address_store()
    install_json_state()
    options = parse_args(torchrun_arguments(words))
    if options.nnodes in ("1", "1:1"):
        # It meets no other machine, and its name may lead nowhere.
        options.standalone, options.local_addr = True, LOOPBACK
        make_run_key()
    try:
        with _frozen_ranks_end():
            run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return LaunchResult(failure.exitcode, rank, user_code_running_in(failure.pid))
    return LaunchResult()


@contextmanager
def _frozen_ranks_end() -> Iterator[None]:
    """Kill ranks that are still suspended ten seconds after another one has ended.

    A suspended process obeys no signal, and the launcher would wait for it as long as for a rank
    that saves.
    """
    over = threading.Event()

    def watch() -> None:
        launcher = psutil.Process()
        seen: set[int] = set()
        since: dict[int, float] = {}
        while not over.wait(1.0):
            states = {child.pid: _state(child) for child in launcher.children()}
            alive = {pid for pid, state in states.items() if state != psutil.STATUS_ZOMBIE}
            seen |= alive
            frozen = {pid for pid in alive if states[pid] == psutil.STATUS_STOPPED}
            now = time.monotonic()
            since = {pid: since.get(pid, now) for pid in frozen if alive < seen}
            for pid, start in since.items():
                if now - start > _FROZEN_SECONDS:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, name="frozen-ranks", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _state(child: psutil.Process) -> str:
    try:
        return child.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _adopt_orphans() -> None:
    """Make processes whose parents have ended children of this one, so that it finds them."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _end_left(others: Collection[psutil.Process]) -> None:
    """Wait for the processes that the ranks have left, which are all but ``others``: new engines
    need the memory of the old ones. Engines and sandboxes end after their ranks; what is still
    there after 20 seconds is killed.
    """
    left = [one for one in psutil.Process().children(recursive=True) if one not in others]
    for process in psutil.wait_procs(left, timeout=_LEFT_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait(_LEFT_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
