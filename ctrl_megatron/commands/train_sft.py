"""Fine-tune on synthesised critiques.

``ctrl-train-sft --nproc-per-node 2 --config FILE key=value``, or under torchrun or srun.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrl_megatron.commands.start import STOPPED, refuse, training_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 finished, 2 wrong input, 130 stopped by a signal."""
    config = training_config("train_sft", "sft", arguments, __doc__)
    if isinstance(config, int):
        return config
    from ctrl_megatron.sft.run import train_sft

    try:
        return 0 if train_sft(config) else STOPPED
    except ValueError as error:
        return refuse("train_sft", error)


if __name__ == "__main__":
    raise SystemExit(main())
