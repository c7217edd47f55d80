"""Engines and sandboxes of a host: how they are watched, and started again after their end."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from ctrl_megatron.background import BackgroundLoop, StallClock

_ASK_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_LONGEST_PAUSE = 60.0
_HOUR = 3600.0


class Service(Protocol):
    """A service in a process of its own, on the rank that has launched it."""

    name: str

    def death_message(self) -> str | None:
        """A message about the death of the process, with the end of its output; None while it is
        alive."""
        ...

    def stop(self) -> None:
        """End the process and its children. May be called twice."""
        ...

    def launch_again(self) -> None:
        """Start a process in place of the one that ``stop`` has ended, at the same address."""
        ...

    def wait_ready(self) -> None:
        """Return when it answers; raises what keeps it from that."""
        ...


class SilenceProbe(Protocol):
    """Notices that a service is silent."""

    def __call__(self) -> str | None:
        """A message about the fault; None while the service answers."""
        ...

    def reset(self) -> None:
        """Another process of the service runs from now on."""
        ...


class ServiceKeeper:
    """Starts a service again when it has died, when it is silent and when it is of no use.

    Where it dies more than ``most`` times within an hour, ``final_death_message`` and
    ``final_silence_message`` report its last end. The pause before a restart is doubled each time,
    from one second on. With ``waits`` a restart comes no sooner than ``allow_restart`` asks for it,
    because others use the service's devices until then; they wait until it is up, so that starts
    which fail need no further permission.
    """

    def __init__(self, service: Service, *, most: int, waits: bool = False) -> None:
        self.service, self._most, self._waits = service, most, waits
        self.restarts = 0
        """Restarts of the run."""
        self.fresh = False
        """Whether it was started again and is not in the others' state yet."""
        self.failure, self._hangs = "", False
        self._doubt, self._down = "", False
        self._times: list[float] = []
        self._allowed, self._ended, self._one = (
            threading.Event(),
            threading.Event(),
            threading.Lock(),
        )
        self._thread: threading.Thread | None = None

    def watch(self, silence: SilenceProbe) -> None:
        """Watch the service, which is ready, from now on."""
        keep = partial(self._keep, silence)
        self._thread = threading.Thread(target=keep, name="keeper", daemon=True)
        self._thread.start()

    def final_death_message(self) -> str | None:
        """What the service died of, if it is not started again; else None. Before ``watch`` is
        called it never is. For ``FailureWatch.add_check``.
        """
        if self._thread is None:
            return self.service.death_message()
        return self.failure if self.failure and not self._hangs else None

    def final_silence_message(self) -> str | None:
        """The same for a service that was alive and silent."""
        return self.failure if self._hangs else None

    @property
    def is_up(self) -> bool:
        """Whether it is not known to be lost."""
        return not (self._doubt or self._down)

    def request_restart(self, cause: str, restarts: int) -> None:
        """Have it started again because of ``cause``, unless it was since it had ``restarts``."""
        if restarts == self.restarts:
            self._doubt = cause

    def allow_restart(self) -> None:
        """The devices of the service are free for its restart."""
        self._allowed.set()

    def stop(self) -> None:
        """End the service, also while it starts, for good."""
        self._ended.set()
        self._allowed.set()
        with self._one:
            self.service.stop()

    def _keep(self, silence: SilenceProbe) -> None:
        try:
            self._watch(silence)
        except Exception as error:
            self.failure = f"the {self.service.name} cannot be watched: {error!r}"

    def _watch(self, silence: SilenceProbe) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            cause = self.service.death_message() or self._doubt
            silent = None if cause else silence()
            if cause or silent:
                self._down = True
                if not self._again(cause or silent or "", hangs=silent is not None):
                    return
                silence.reset()
                self._down, self._doubt = False, ""
                self._allowed.clear()

    def _again(self, cause: str, *, hangs: bool) -> bool:
        """Start it again; False if it may not be, or if the run ends."""
        while not self._ended.is_set():
            began = time.monotonic()
            self._times = [at for at in self._times if began - at < _HOUR]
            if len(self._times) >= self._most:
                self._hangs, self.failure = hangs, cause
                return False
            number = len(self._times) + 1
            self._times.append(began)
            self.restarts += 1
            name = self.service.name
            _say(
                f"the {name} is started again (restart {number}, of at most {self._most} within an "
                f"hour): {cause.rstrip()}"
            )
            try:
                if self._launched(pause=min(2.0 ** (number - 1), _LONGEST_PAUSE)):
                    self.service.wait_ready()
                    self.fresh = True
                    _say(f"the {name} answers again after {time.monotonic() - began:.0f} s")
                    return True
            except Exception as error:
                cause, hangs = str(error), False
        return False

    def _launched(self, *, pause: float) -> bool:
        with self._one:
            self.service.stop()
        if self._waits:
            self._allowed.wait()
        if self._ended.wait(pause):
            return False
        with self._one:
            if not self._ended.is_set():
                self.service.launch_again()
        return not self._ended.is_set()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def child_death_message(
    name: str, pid: int, alive: Callable[[], bool], last_words: Callable[[], str]
) -> str | None:
    """A message about the death of a child process, with the end of its output; None while it is
    alive."""
    if alive():
        return None
    words = last_words().strip() or "(none)"
    return f"the {name} (pid {pid}) died; the end of its output:\n{words}"


class ServiceProbe(Protocol):
    """A service that is asked for signs of life, on an event loop of its own."""

    async def is_answering(self) -> bool:
        """Ask once. False where the service is not reached."""
        ...

    async def close(self) -> None: ...

    def silence_message(self, seconds: float) -> str:
        """The error for a service that runs but has not answered for ``seconds``."""
        ...


class SilenceDetector:
    """Notices a service whose process is alive but which does not answer any more. It is asked
    every two seconds.
    """

    def __init__(self, service: ServiceProbe, probes: BackgroundLoop, limit: float) -> None:
        self._service, self._limit = service, limit
        self._answers, self._standstill = 0, StallClock()
        self._asking = probes.submit(self._ask())

    async def _ask(self) -> None:
        try:
            while True:
                # A connection to an earlier process may stay open for ever.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._limit):
                        self._answers += await self._service.is_answering()
                await asyncio.sleep(_ASK_SECONDS)
        finally:
            await self._service.close()

    def reset(self) -> None:
        """Count from now on: another process runs."""
        self._standstill = StallClock()

    def __call__(self) -> str | None:
        """A message about the fault, or None; call it every second or more often."""
        if self._asking.done() and not self._asking.cancelled():
            return f"a service is no longer watched: {self._asking.exception()!r}"
        silent = self._standstill.seconds_unchanged(self._answers)
        return self._service.silence_message(silent) if silent > self._limit else None
