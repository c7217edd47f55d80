"""Make rows of another task from a file of critique rows: ``python tools/make_task_rows.py --rows
runs/data/train.parquet --task solving --out runs/data/solving.parquet``.

Tasks: ``solving`` asks for a program (one row per problem; ``code`` rewards it), and ``judging``
asks whether the program of a row is correct (one row per row; ``judgment`` rewards it).
``data.mixture`` trains on several such files at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.data.rows import read_rows, write_rows
from ctrl_megatron.preparation.task_rows import (
    JUDGING,
    SOLVING,
    make_judging_rows,
    make_solving_rows,
)

_MAKERS = {SOLVING: make_solving_rows, JUDGING: make_judging_rows}


@command_entry_point("make_task_rows")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows; see the module's docstring."""
    parser = CommandParser(__doc__)
    parser.add_argument("--rows", required=True, help="parquet file of critique rows")
    parser.add_argument("--task", required=True, choices=tuple(_MAKERS))
    parser.add_argument("--out", required=True, help="parquet file to write")
    options = parser.parse_args(arguments)
    made = _MAKERS[options.task](read_rows(options.rows))
    write_rows(options.out, made)
    print(f"wrote {len(made)} rows of the task {options.task} to {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
