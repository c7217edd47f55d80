"""Score critics on the validation rows.

``python tools/evaluate.py --config FILE "before SFT=DIR" "after SFT=DIR" [--set key=value]``

Each row is added to the final table of the run (``runs/NAME/summary.json``).
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore", module=r"megatron|torch")

from ctrl_megatron.config import check_files, load_config
from ctrl_megatron.config.environment import read_log_level


def main() -> int:
    """Parse, check, run. Exit codes: 0 done, 2 wrong input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("critics", nargs="+", metavar="STAGE=DIR")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", dest="overrides")
    arguments = parser.parse_args()
    try:
        logging.basicConfig(level=read_log_level())
        critics = dict(text.split("=", 1) for text in arguments.critics if "=" in text)
        if len(critics) != len(arguments.critics):
            raise ValueError("every critic must be given as STAGE=DIR, each stage once")
        config = load_config(arguments.config, arguments.overrides)
        check_files(config, "rl")
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    from ctrl_megatron.pipeline.recorder import add_stage
    from ctrl_megatron.pipeline.run import evaluate

    for stage, results in evaluate(config, critics).items():
        add_stage(Path(config.trainer.run_dir), stage, results)
        print(stage, {name: round(value, 4) for name, value in results.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
