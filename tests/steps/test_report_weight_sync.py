"""The metrics of a push."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict

from ctrl_megatron.steps.ctrl import report_weight_sync

PUSH = SimpleNamespace(num_bytes=3e9, seconds=1.5)
AGAIN = SimpleNamespace(num_bytes=0, seconds=0.5)


@pytest.mark.parametrize(
    ("reports", "metrics"),
    [
        (
            [PUSH, PUSH],
            {
                **{"sync/pushes": 2, "sync/seconds": 3, "sync/gigabytes": 6},
                "sync/gigabytes_per_second": 2,
            },
        ),
        # The proxy's weights are kept.
        (
            [PUSH, AGAIN],
            {
                **{"sync/pushes": 2, "sync/seconds": 2, "sync/gigabytes": 3},
                "sync/gigabytes_per_second": 2,
            },
        ),
        ([AGAIN], {"sync/pushes": 1, "sync/seconds": 0.5, "sync/gigabytes": 0}),
        # In a warm-up of the value model without a proxy the engine holds the actor all the time.
        ([], {"sync/pushes": 0}),
    ],
)
def test_pushes_are_reported_where_there_are_any(reports: list[Any], metrics: Any) -> None:
    worker: Any = SimpleNamespace(owner=SimpleNamespace(pop_push_reports=lambda: reports))
    assert report_weight_sync(worker, TensorDict({}, batch_size=[])).metrics == metrics
