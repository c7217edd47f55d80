"""How a test ends that neither passes nor fails by its own check: failures of a call between judge
and program, which a test cannot take back, and tests that are not run.
"""

from __future__ import annotations


class HarnessFailure(BaseException):
    """A call could not be made, or its answer could not be used: the test has failed, even if it
    catches this. It derives from ``BaseException``, so that a test that expects an exception of the
    function does not take this for one.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class CandidateCannotAnswer(HarnessFailure):
    """The candidate cannot answer any more."""


class TestsRefused(Exception):
    """The tests of a text cannot be run here; the text says why."""


class Skipped(Exception):
    """The test skipped itself: it has not passed."""
