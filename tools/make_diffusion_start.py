"""Make the start of a masked-diffusion model from an autoregressive Llama or Qwen2.

``python tools/make_diffusion_start.py --hf DIR --out DIR``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import output_path
from ctrl_megatron.metrics import byte_progress_bar


@command_entry_point("make_diffusion_start")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the model with one file in memory. Exit codes: 0 done, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("--hf", required=True, type=Path, help="directory of a Hugging Face model")
    parser.add_argument("--out", required=True, type=output_path, help="directory to write")
    parser.add_argument(
        "--mask-token", default="<|mask|>", help="text of the mask token; added where it is missing"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that this tool wrote to --out"
    )
    options = parser.parse_args(arguments)
    from ctrl_megatron.checkpoint.diffusion_start import hf_to_masked_diffusion

    with byte_progress_bar() as progress:
        shape = hf_to_masked_diffusion(
            options.hf,
            options.out,
            mask_token=options.mask_token,
            overwrite=options.overwrite,
            progress=progress,
        )
    assert shape.diffusion is not None
    print(
        f"wrote {options.out}; its mask token is number {shape.diffusion.mask_token}, and it has "
        "to be trained before it writes anything"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
