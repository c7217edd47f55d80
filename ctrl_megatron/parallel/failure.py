"""When one process of a run dies, all stop within seconds, and the first cause is printed once.

Every rank watches the ranks of its own host by process id, its neighbour's heartbeat (which covers
other hosts), the services it started, and a key in the rendezvous store under which the first
failure is written. The rank that wrote it prints it; on every other host one rank prints a line
about it. The watch is a thread that ends the process itself, so a collective that hangs
because a peer is gone cannot keep a rank alive.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ctrl_megatron.background import StallClock
from ctrl_megatron.errors import (
    FAILED,
    SERVICE,
    STOPPED,
    WRONG_INPUT,
    ServiceFault,
    UserError,
    find_user_error,
    user_code_running_in,
)
from ctrl_megatron.parallel.groups import RankSet
from ctrl_megatron.parallel.parent_watch import process_gone
from ctrl_megatron.parallel.stacks import StackFile
from ctrl_megatron.parallel.waiting import WaitedTooLong

_POLL_SECONDS = 0.5
_BEAT_SECONDS = 2.0
_ROOT_CAUSE_SECONDS = 3 * _BEAT_SECONDS
"""Within this time the first cause of a broken collective is published, and every rank that lives
has given a sign of life.
"""
_TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
_STACKS = "the Python stacks of the ranks at this moment are in {}/rank_N.txt"
_SHORT = 200
"""Characters of another host's cause on the line about it."""


class FailureWatch:
    """Watches a rank's peers and services from its construction until ``close``."""

    def __init__(self, groups: RankSet, *, timeout: float, clean_up: Callable[[], None]) -> None:
        self._groups, self._timeout, self._clean_up = groups, timeout, clean_up
        self._services: list[tuple[Callable[[], str | UserError | None], bool]] = []
        self._stacks: StackFile | None = None
        self._ended, self._one_at_a_time, self._code = threading.Event(), threading.Lock(), -1
        self.ending = ""
        """Why the run is about to end, on one line; empty while nothing ends it."""
        # A separate connection: the main thread may block the other store.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore("failure", store.clone())
        self._near = groups.gather_from_host(os.getpid())
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def add_check(self, died: Callable[[], str | UserError | None], *, hang: bool = False) -> None:
        """Call the function regularly from now on. It returns None while its child process is alive
        and what happened to it otherwise, which is then this rank's failure or, as a UserError, the
        user's. With ``hang`` it reports that something no longer goes on.
        """
        self._services.append((died, hang))

    def set_stack_file(self, file: StackFile) -> None:
        """Let this rank's stacks be in ``file`` before a run that hangs is ended, from now on."""
        self._stacks = file

    def stop_watching_others(self) -> None:
        """Stop watching services and peers, which end one by one from now on. Collective."""
        self._groups.barrier()
        self.ending = self.ending or "the run has done its work"
        self._ended.set()
        self._thread.join()

    def close(self) -> None:
        """Stop watching, if ``stop_watching_others`` has not done so."""
        if not self._ended.is_set():
            self.stop_watching_others()

    @staticmethod
    def exit_process(code: int) -> None:
        """End this process without running destructors."""
        os._exit(code)

    def report_failure(self, error: BaseException) -> int:
        """Publish this rank's failure and print the run's first cause; call from the main thread.
        Returns the exit code of all ranks.

        An error of the user, a service that failed, a wait without end and a second signal are one
        line without a traceback. A broken collective usually follows another rank's failure, which
        therefore gets a few seconds to be published first; if none is, ranks that give no sign of
        life meanwhile are named, with their host. Without the launcher's store nothing can be
        published.
        """
        rank, fault, hang = self._groups.rank, find_user_error(error), False
        if fault is not None:
            cause, code = str(fault), WRONG_INPUT
        elif isinstance(error, ServiceFault):
            cause, code = str(error), SERVICE
        elif isinstance(error, WaitedTooLong):
            cause, code, hang = str(error), FAILED, True
        elif isinstance(error, KeyboardInterrupt):
            cause, code = "interrupted; what was not saved is lost", STOPPED
        else:
            text = "".join(traceback.format_exception(error))
            cause, code = f"rank {rank} failed:\n{text}", FAILED
            hang = _is_echo(error) and _TIMED_OUT.search(str(error)) is not None
        try:
            if _is_echo(error) and (lost := self._lost_ranks()) and not hang:
                cause = f"{self._named(lost)} lost: {_first_line(error)}"
            self._publish(cause, code, hang=hang)
            return self._announce()
        except (RuntimeError, ConnectionError) as lost:
            _say(cause if code != FAILED else f"{cause}\nand {self._without_store(lost)}")
            return code

    def _lost_ranks(self) -> list[int]:
        """Wait for a cause to be published. The ranks that have given no sign of life meanwhile;
        none where there is a cause.
        """
        before, deadline = self._beats(), time.monotonic() + _ROOT_CAUSE_SECONDS
        while time.monotonic() < deadline:
            if self._published():
                return []
            time.sleep(0.1)
        pairs = zip(before, self._beats(), strict=True)
        return [rank for rank, (then, now) in enumerate(pairs) if then == now]

    def _beats(self) -> list[bytes]:
        keys = [f"beat/{rank}" for rank in range(self._groups.size)]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _named(self, ranks: list[int]) -> str:
        """``rank N on host H is``, or several of them."""
        hosts = self._groups.hosts
        named = [f"rank {rank} on host {hosts.names[hosts.of_rank[rank]]}" for rank in ranks]
        return ", ".join(named) + (" is" if len(named) == 1 else " are")

    def _without_store(self, lost: Exception) -> str:
        hosts = self._groups.hosts.names
        where = f" on host {hosts[0]}" if len(hosts) > 1 else ""
        return f"the rendezvous store is gone, and so is the launcher{where}: {lost}"

    def _watch(self) -> None:
        me = self._groups.rank
        local = {rank: pid for rank, pid in self._near.items() if rank != me}
        neighbour = (me + 1) % self._groups.size
        beat, last_beat, seen, seen_at = 0, 0.0, b"", time.monotonic()
        while not self._ended.wait(_POLL_SECONDS):
            try:
                now = time.monotonic()
                if now - last_beat > _BEAT_SECONDS:
                    beat, last_beat = beat + 1, now
                    self._store.set(f"beat/{me}", str(beat))
                    key = f"beat/{neighbour}"
                    current = self._store.get(key) if self._store.check([key]) else b""
                    # The only rank of a run is its own neighbour.
                    if current != seen or neighbour == me:
                        seen, seen_at = current, now
                (cause, hang), silent = self._dead_service(), None
                if cause is None:
                    # Its communication library may have ended it because another rank hangs.
                    cause, hang = _dead_rank(local), True
                if cause is None and now - seen_at > self._timeout:
                    host = self._groups.hosts.of_rank[neighbour]
                    far = neighbour not in self._near
                    where = f" on host {self._groups.hosts.names[host]}" if far else ""
                    cause = f"rank {neighbour}{where} has not been heard of for "
                    cause += f"{self._timeout:.0f} s"
                    silent = neighbour
                if cause is not None:
                    code = WRONG_INPUT if isinstance(cause, UserError) else FAILED
                    self._publish(str(cause), code, hang=hang, silent=silent)
                if self._published():
                    self._leave(self._announce())
            except (RuntimeError, ConnectionError) as error:
                if not self._ended.is_set():
                    # Where the launcher does not serve the store, rank 0 does.
                    why = _dead_rank(local) or self._without_store(error)
                    if self._stacks is not None:
                        self._stacks.append_stacks(why)
                    _say(f"rank {me} stops because {why}")
                    self._leave(FAILED)
            except Exception as error:
                # Without memory or descriptors, for example: nobody else would notice an end.
                self._leave_unwatched(error)

    def _leave_unwatched(self, error: Exception) -> None:
        """End this rank, of which the watch has failed."""
        code = FAILED
        try:
            self._publish(f"rank {self._groups.rank} cannot be watched: {error!r}", FAILED)
            code = self._announce()
        finally:
            self._leave(code)

    def _dead_service(self) -> tuple[str | UserError | None, bool]:
        found = ((cause, hang) for died, hang in self._services if (cause := died()))
        return next(found, (None, False))

    def _published(self) -> bool:
        return self._store.check(["cause"])

    def _publish(
        self, cause: str, code: int, *, hang: bool = False, silent: int | None = None
    ) -> None:
        """Make this the run's first cause if there is none; ``silent`` is a rank to be killed."""
        record = {
            "rank": self._groups.rank,
            "cause": cause,
            "code": code,
            "hang": hang,
            "silent": silent,
        }
        # Of several ranks that fail at once, the store keeps the first.
        self._store.compare_set("cause", "", json.dumps(record))

    def _announce(self) -> int:
        """Print why the run ends, in the whole job once; returns this rank's exit code.

        A silent rank of this host is killed: it cannot end itself, and the launcher would wait for
        it as long as for one that saves. Where something hangs, every rank writes its stacks.
        """
        with self._one_at_a_time:
            if self._code >= 0:
                return self._code
            record = json.loads(self._store.get("cause"))
            me, rank, cause = self._groups.rank, record["rank"], record["cause"]
            self._code = record["code"]
            self.ending = f"rank {rank} ends the run: {_first_and_last(cause)[:_SHORT]}"
            stacks, silent = self._stacks if record["hang"] else None, record["silent"]
            if stacks is not None:
                stacks.append_stacks(self.ending)
            if silent in self._near:
                if stacks is not None:
                    stacks.request_stacks_of(silent, self._near[silent])
                with suppress(ProcessLookupError):
                    os.kill(self._near[silent], signal.SIGKILL)
            if rank == me:
                ends = "the run stops:" if self._code != FAILED else f"rank {me} stops because"
                where = "" if stacks is None else f"\n{_STACKS.format(stacks.folder)}"
                _say(f"{ends} {cause.rstrip()}{where}")
            elif self._groups.is_first_of_host and rank not in self._near:
                _say(f"rank {me} stops because of rank {rank}: {_first_and_last(cause)[:_SHORT]}")
            return self._code

    def _leave(self, code: int) -> None:
        try:
            self._clean_up()
        finally:
            # Raising SystemExit in this thread would end only the thread.
            os._exit(code)


class StuckThreadStartDetector:
    """Notices a main thread that waits for a thread which never begins: where memory or process ids
    are used up the system may start it, and Python cannot run it.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._still, self._looks = limit, StallClock(), 0

    def __call__(self) -> str | None:
        """A message about the fault, or None, for ``FailureWatch.add_check``."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code is not threading.Thread.start.__code__:
            inside = frame.f_code.co_filename == threading.__file__
            frame = frame.f_back if inside else None
        self._looks -= 1
        held = self._still.seconds_unchanged(self._looks if frame is None else id(frame))
        if held < self._limit:
            return None
        return (
            f"its main thread has waited {held:.0f} s for a thread that does not begin; memory or "
            "processes are limited (ulimit -v, ulimit -u, the pids of a cgroup)"
        )


def _dead_rank(local: dict[int, int]) -> str | None:
    for rank, pid in local.items():
        if process_gone(pid):
            ran = user_code_running_in(pid) or ", e.g. killed by the kernel"
            return f"rank {rank} (pid {pid}) died without a word{ran}"
    return None


def _first_and_last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, ConnectionError)) and any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out")
    )


def _say(text: str) -> None:
    # On a full disk the exit code has to do.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
