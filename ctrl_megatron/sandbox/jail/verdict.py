"""What the judge finds about one test, in the jail and in the service alike."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """On the wire it is a list: there are many."""

    index: int
    """Of the test."""
    status: str
    """``passed``, ``failed``, ``timeout``, ``died``, ``protocol`` or ``not_run``."""
    reason: str
    """Empty where it passed."""
    seconds: float | None
    """Of wall clock; None where the test did not run."""

    @property
    def passed(self) -> bool:
        """Whether the test passed; nothing but this status means so."""
        return self.status == "passed"
