"""Rows and a reward in verl's form. With files of your own you do not need this one.

``python examples/journeys/verl_form.py DIR`` writes the rows.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """1 if the last number of the answer is right."""
    numbers = re.findall(r"-?[0-9]+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)


def write(folder: Path) -> None:
    """Write sums to train on, other sums to validate on, and differences to validate on."""
    sums = [(a, b, "buys", a + b) for a in range(2, 10) for b in range(2, 10)]
    differences = [(a, b, "eats", a - b) for a in range(3, 10) for b in range(2, a)]
    for name, split, facts in (
        ("sums", "train", [fact for n, fact in enumerate(sums) if n % 4]),
        ("sums", "test", sums[::4]),
        ("differences", "test", differences[::2]),
    ):
        rows = [
            {
                "data_source": f"mine/{name}",
                "prompt": [
                    {
                        "role": "user",
                        "content": f"Ann has {a} apples and {does} {b}. How many has she now?",
                    }
                ],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(right)},
                "extra_info": {"split": split, "index": index},
            }
            for index, (a, b, does, right) in enumerate(facts)
        ]
        file = folder / name / f"{split}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), file)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
