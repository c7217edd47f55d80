"""Make rows of olympiad problems from files of open-r1/ioi and open-r1/ioi-test-cases:
``python tools/prepare_ioi.py --problems ioi/data --tests ioi-test-cases/2024 --out
runs/ioi.parquet``. The reward ``ioi_code`` judges them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import count_flag, existing_path
from ctrl_megatron.data.rows import write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.ioi import ioi_rows, read_ioi_tests
from ctrl_megatron.preparation.records import read_data_records


@command_entry_point("prepare_ioi")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows. Exit codes: 0 done, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--problems", required=True, nargs="+", type=existing_path)
    parser.add_argument("--tests", required=True, nargs="+", type=existing_path)
    parser.add_argument("--out", required=True, help="parquet file to write")
    parser.add_argument(
        "--longest-tests", type=count_flag(), help="most characters of a subtask's tests together"
    )
    options = parser.parse_args(arguments)
    tests = read_ioi_tests(record for path in options.tests for record in read_data_records(path))
    problems = (record for path in options.problems for record in read_data_records(path))
    rows, dropped = ioi_rows(problems, tests, longest=options.longest_tests)
    for reason, number in dropped.counts().most_common():
        print(f"left out: {number} subtask(s): {reason}")
    if not rows:
        raise UserError("--problems: no subtask of these files can be judged with these tests")
    write_rows(options.out, rows)
    print(f"wrote {len(rows)} subtasks of {len({row.problem_id for row in rows})} problems")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
