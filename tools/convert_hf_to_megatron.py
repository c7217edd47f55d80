"""HF directory -> Megatron checkpoint.

``python tools/convert_hf_to_megatron.py --hf DIR --out DIR [--tp N --pp N]``
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", module=r"megatron|torch")


def main() -> int:
    """Start one process per shard and write the checkpoint; 2 for wrong input."""
    from ctrl_megatron.checkpoint.convert import hf_to_megatron

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf", required=True, type=Path, help="directory of a Hugging Face model")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint directory to write")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size to write with")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size to write with")
    arguments = parser.parse_args()
    try:
        hf_to_megatron(arguments.hf, arguments.out, tensor=arguments.tp, pipeline=arguments.pp)
    except ValueError as error:
        print(f"convert_hf_to_megatron: {error}", file=sys.stderr)
        return 2
    print(f"wrote {arguments.out}; it loads on any tensor, pipeline and data parallel layout")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
