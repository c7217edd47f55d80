"""One service per level of isolation; every hostile program runs on it once."""

from __future__ import annotations

import asyncio

import pytest
from hostile_service import LEVELS, LIMITS, Outcomes, readable_python, run_everything

from ctrl_megatron.sandbox import EmbeddedSandbox


@pytest.fixture(scope="session", params=LEVELS)
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    python = readable_python()
    if python is None:
        pytest.skip("started as root without an interpreter that an unprivileged user can read")
    options = LEVELS[request.param]
    with EmbeddedSandbox.start(workers=2, limits=LIMITS, python=python, **options) as service:
        wanted = "landlock" if "without" in options else "namespaces"
        if service.isolation["tier"] != wanted:
            pytest.skip(f"this kernel gives no {wanted}: {service.isolation['missing']}")
        found = asyncio.run(run_everything(service))
        assert service.alive()
    return found
