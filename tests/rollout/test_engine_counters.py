"""What engines count, and what a step makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from ctrl_megatron.rollout.counters import Counters, RequestMeter, step_metrics
from ctrl_megatron.types import Completion


def drawn(tokens: int) -> Completion:
    return Completion(token_ids=(1,) * tokens, log_probs=(), finish_reason="length", spans=())


def test_an_engine_is_busy_while_it_has_a_request() -> None:
    now = [0.0]
    meter = RequestMeter(lambda: now[0])

    def after(seconds: float) -> Counters:
        now[0] += seconds
        return meter.counters()

    assert after(5) == {"drawn_tokens": 0, "busy_seconds": 0, "under_way": 0}
    with meter.count_request(4) as finished:
        assert after(2) == {"drawn_tokens": 0, "busy_seconds": 2, "under_way": 4}
        with pytest.raises(KeyError), meter.count_request(3):
            assert after(1)["under_way"] == 7
            raise KeyError
        finished([drawn(3), drawn(4)])
        assert after(1) == {"drawn_tokens": 7, "busy_seconds": 4, "under_way": 4}
    assert after(10) == {"drawn_tokens": 7, "busy_seconds": 4, "under_way": 0}
    with meter.count_request(1):
        assert after(1)["busy_seconds"] == 5


BEFORE = {"drawn_tokens": 100.0, "busy_seconds": 10.0, "prompt_tokens": 50.0, "waiting": 9.0}
BEFORE |= {"cached_tokens": 10.0, "preemptions": 1.0, "queued_seconds": 3.0}
NOW = {"drawn_tokens": 300.0, "busy_seconds": 14.0, "prompt_tokens": 150.0, "waiting": 0.0}
NOW |= {"cached_tokens": 85.0, "preemptions": 1.0, "queued_seconds": 11.0}


def test_a_step_reports_the_growth() -> None:
    assert step_metrics({"a": BEFORE}, {"a": NOW}) == {
        "engine/tokens_per_second": 200 / 4,
        "engine/cache_hit_rate": 75 / 100,
        "engine/preemptions": 0,
        "engine/queue_length": 8 / 4,
    }


def test_engines_are_taken_together() -> None:
    slow = {**NOW, "busy_seconds": 18.0, "cached_tokens": 35.0, "preemptions": 4.0}
    assert step_metrics({"a": BEFORE, "b": BEFORE}, {"a": NOW, "b": slow}) == {
        "engine/tokens_per_second": 200 / 4 + 200 / 8,
        "engine/cache_hit_rate": 100 / 200,
        "engine/preemptions": 3,
        "engine/queue_length": 16 / 12,
    }


def test_an_engine_that_was_started_again_counts_from_nothing() -> None:
    again = {name: value / 10 for name, value in NOW.items()}
    assert step_metrics({"a": BEFORE}, {"a": again}) == step_metrics({}, {"a": again})


@pytest.mark.parametrize(
    ("now", "names"),
    [
        ({"drawn_tokens": 5.0, "busy_seconds": 1.0, "under_way": 0.0}, {"tokens_per_second"}),
        ({"drawn_tokens": 0.0, "busy_seconds": 0.0, "under_way": 0.0}, set()),
        ({**BEFORE, "waiting": 2.0}, {"preemptions"}),
    ],
)
def test_what_an_engine_does_not_tell_is_absent_and_no_0(now: Any, names: set[str]) -> None:
    before = {"a": BEFORE} if "preemptions" in now else {}
    assert set(step_metrics(before, {"a": now})) == {f"engine/{name}" for name in names}
    both = step_metrics({}, {"a": NOW, "b": {"drawn_tokens": 5.0, "busy_seconds": 1.0}})
    assert set(both) == {"engine/tokens_per_second"}
    assert step_metrics({}, {}) == {}
