"""The ranks wait together for work that takes minutes, such as a generation, and no wait is silent,
endless or deaf to a stop.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from ctrl_megatron.background import describe_waits
from ctrl_megatron.errors import ServiceLost
from ctrl_megatron.parallel.groups import RankSet
from ctrl_megatron.parallel.stop import StopFlag, StopRequested

T = TypeVar("T")
_ROUND_SECONDS = 1.0
"""Seconds of one round; far below any time limit of a collective."""
_SIGN_SECONDS = 30.0
"""Seconds between two signs of life in the log."""
_MOST_DETAILS = 4


class WaitedTooLong(RuntimeError):
    """Work did not end within ``trainer.wait_timeout``; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRules:
    """The conditions under which all ranks wait together."""

    groups: RankSet
    stop: StopFlag
    limit: float
    """Seconds after which work counts as lost (``trainer.wait_timeout``)."""

    def wait_together(
        self,
        work: Future[T] | None,
        what: str,
        *,
        stoppable: bool = True,
        aloud: bool = True,
    ) -> T | None:
        """The result of this rank's ``work`` (None without any) when no rank's work is running any
        more. Collective over all ranks.

        Ranks without work wait for the others. In every round the ranks that still work report it,
        so no collective lasts longer than a round, however long the work takes. ``what`` completes
        "waiting 40 s for ...": rank 0 prints that every 30 seconds, with the parts of the work that
        are open (``awaited``), unless it is not ``aloud``: those who are waited for say more.

        Raises StopRequested, on all ranks and within a round, once a stop is requested on any; this
        rank's work is cancelled then. With ``stoppable=False`` a stop has no effect. Raises
        ServiceLost, on all ranks with the same text, if the work of any raised it and no rank's
        work is running any more. Raises WaitedTooLong after ``limit`` seconds, and at once any
        other error of the work, each on the rank of the work only: that ends the run.
        """
        began, next_sign, lost = time.monotonic(), _SIGN_SECONDS, ""
        while True:
            asked = stoppable and self.stop.is_set
            if work is not None and not asked:
                wait((work,), timeout=_ROUND_SECONDS)
            working = work is not None and not work.done()
            if work is not None and not working:
                try:
                    work.result()
                except ServiceLost as error:
                    lost = str(error)
            waited = time.monotonic() - began
            stopped, busy, due, failed = self.groups.any_rank(
                asked, working, aloud and working and waited > next_sign, bool(lost)
            )
            if stopped:
                if work is not None:
                    work.cancel()
                raise StopRequested
            if not busy and failed:
                raise ServiceLost(next(filter(None, self.groups.all_gather(lost))))
            if not busy:
                return None if work is None else work.result()
            if working and waited > self.limit:
                raise self._lost(_words(what))
            if due:
                next_sign = waited + _SIGN_SECONDS
                self._say(waited, _words(what) if working else None)

    def wait_alone(self, ready: Callable[[float], bool], what: str) -> None:
        """Wait on this rank only, while the others wait for it in a collective, so that a stop must
        wait too. ``ready(seconds)`` waits at most that long and returns whether the wait is over.
        Raises WaitedTooLong.
        """
        began = time.monotonic()
        while not ready(_SIGN_SECONDS):
            waited = time.monotonic() - began
            if waited > self.limit:
                raise self._lost(what)
            print(f"waiting {waited:.0f} s for {what}", file=sys.stderr, flush=True)

    def _lost(self, what: str) -> WaitedTooLong:
        return WaitedTooLong(
            f"{what} did not end within {self.limit:g} s, the limit that trainer.wait_timeout sets"
        )

    def _say(self, waited: float, mine: str | None) -> None:
        """Print on rank 0 what the ranks wait for. Collective."""
        named = [words for words in self.groups.all_gather(mine) if words is not None]
        if self.groups.is_first and named:
            others = f" (and {len(named) - 1} more of the ranks)" if len(named) > 1 else ""
            print(f"waiting {waited:.0f} s for {named[0]}{others}", file=sys.stderr, flush=True)


def _words(what: str) -> str:
    details = describe_waits()
    shown = "; ".join(details[:_MOST_DETAILS])
    left = f"; and {len(details) - _MOST_DETAILS} more" if len(details) > _MOST_DETAILS else ""
    return f"{what}: {shown}{left}" if details else what
