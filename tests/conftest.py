"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from guardian import guard
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

_FIRST, _LAST = ("integration", "rollout"), ("distributed", "sandbox", "hostile")
"""Folders with long files: those whose tests keep all cores busy, and, from the end, those whose
tests mostly wait for time limits. Short ones between them, where the workers meet."""
_TOGETHER = dict.fromkeys(("test_rl_run.py", "test_resume.py", "test_restarts.py"), "whole_run")
"""Files that compare with the same long run, which each worker would repeat."""

# A path that no test has made looks like a model's id on the Hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# A busy machine is not a failure: no test asserts how long an example takes.
# A change is not refused for an example that another run would not have drawn; make test-long
# draws others for what strangers send.
settings.register_profile("the_same", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile("the_same")


def pytest_configure(config: pytest.Config) -> None:
    """Let nothing that tests start outlive them, whatever ends them; xdist's workers inherit it.
    Under nohup programs would inherit an ignored SIGHUP; a handler is not inherited.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if not hasattr(config, "workerinput"):
        config.guardian = guard()  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that compute run first, tests that wait last; see ``FileScheduling``."""
    order = {name: number for number, name in enumerate((*_FIRST, None, *_LAST))}
    root = Path(__file__).parent
    items.sort(key=lambda item: order.get(item.path.relative_to(root).parts[0], order[None]))


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collections, which would scan them each time."""
    gc.freeze()


class FileScheduling(LoadFileScheduling):
    """Files stay whole in one worker, which makes their fixtures once.

    ``xdist_group`` would say so too, but xdist 3.8 writes groups into an attribute that pytest 9.2
    no longer reads. The first worker begins at the front and the others at the back, so that one
    computes while others wait: two that compute would disturb each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _TOGETHER.get(Path(file).name, file)

    def _assign_work_unit(self, node: Any) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    return FileScheduling(config, log)
