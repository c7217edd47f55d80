"""Convert a Megatron checkpoint to an HF directory.

``ctrl-convert-megatron-to-hf --checkpoint DIR --out DIR [--model policy|value|agent1|...]
[--adapters] [--push OWNER/NAME]``
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.hub import push_model, require_push_access
from ctrl_megatron.commands.model_card import model_card
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import existing_path, output_path
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics import byte_progress_bar


def _model(text: str) -> str:
    if not re.fullmatch(r"policy|value|agent[1-9][0-9]*(_value)?", text):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose policy, value, agent1, agent1_value, ...)"
        )
    return text


@command_entry_point("convert_megatron_to_hf")
def main(arguments: Sequence[str] | None = None) -> int:
    """Export the weights with one file in memory. Exit codes: 0 done, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=existing_path,
        help="runs/NAME/checkpoints/global_step_N, or runs/NAME for its newest checkpoint",
    )
    parser.add_argument("--out", required=True, type=output_path, help="directory to write")
    parser.add_argument(
        "--model",
        type=_model,
        default="policy",
        help="policy (the default) or value, or of a further policy agent1, agent1_value, ...",
    )
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
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="also upload the export to this repository of the Hugging Face Hub, with a model card "
        "from the run's configuration and metrics; what is new there is public",
    )
    parser.add_argument("--private", action="store_true", help="of --push: make it private")
    options = parser.parse_args(arguments)
    options.checkpoint = _newest(options.checkpoint)
    if options.private and not options.push:
        raise UserError("--private is for --push", remedy="give --push OWNER/NAME too")
    card = ""
    if options.push:
        require_push_access(options.push)
        card = model_card(options.checkpoint, model=options.model, adapters=options.adapters)
    _convert(options)
    if options.push:
        print(push_model(options.out, options.push, card, private=options.private))
    return 0


def _newest(path: Path) -> Path:
    """The newest finished checkpoint of a run's directory; any other path as it is. UserError for
    a run without one."""
    if not (folder := path / "checkpoints").is_dir():
        return path
    from ctrl_megatron.checkpoint.store import checkpoints_in

    if not (found := checkpoints_in(folder)):
        raise UserError(f"{path} has no finished checkpoint yet", remedy="see trainer.save_freq")
    print(f"the newest checkpoint is {found[-1].path}")
    return found[-1].path


def _convert(options: argparse.Namespace) -> None:
    from ctrl_megatron.checkpoint.convert import megatron_to_hf, megatron_to_peft

    if options.adapters:
        where = {"folder": options.model, "overwrite": options.overwrite}
        megatron_to_peft(options.checkpoint, options.out, **where)
        print(f"wrote {options.out} for PEFT")
        return
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


if __name__ == "__main__":
    raise SystemExit(main())
