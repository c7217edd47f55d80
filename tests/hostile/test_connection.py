"""Programs that attack the connection between judge and program: none passes a test, none breaks
the service, and none leaves anything behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hostile_connection import ATTACKS, LIMITS, WORKERS, submission
from hostile_service import HONEST, Outcomes, idle_table, readable_python, service_stats
from hostile_service import submission as secret_submission

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.wire import EvalResult


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    """The outcome of every attack, some of them at once."""
    python = readable_python()
    if python is None:
        pytest.skip("started as root without an interpreter that an unprivileged user can read")
    options = {"workers": WORKERS, "isolation": "standard", "limits": LIMITS, "python": python}
    with EmbeddedSandbox.start(**options) as service:
        found = asyncio.run(_run(service))
        assert service.alive()
        yield found


async def _run(service: EmbeddedSandbox) -> Outcomes:
    found = Outcomes(isolation=service.isolation)
    slots = asyncio.Semaphore(2 * WORKERS)
    async with SandboxClient(service.endpoint, attempts=1) as client:

        async def judge(name: str) -> None:
            async with slots:
                try:
                    found.judged[name] = await client.submit(submission(name))
                except Exception as error:
                    found.judged[name] = error

        await client.submit(secret_submission(HONEST))
        found.before = await idle_table(service)
        await asyncio.gather(*map(judge, ATTACKS))
        found.honest = await client.submit(secret_submission(HONEST))
        found.counters = await service_stats(service.endpoint)
    found.after = await idle_table(service)
    return found


def test_there_are_enough_of_them() -> None:
    assert len(ATTACKS) >= 150


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_passes(outcomes: Outcomes, name: str) -> None:
    result = outcomes.judged[name]
    assert isinstance(result, EvalResult), result
    reasons = [(case.test_info or {}).get("reason", "") for case in result.tests]
    assert len(result.tests) >= len(ATTACKS[name].tests)
    assert not any(case.passed for case in result.tests), reasons
    assert all(reasons), "a failure says why"
    assert not any("brought down" in reason for reason in reasons), "the judge itself died"


def test_afterwards_honest_programs_still_pass(outcomes: Outcomes) -> None:
    assert outcomes.honest is not None and outcomes.honest.accepted


def test_no_attack_was_taken_for_a_fault_of_the_service(outcomes: Outcomes) -> None:
    assert (outcomes.counters["faults"], outcomes.counters["restarts"]) == (0, 0)


def test_nothing_is_left(outcomes: Outcomes) -> None:
    assert outcomes.before is not None
    assert outcomes.after == outcomes.before
