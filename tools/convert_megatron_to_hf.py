"""Megatron checkpoint -> HF directory.

``python tools/convert_megatron_to_hf.py --checkpoint DIR --out DIR [--model policy|value]``
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", module=r"megatron|torch")


def main() -> int:
    """Load the weights into one process and export them; 2 for wrong input."""
    from ctrl_megatron.checkpoint.convert import megatron_to_hf

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="runs/NAME/checkpoints/global_step_N"
    )
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--model", choices=("policy", "value"), default="policy")
    arguments = parser.parse_args()
    try:
        megatron_to_hf(arguments.checkpoint, arguments.out, folder=arguments.model)
    except ValueError as error:
        print(f"convert_megatron_to_hf: {error}", file=sys.stderr)
        return 2
    engines = "transformers and vLLM" if arguments.model == "policy" else "transformers"
    print(f"wrote {arguments.out} for {engines}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
