"""Read a published problem set, select problems, and write them as a problem file.

``ctrl-prepare-data --format mbpp --input mbpp.jsonl --split train --out runs/data/problems.jsonl``
writes one JSON object per problem; ``ctrl-synthesize`` makes training files from it. Running the
same command again changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ctrl_megatron.checkpoint.files import require_replaceable_file, write_text_atomically
from ctrl_megatron.commands.chat_flags import convert_service_faults
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import count_flag, existing_path, output_path
from ctrl_megatron.errors import UserError, convert_input_errors
from ctrl_megatron.preparation.checked_problems import select_judgeable_problems
from ctrl_megatron.preparation.problem_files import problem_record, read_problems
from ctrl_megatron.preparation.published import (
    FORMATS,
    OWN,
    DroppedItems,
    ProblemLimits,
    read_published,
    select_problems,
)
from ctrl_megatron.types import Problem

_SHOWN = 3


@command_entry_point("prepare_data")
def main(arguments: Sequence[str] | None = None) -> int:
    """Read, select, write. Exit codes: 0 done, 2 wrong input, 130 stopped."""
    parser = CommandParser(__doc__)
    formats = (*FORMATS, OWN)
    parser.add_argument(
        "--format", required=True, choices=formats, help=f"{OWN}: files that this command wrote"
    )
    parser.add_argument(
        "--input", required=True, type=existing_path, nargs="+", help="files or folders"
    )
    parser.add_argument("--split", help="of mbpp: prompt, test, validation, train")
    parser.add_argument("--out", required=True, type=output_path, help="a .jsonl file")
    parser.add_argument("--overwrite", action="store_true", help="replace a problem file")
    parser.add_argument(
        "--against",
        metavar="FORMAT=FILE",
        nargs="+",
        default=[],
        help="test sets: problems with a nearly equal statement are left out",
    )
    parser.add_argument(
        "--skip-malformed",
        action="store_true",
        help="leave out unreadable rows, and problems whose tests or reference say nothing",
    )
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="leave the check of tests and references to the first run",
    )
    parser.add_argument("--min-tests", type=count_flag(), default=1)
    parser.add_argument(
        "--max-tests", type=count_flag(), help="keep only the first tests of each problem"
    )
    parser.add_argument("--max-statement", type=count_flag(), metavar="CHARACTERS")
    parser.add_argument("--max-reference", type=count_flag(), metavar="CHARACTERS")
    parser.add_argument("--max-difficulty", type=int, choices=range(5))
    parser.add_argument("--needs-reference", action="store_true")
    options = parser.parse_args(arguments)
    with convert_input_errors("--input"):
        problems, dropped = read_published(
            options.format,
            options.input,
            split=options.split,
            skip_malformed=options.skip_malformed,
        )
    tested = _test_sets(options.against, formats)
    limits = ProblemLimits(
        **{name: getattr(options, name) for name in ProblemLimits.__dataclass_fields__}
    )
    kept, more = select_problems(problems, limits, against=tested)
    for reason, names in more.reasons.items():
        for name in names:
            dropped.add(reason, name)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.counts().items())
        raise UserError(
            f"no problem is left of {', '.join(map(str, options.input))} ({reasons or 'no rows'})"
        )
    # Before the check, which keeps its results beside the file.
    require_replaceable_file(options.out, "", _own_file, overwrite=True)
    if not options.unchecked:
        kept = _checked(kept, options.out, dropped, skip=options.skip_malformed)
    lines = [json.dumps(problem_record(problem), ensure_ascii=False) for problem in kept]
    text = "\n".join(lines) + "\n"
    require_replaceable_file(options.out, text, _own_file, overwrite=options.overwrite)
    write_text_atomically(options.out, text)
    _show(options.out, len(kept), dropped)
    return 0


def _checked(
    problems: Sequence[Problem], out: Path, dropped: DroppedItems, *, skip: bool
) -> list[Problem]:
    """The problems on which programs can be judged. UserError for another one unless ``skip``."""
    with convert_service_faults(out.parent):
        kept, left_out = select_judgeable_problems(problems, out, out.parent)
    if left_out and (not skip or not kept):
        raise UserError(
            f"programs cannot be judged on {len(left_out)} of {len(problems)} problems, the first "
            f"is {left_out[0]}",
            remedy="--skip-malformed leaves such problems out",
        )
    for text in left_out:
        dropped.add("tests or reference say nothing", text)
    return kept


def _test_sets(given: Sequence[str], formats: Sequence[str]) -> list[Problem]:
    problems: list[Problem] = []
    for text in given:
        kind, _, file = text.partition("=")
        if kind not in formats or not file:
            raise UserError(
                f"--against: {text!r} is not FORMAT=FILE; formats are {', '.join(formats)}"
            )
        with convert_input_errors("--against"):
            problems += read_published(kind, [Path(file)], check=False)[0]
    return problems


def _own_file(path: Path) -> bool:
    try:
        return bool(read_problems(path))
    except UserError:
        return False


def _show(out: Path, kept: int, dropped: DroppedItems) -> None:
    table = Table(title=str(out))
    table.add_column("problems", justify="right")
    table.add_column("outcome")
    table.add_column("examples", overflow="fold")
    table.add_row(str(kept), "kept", "")
    for reason, names in dropped.reasons.items():
        table.add_row(str(len(names)), f"left out: {reason}", "; ".join(names[:_SHOWN]))
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
