"""Work beyond the time limit of a collective does not end a run, and a rank that hangs does; real
ranks and a real engine.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("holds_the_lock", [False, True], ids=["sleeps", "holds Python's lock"])
def test_a_rank_that_hangs_in_a_users_code_leaves_its_stacks(
    tmp_path: Path, holds_the_lock: bool
) -> None:
    with pytest.raises(AssertionError) as ended:
        run_world("hang_in_users_code", 2, run_dir=tmp_path, holds_the_lock=holds_the_lock)
    said, folder = str(ended.value), tmp_path / "stacks"
    expected = "rank 1 has not been heard of for 3 s" if holds_the_lock else "Timed out"
    assert expected in said and said.count("rank 0 stops because") == 1
    assert f"the Python stacks of the ranks at this moment are in {folder}/rank_N.txt" in said
    mine, others = ((folder / f"rank_{rank}.txt").read_text() for rank in (0, 1))
    assert "in a_users_loss" in others and "a_users_loss" not in mine
    assert re.match(r"\d{4}-\d\d-\d\d [\d:]{8} rank 0 ends the run: ", mine)
    assert "test_long_waits" not in mine and "failure.py" in mine


def test_a_lost_host_is_named() -> None:
    with pytest.raises(AssertionError) as ended:
        run_world("lose_a_host", 3)
    said = str(ended.value)
    assert "rank 0 stops because rank 1 on host there, rank 2 on host there are lost: " in said
    assert "Traceback" not in said and said.count("\n") <= 3, said
