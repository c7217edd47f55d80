"""When one process of a run dies, all stop within seconds and print the first cause.

Every rank watches the ranks of its own host by process id, its neighbour's heartbeat (which covers
other hosts), the services it started, and a key in the rendezvous store under which the first
failure is written. The watch is a thread that ends the process itself, so a collective that hangs
because a peer is gone cannot keep a rank alive.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ctrl_megatron.errors import ServiceFault, user_fault
from ctrl_megatron.parallel.groups import ProcessGroups
from ctrl_megatron.parallel.parent_watch import process_gone

_POLL_SECONDS = 0.5
_BEAT_SECONDS = 2.0
_ROOT_CAUSE_SECONDS = 3.0
FAILED, WRONG_INPUT, STOPPED, SERVICE = 13, 2, 130, 14
"""Exit codes: a bug or a dead process; an error of the user (a full disk too); a second signal; a
service that judges failed too often."""


class FailureWatch:
    """Watches a rank's peers and services from its construction until ``close``."""

    def __init__(
        self, groups: ProcessGroups, *, timeout: float, clean_up: Callable[[], None]
    ) -> None:
        self._groups, self._timeout, self._clean_up = groups, timeout, clean_up
        self._services: list[Callable[[], str | None]] = []
        self._ended, self._announced = threading.Event(), False
        # A separate connection: the main thread may block the other store.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore("failure", store.clone())
        self._near = groups.from_here(os.getpid())
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def guard(self, died: Callable[[], str | None]) -> None:
        """Call the function regularly from now on. It returns None while its child process is alive
        and what happened to it otherwise, which is then this rank's failure.
        """
        self._services.append(died)

    def quiet(self) -> None:
        """Stop watching services and peers, which end one by one from now on. Collective."""
        self._groups.barrier()
        self._ended.set()
        self._thread.join()

    def close(self) -> None:
        """Stop watching, if ``quiet`` has not done so."""
        if not self._ended.is_set():
            self.quiet()

    @staticmethod
    def exit(code: int) -> None:
        """End this process without running destructors."""
        os._exit(code)

    def report(self, error: BaseException) -> int:
        """Publish this rank's failure and print the run's first cause; call from the main thread.
        Returns the exit code of all ranks.

        An error of the user, a service that failed and a second signal are one line without a
        traceback. A broken
        collective usually follows another rank's failure, which therefore gets a few seconds to
        be published first. Without the launcher's store nothing can be published.
        """
        rank, fault = self._groups.rank, user_fault(error)
        if fault is not None:
            cause, code = str(fault), WRONG_INPUT
        elif isinstance(error, ServiceFault):
            cause, code = str(error), SERVICE
        elif isinstance(error, KeyboardInterrupt):
            cause, code = "interrupted; what was not saved is lost", STOPPED
        else:
            text = "".join(traceback.format_exception(error))
            cause, code = f"rank {rank} failed:\n{text}", FAILED
        try:
            return self._tell(cause, code, patient=_is_echo(error))
        except (RuntimeError, ConnectionError) as lost:
            _say(cause if code != FAILED else f"{cause}\nand its launcher is gone ({lost})")
            return code

    def _tell(self, cause: str, code: int, *, patient: bool) -> int:
        deadline = time.monotonic() + (_ROOT_CAUSE_SECONDS if patient else 0.0)
        while time.monotonic() < deadline and not self._published():
            time.sleep(0.1)
        self._publish(cause, code)
        return self._announce()

    def _watch(self) -> None:
        me = self._groups.rank
        local = {rank: pid for rank, pid in self._near.items() if rank != me}
        neighbour = (me + 1) % self._groups.layout.world_size
        beat, last_beat, seen, seen_at = 0, 0.0, b"", time.monotonic()
        while not self._ended.wait(_POLL_SECONDS):
            try:
                now = time.monotonic()
                if now - last_beat > _BEAT_SECONDS:
                    beat, last_beat = beat + 1, now
                    self._store.set(f"beat/{me}", str(beat))
                    key = f"beat/{neighbour}"
                    current = self._store.get(key) if self._store.check([key]) else b""
                    if current != seen or neighbour == me:
                        seen, seen_at = current, now
                cause = self._dead_service() or _dead_rank(local)
                if cause is None and now - seen_at > self._timeout:
                    cause = f"rank {neighbour} has not been heard of for {self._timeout:.0f} s"
                if cause is not None:
                    self._publish(cause, FAILED)
                if self._published():
                    # The failing rank prints its own traceback; the others name the cause.
                    self._leave(self._announce())
            except (RuntimeError, ConnectionError) as error:
                if not self._ended.is_set():
                    # Where the launcher does not serve the store, rank 0 does.
                    lost = f"the rendezvous store is gone, and so is the launcher: {error}"
                    _say(f"rank {me} stops because {_dead_rank(local) or lost}")
                    self._leave(FAILED)

    def _dead_service(self) -> str | None:
        return next((cause for died in self._services if (cause := died())), None)

    def _published(self) -> bool:
        return self._store.check(["cause"])

    def _publish(self, cause: str, code: int) -> None:
        record = json.dumps({"rank": self._groups.rank, "cause": cause, "code": code})
        self._store.compare_set("cause", "", record)

    def _announce(self) -> int:
        """Print why the run ends, once on this rank; returns its exit code."""
        record = json.loads(self._store.get("cause"))
        me, rank, cause, code = self._groups.rank, record["rank"], record["cause"], record["code"]
        if self._announced:
            return code
        self._announced = True
        if code == FAILED:
            seen = "" if rank == me else f"[seen by rank {rank}] "
            _say(f"rank {me} stops because {seen}{cause}")
        elif rank == me:
            _say(f"the run stops: {cause}")
        return code

    def _leave(self, code: int) -> None:
        try:
            self._clean_up()
        finally:
            os._exit(code)


def _dead_rank(local: dict[int, int]) -> str | None:
    for rank, pid in local.items():
        if process_gone(pid):
            return f"rank {rank} (pid {pid}) died without a word, e.g. killed by the kernel"
    return None


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, ConnectionError)) and any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out")
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
