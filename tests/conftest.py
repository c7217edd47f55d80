"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is not a failure: no test asserts how long an example takes.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
