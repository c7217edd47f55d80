"""HF directory -> Megatron checkpoint.

``ctrl-convert-hf-to-megatron --hf DIR --out DIR [--tp N --pp N]``
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.start import CommandParser, refuse


def main(arguments: Sequence[str] | None = None) -> int:
    """Start one process per shard and write the checkpoint; 2 for wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--hf", required=True, type=Path, help="directory of a Hugging Face model")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint directory to write")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size to write with")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size to write with")
    try:
        options = parser.parse_args(arguments)
        from ctrl_megatron.checkpoint.convert import hf_to_megatron

        hf_to_megatron(options.hf, options.out, tensor=options.tp, pipeline=options.pp)
    except ValueError as error:
        return refuse("convert_hf_to_megatron", error)
    print(f"wrote {options.out}; it loads on any tensor, pipeline and data parallel layout")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
