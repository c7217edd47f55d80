"""Make rows of the questions of AceCode-87K that are neither solved by most answers nor by none:
``python tools/prepare_acecode.py --data AceCode-87K/data --out data/acecode_hard.parquet``. The
rewards ``code`` and ``code_format`` judge them (examples/diffucoder_7b.yaml). Files are read twice,
one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import existing_path, output_path
from ctrl_megatron.data.rows import write_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.acecode import CODERS, Difficulty, acecode_rows, pass_rates, select
from ctrl_megatron.preparation.records import SUFFIXES, Record, read_data_records


@command_entry_point("prepare_acecode")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows. Exit codes: 0 done, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--data", required=True, nargs="+", type=existing_path)
    parser.add_argument("--out", required=True, type=output_path, help="parquet file to write")
    parser.add_argument(
        "--difficulty",
        choices=get_args(Difficulty),
        default="hard",
        help="by the pass rates of the file's answers; hard is DiffuCoder's",
    )
    parser.add_argument("--coders", nargs="+", default=CODERS, help="models whose answers count")
    parser.add_argument(
        "--as-asked",
        action="store_true",
        help="no second row with the question as the docstring of a function",
    )
    options = parser.parse_args(arguments)
    rates = [pass_rates(record, options.coders) for record in _records(options.data)]
    kept = select(rates, options.difficulty)
    chosen = (record for record, keep in zip(_records(options.data), kept, strict=True) if keep)
    rows, dropped = acecode_rows(chosen, as_functions=not options.as_asked)
    for reason, number in dropped.counts().most_common():
        print(f"left out: {number} question(s): {reason}")
    if not rows:
        raise UserError(f"--data: no question of these files is {options.difficulty}")
    write_rows(options.out, rows)
    questions = len({row.problem_id for row in rows})
    print(f"wrote {len(rows)} rows of {questions} questions, of {len(kept)}")
    return 0


def _records(paths: Sequence[Path]) -> Iterator[Record]:
    """The records of all files, of which one at a time is in memory."""
    for path in paths:
        inside = path.iterdir() if path.is_dir() else (path,)
        for file in sorted(one for one in inside if one.name.endswith(SUFFIXES)):
            yield from read_data_records(file)


if __name__ == "__main__":
    raise SystemExit(main())
