"""Settings of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

_LONGEST_FIRST = ("integration", "rollout", "distributed", "sandbox", "hostile", "checkpoint")
_TOGETHER = {"test_rl_run.py": "whole_run", "test_resume.py": "whole_run"}
"""Files that compare with the same long run, which each worker would make anew."""

# A busy machine is not a failure: no test asserts how long an example takes.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no worker ends long before the other; files stay whole."""
    order = {name: number for number, name in enumerate(_LONGEST_FIRST)}
    root = Path(__file__).parent
    items.sort(key=lambda item: order.get(item.path.relative_to(root).parts[0], len(order)))
    for item in items:
        file = item.path.relative_to(root).as_posix()
        item.add_marker(pytest.mark.xdist_group(_TOGETHER.get(item.path.name, file)))
