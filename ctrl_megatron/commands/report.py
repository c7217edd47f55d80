"""Rewrite the report of a run or an evaluation, or compare several in one report.

``ctrl-report runs/NAME`` writes ``runs/NAME/report.html``; ``ctrl-report runs/A runs/B`` writes
``comparison.html``, or ``--out FILE``. The directories must all be runs, or all evaluations; the
report of evaluations is also written as Markdown and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import count_flag, output_path
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.transcripts import is_evaluation, read_evaluation
from ctrl_megatron.metrics.report import write_comparison, write_report
from ctrl_megatron.metrics.report.run_files import read_run_files

if TYPE_CHECKING:
    from ctrl_megatron.eval.scores import Confidence

_TITLE = b"<!doctype html>"


@command_entry_point("report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="a run or an evaluation")
    parser.add_argument(
        "--out", type=output_path, help="page of several; defaults to comparison.html"
    )
    parser.add_argument(
        "--pass-at",
        type=count_flag(),
        nargs="+",
        metavar="K",
        help="evaluations: report pass@K; defaults to the K of the existing report",
    )
    parser.add_argument(
        "--confidence",
        choices=("votes", "logprob"),
        help="evaluations: scores by votes or by the judgment's probability; defaults to those of "
        "the existing report",
    )
    options = parser.parse_intermixed_args(arguments)
    evaluations = [folder for folder in options.runs if is_evaluation(folder)]
    if evaluations and len(evaluations) < len(options.runs):
        run = next(folder for folder in options.runs if folder not in evaluations)
        raise UserError(f"{evaluations[0]} is an evaluation and {run} is none; compare alike")
    ks = _pass_at(options.pass_at, evaluations)
    confidence = options.confidence or _confidence(evaluations)
    if len(options.runs) == 1:
        (folder,) = options.runs
        if options.out is not None:
            raise UserError("--out is for several runs; the page of one run is in its directory")
        if evaluations:
            from ctrl_megatron.eval.report import write_evaluation_report

            write_evaluation_report(folder, ks=ks, confidence=confidence)
            print(f"wrote {folder / 'report.html'}")
        else:
            print(f"wrote {write_report(folder)}")
        _tell_left_out(folder)
        return 0
    out = options.out or Path("comparison.html")
    if out.exists() and (out.is_dir() or not out.read_bytes().startswith(_TITLE)):
        raise UserError(f"--out: {out} is there and is no page of this tool")
    if evaluations:
        from ctrl_megatron.eval.report import write_evaluations_report

        _check_beside(out)
        write_evaluations_report(options.runs, out, ks=ks, confidence=confidence)
    else:
        write_comparison(options.runs, out)
    print(f"wrote {out}")
    for folder in options.runs:
        _tell_left_out(folder)
    return 0


def _pass_at(given: list[int] | None, evaluations: Sequence[Path]) -> list[int]:
    from ctrl_megatron.eval.report import ks_of_existing_report

    found = given or [k for folder in evaluations for k in ks_of_existing_report(folder)]
    return sorted({1, *found})


def _confidence(evaluations: Sequence[Path]) -> Confidence:
    from ctrl_megatron.eval.report import confidence_of_existing_report

    found: list[Confidence] = [confidence_of_existing_report(one) for one in evaluations]
    if len({*found}) > 1:
        raise UserError(
            "the evaluations' reports have scores of different kinds",
            key="--confidence",
            remedy="give votes or logprob",
        )
    return found[0] if found else "votes"


def _tell_left_out(folder: Path) -> None:
    read = read_evaluation if is_evaluation(folder) else read_run_files
    for text in read(folder).left_out:
        print(f"left out of {folder}: {text}")


def _check_beside(out: Path) -> None:
    """Raise UserError if the .md or .json beside ``out`` exists but ``out`` does not."""
    if out.suffix != ".html":
        raise UserError(f"--out: {out} must end in .html; .md and .json are written beside it")
    for beside in (out.with_suffix(".md"), out.with_suffix(".json")):
        if beside.exists() and not out.exists():
            raise UserError(f"--out: {beside} is there and would be replaced", remedy="move it")


if __name__ == "__main__":
    raise SystemExit(main())
