"""Questions with answers in GSM8K's form, and a reward that reads the answer.

``python examples/journeys/own_reward.py FILE`` writes the rows; put your own in their place.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet


def last_number(items: list[Any]) -> list[float]:
    """1 if the last number of the completion equals the number after #### in column answer."""
    rewards = []
    for item in items:
        numbers = re.findall(r"-?[0-9]+", item.text)
        right = item.row["answer"].rpartition("#### ")[2]
        rewards.append(float(bool(numbers) and numbers[-1] == right))
    return rewards


last_number.reads = ("answer",)  # type: ignore[attr-defined]


def write(file: Path) -> None:
    """Write ``id``, ``prompt`` and ``answer``. The reward receives further columns by name."""
    sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    rows = {
        "id": [f"sums/{a}+{b}" for a, b in sums],
        "prompt": [f"Ann has {a} apples and buys {b}. How many has she now?" for a, b in sums],
        "answer": [f"{a} + {b} = {a + b}.\n#### {a + b}" for a, b in sums],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(rows), file)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
