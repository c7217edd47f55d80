"""The rules of repeated requests, which all HTTP clients share."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrl_megatron.sandbox.client.attempts import backoff_seconds, is_temporary, retry, retry_after


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("", 0.0), ("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("1e9", 60.0), ("nan", 0.0)),
        *(("inf", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)),
    ],
)
def test_retry_after(header: str, seconds: float) -> None:
    assert retry_after(header) == seconds


@given(st.integers(0, 2000), st.floats(0, 30))
def test_a_pause_doubles_up_to_a_minute(failed: int, backoff: float) -> None:
    least = min(backoff * 2 ** min(failed, 64), 60.0)
    assert least <= backoff_seconds(failed, backoff) <= least + backoff


def test_statuses() -> None:
    assert all(map(is_temporary, (408, 409, 425, 429, 500, 502, 503, 504)))
    assert not any(map(is_temporary, (200, 400, 401, 403, 404, 422)))


@pytest.mark.parametrize(
    ("failures", "calls", "ends"),
    [
        ([], 1, None),
        ([KeyError("a"), KeyError("b")], 3, None),
        ([KeyError("a"), KeyError("b"), KeyError("c")], 3, KeyError),
        ([ValueError("pointless")], 1, ValueError),
    ],
)
def test_an_attempt_is_repeated_while_that_may_help(
    failures: list[Exception], calls: int, ends: type[Exception] | None
) -> None:
    made, asked = 0, list[Exception]()

    async def attempt() -> str:
        nonlocal made
        made += 1
        if made <= len(failures):
            raise failures[made - 1]
        return "done"

    def again(error: Exception) -> float | None:
        asked.append(error)
        return 0.01 if isinstance(error, KeyError) else None

    run = retry(attempt, again, attempts=3, backoff=0.001)
    if ends is None:
        assert asyncio.run(run) == "done"
    else:
        with pytest.raises(ends):
            asyncio.run(run)
    assert made == calls and asked == failures[:2]
