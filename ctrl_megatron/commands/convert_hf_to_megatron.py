"""HF directory -> Megatron checkpoint.

``ctrl-convert-hf-to-megatron --hf DIR --out DIR``
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.start import CommandParser, refuse
from ctrl_megatron.metrics import byte_bar


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint, one tensor in memory at a time; 2 for wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--hf", required=True, type=Path, help="directory of a Hugging Face model")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint directory to write")
    try:
        options = parser.parse_args(arguments)
        from ctrl_megatron.checkpoint.convert import hf_to_megatron

        with byte_bar() as progress:
            hf_to_megatron(options.hf, options.out, progress=progress)
    except ValueError as error:
        return refuse("convert_hf_to_megatron", error)
    print(f"wrote {options.out}; it loads on any tensor, pipeline and data parallel layout")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
