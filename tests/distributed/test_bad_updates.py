"""An update whose loss is not a number changes nothing, on any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_saved_state import ranks
from tiny_models import layers_for, random_batch, save_tiny
from world import run_world


@pytest.mark.parametrize("layout", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
def test_a_bad_update_is_skipped_by_all_ranks(tmp_path: Path, layout: dict[str, Any]) -> None:
    model = save_tiny("qwen2_tied", tmp_path / "model", num_hidden_layers=layers_for(layout))
    spoilt = 5
    found = run_world(
        "damaging:skip_an_update",
        ranks(layout),
        layout=layout,
        directory=str(model),
        batch=random_batch(seed=5, rows=8),
        spoilt=spoilt,
    )
    for dp, skipped, good, same in found:
        ((reason, rows),) = skipped
        assert reason == "the loss is nan and the norm of the gradient nan in update 2"
        owner = dp == spoilt % layout.get("data", 1)
        # The rows of its micro-batch, not all of the rank's.
        assert (100 + spoilt in rows) == owner and len(rows) < 8 / layout.get("data", 1)
        assert owner or rows == ()
        assert good == same and good["loss"] == good["loss"]
