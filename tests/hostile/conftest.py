"""One service per level of isolation; every hostile program runs on it once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hostile_service import LEVELS, LIMITS, Outcomes, readable_python, run_everything

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient, SubmitRequest
from ctrl_megatron.sandbox.wire import EvalResult, TestConfig


@pytest.fixture(scope="session", params=LEVELS)
def service(request: pytest.FixtureRequest) -> Iterator[EmbeddedSandbox]:
    python = readable_python()
    if python is None:
        pytest.skip("started as root without an interpreter that an unprivileged user can read")
    options = LEVELS[request.param]
    with EmbeddedSandbox.start(workers=2, limits=LIMITS, python=python, **options) as service:
        wanted = "landlock" if "without" in options else "namespaces"
        if service.isolation["tier"] != wanted:
            pytest.skip(f"this kernel gives no {wanted}: {service.isolation['missing']}")
        yield service


@pytest.fixture(scope="session")
def outcomes(service: EmbeddedSandbox) -> Outcomes:
    found = asyncio.run(run_everything(service))
    assert service.alive()
    return found


Submit = Callable[..., EvalResult]


@pytest.fixture
def submit(service: EmbeddedSandbox) -> Submit:
    """Judge ``code`` by a record of a kind; every test, once."""

    def call(kind: str, code: str, data: dict[str, Any], **config: Any) -> EvalResult:
        settings = {"language": "python", "run_timeout": 10.0, "extra": {"run_all_cases": True}}
        request = SubmitRequest(
            dataset="hostile",
            id=0,
            completion=f"```python\n{code}\n```",
            config=TestConfig(dataset_type=kind, provided_data=data, **{**settings, **config}),
        )

        async def ask() -> EvalResult:
            async with SandboxClient(service.endpoint, attempts=1) as client:
                return await client.submit(request)

        return asyncio.run(ask())

    return call
