"""Score critics on the validation rows.

``ctrl-evaluate --config FILE "before SFT=DIR" "after SFT=DIR" [--set key=value]``

Each row is added to the final table of the run (``runs/NAME/summary.json``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctrl_megatron.commands.start import CommandParser, checked_config, command
from ctrl_megatron.errors import UserError


@command("evaluate")
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, check, run. Exit codes: 0 done, 2 wrong input, 13 a process failed, 130 stopped."""
    parser = CommandParser(__doc__)
    parser.add_argument("--config", required=True, help="YAML file, e.g. examples/ctrl_7b.yaml")
    parser.add_argument("critics", nargs="+", metavar="STAGE=DIR", help="a name and an HF model")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="overrides")
    options = parser.parse_args(arguments)
    critics = dict(text.split("=", 1) for text in options.critics if "=" in text)
    if len(critics) != len(options.critics):
        raise UserError("every critic must be given as STAGE=DIR, each stage once")
    config = checked_config(options.config, options.overrides, "rl")
    from ctrl_megatron.pipeline.recorder import add_stage
    from ctrl_megatron.pipeline.run import evaluate

    table = evaluate(config, critics)
    for stage, results in table.items():
        add_stage(Path(config.trainer.run_dir), stage, results)
        print(stage, {name: round(value, 4) for name, value in results.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
