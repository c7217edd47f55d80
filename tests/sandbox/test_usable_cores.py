from __future__ import annotations

import os

from ctrl_megatron.sandbox.cores import usable_cores, within_quotas


def test_the_smallest_quota_counts() -> None:
    assert within_quotas(16, []) == 16
    assert within_quotas(16, ["max 100000\n", "850000 100000\n", "1200000 100000\n"]) == 8
    assert within_quotas(4, ["850000 100000\n"]) == 4
    assert within_quotas(4, ["50000 100000\n"]) == 1


def test_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= usable_cores() <= len(before)
