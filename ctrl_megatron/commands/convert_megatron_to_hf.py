"""Convert a Megatron checkpoint to an HF directory.

``ctrl-convert-megatron-to-hf --checkpoint DIR --out DIR [--model policy|value|agent1]
[--adapters]``
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.start import CommandParser, command
from ctrl_megatron.config.flags import output_path
from ctrl_megatron.metrics import byte_progress_bar


@command("convert_megatron_to_hf")
def main(arguments: Sequence[str] | None = None) -> int:
    """Export the weights with one file in memory. Exit codes: 0 done, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="runs/NAME/checkpoints/global_step_N"
    )
    parser.add_argument("--out", required=True, type=output_path, help="directory to write")
    parser.add_argument("--model", choices=("policy", "value", "agent1"), default="policy")
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write the adapters alone, as PEFT's files; otherwise they are merged",
    )
    parser.add_argument(
        "--base",
        type=Path,
        help="directory of the weights that adapters belong to, if it has moved since",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that this command wrote to --out"
    )
    options = parser.parse_args(arguments)
    from ctrl_megatron.checkpoint.convert import megatron_to_hf, megatron_to_peft

    if options.adapters:
        where = {"folder": options.model, "overwrite": options.overwrite}
        megatron_to_peft(options.checkpoint, options.out, **where)
        print(f"wrote {options.out} for PEFT")
        return 0
    with byte_progress_bar() as progress:
        megatron_to_hf(
            options.checkpoint,
            options.out,
            folder=options.model,
            base=options.base,
            progress=progress,
            overwrite=options.overwrite,
        )
    engines = "transformers" if options.model == "value" else "transformers and vLLM"
    print(f"wrote {options.out} for {engines}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
