"""Fine-tune a critic on supervised examples.

``ctrl-train-sft --nproc-per-node 2 --config FILE key=value``, or under torchrun or srun.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.commands.start import command_entry_point, load_config_or_launch
from ctrl_megatron.config import Config
from ctrl_megatron.errors import STOPPED


@command_entry_point("train_sft")
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 finished, 2 wrong input, 13 a process failed, 130 stopped by a signal."""
    config = load_config_or_launch("train_sft", "sft", arguments, __doc__, check_sft_inputs)
    if isinstance(config, int):
        return config
    from ctrl_megatron.sft.run import train_sft

    return 0 if train_sft(config) else STOPPED


def check_sft_inputs(config: Config) -> None:
    """Raise UserError for wrong input of the run, before a rank starts."""
    from ctrl_megatron.sft.run import check_sft, load_sft_examples

    check_sft(config)
    load_sft_examples(config)


if __name__ == "__main__":
    raise SystemExit(main())
