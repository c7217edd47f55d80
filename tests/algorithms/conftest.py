from __future__ import annotations

from hypothesis import settings

# A busy machine is not a failure.
settings.register_profile("algorithms", deadline=None)
settings.load_profile("algorithms")
