"""Work beyond the time limit of a collective does not end a run; real ranks and a real engine."""

from __future__ import annotations

from pathlib import Path

from tiny_models import save_tiny
from world import run_world

LIMIT = 5.0
"""Time limit of gloo's collectives, in seconds."""


def test_waiting_outlasts_the_time_limit_of_collectives(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    for found in run_world(
        "long_waits", 2, directory=str(model), log=str(tmp_path / "engine.log"), limit=LIMIT
    ):
        assert found["start"] > LIMIT and found["generation"] > LIMIT
        assert found["answers"] == [5, 5]
        # The rank that was asked does not drive the engine.
        assert found["stop"] < LIMIT
