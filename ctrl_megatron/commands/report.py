"""Write the report of a run anew, or one on which several runs stand side by side.

``ctrl-report runs/NAME`` writes ``runs/NAME/report.html``; ``ctrl-report runs/A runs/B`` writes
``comparison.html``, or ``--out FILE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.start import CommandParser, command
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics.report import write_comparison, write_report

_TITLE = b"<!doctype html>"


@command("report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--out", type=Path, help="page of several runs; comparison.html without it")
    options = parser.parse_intermixed_args(arguments)
    if len(options.runs) == 1:
        if options.out is not None:
            raise UserError("--out is for several runs; the page of one stands in its directory")
        print(f"wrote {write_report(options.runs[0])}")
        return 0
    out = options.out or Path("comparison.html")
    if out.exists() and (out.is_dir() or not out.read_bytes().startswith(_TITLE)):
        raise UserError(f"--out: {out} is there and is no page of this tool")
    write_comparison(options.runs, out)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
