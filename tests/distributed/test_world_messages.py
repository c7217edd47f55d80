"""Rows between worlds of different sizes, by real processes (``tools/bench/worlds.py``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_redistributions_a_diamond_and_the_rate_of_a_message() -> None:
    """4 -> 2 -> 4 -> 1 data ranks lose and repeat nothing; two worlds work at the same time."""
    command = [sys.executable, "tools/bench/worlds.py", "--megabytes", "100"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert ran.returncode == 0, ran.stderr[-6000:]
    found = json.loads(ran.stdout)
    assert found["redistributions"] == {"once": True, "whole_groups": True, "right": True}
    # Each branch sleeps a second.
    assert found["diamond"]["joined"] and found["diamond"]["overlap_seconds"] > 0.5
    assert found["rates"]["bytes"] > 99e6
