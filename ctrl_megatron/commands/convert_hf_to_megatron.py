"""Convert an HF directory to a Megatron checkpoint.

``ctrl-convert-hf-to-megatron --hf DIR --out DIR``
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.hub import MODEL, hub_directory
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import output_path
from ctrl_megatron.metrics import byte_progress_bar


@command_entry_point("convert_hf_to_megatron")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint with one tensor in memory. Exit codes: 0 done, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--hf", required=True, metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--out", required=True, type=output_path, help="checkpoint directory to write"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that this command wrote to --out"
    )
    options = parser.parse_args(arguments)
    from ctrl_megatron.checkpoint.convert import hf_to_megatron

    hf = Path(hub_directory(options.hf, "--hf"))
    with byte_progress_bar() as progress:
        hf_to_megatron(hf, options.out, progress=progress, overwrite=options.overwrite)
    print(f"wrote {options.out}; it loads on any tensor, pipeline and data parallel layout")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
