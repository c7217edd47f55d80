"""The way from the command to the loss and from the update to the engine: docs/architecture.md has
the calls that a real step makes."""

from __future__ import annotations

import re

import pytest
from launched_run import Job
from tiny_run import REPOSITORY
from traced_step import Call, traced

pytestmark = pytest.mark.timeout(600)

LOSS = ("vanilla_terms", "ctrl_megatron/algorithms/policy_losses.py")
PUSH = ("push", "ctrl_megatron/resharding/push.py")
SENT = ("RemoteEngine.update", "ctrl_megatron/rollout/client.py")
LOADED = ("HfEngine.load_chunk", "ctrl_megatron/rollout/hf_engine.py")
MOST_CALLS = 13


@pytest.fixture(scope="module")
def trails(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    return traced(job, (LOSS, PUSH, SENT, LOADED), tmp_path_factory.mktemp("traced"))


def described(title: str) -> list[Call]:
    page = (REPOSITORY / "docs/architecture.md").read_text()
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `([\w.]+)`[^|]* \| `([\w/.]+)` \|", section, re.MULTILINE)
    assert len(rows) <= MOST_CALLS
    for name, file in rows:
        assert name.rpartition(".")[2] in (REPOSITORY / file).read_text(), name
    return [(name, file) for name, file in rows]


def test_from_the_command_to_the_loss(trails: dict[str, list[Call]]) -> None:
    calls = trails["vanilla_terms"]
    assert calls == described("From the command to the loss")


def test_from_the_update_to_the_engine(trails: dict[str, list[Call]]) -> None:
    from_node = trails["push"]
    from_node = from_node[[name for name, _ in from_node].index("sync_weights") :]
    found = [*from_node, *trails["RemoteEngine.update"], *trails["HfEngine.load_chunk"]]
    assert found == described("From the update to the engine")
