"""Make a folder to begin in: ``ctrl-init DIR`` copies configurations, problems with tests, programs
of a small model with their faults, and a reward function to change.

The commands of the README and of the configurations' first lines run there. Files that are already
there stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import ctrl_megatron
from ctrl_megatron.commands.start import CommandParser, command_entry_point
from ctrl_megatron.config.flags import output_path
from ctrl_megatron.errors import UserError

EXAMPLES = Path("examples")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.svg", "transcripts", "tables.md")
_REWARD = '''"""A reward of one's own: ctrl-train-rl ... reward.reward_funcs=[mine:short_answers]"""


def short_answers(items):
    """Return one reward per item; shorter completions earn more."""
    return [1.0 / (1 + item.length) for item in items]
'''


@command_entry_point("init")
def main(arguments: Sequence[str] | None = None) -> int:
    """Copy the files and print the first commands. Exit codes: 0 done, 2 wrong input."""
    parser = CommandParser(__doc__)
    parser.add_argument("folder", type=output_path, metavar="DIR")
    folder: Path = parser.parse_args(arguments).folder
    source, target = packaged_examples(), folder / EXAMPLES
    if target.exists():
        raise UserError(f"{target} is there already", remedy="name another folder")
    shutil.copytree(source, target, ignore=_LEFT_OUT)
    reward = folder / "mine.py"
    if not reward.exists():
        reward.write_text(_REWARD, encoding="utf-8")
    print(f"wrote {target} and {reward}; go on with\n  cd {folder}\n  ctrl-demo")
    return 0


def packaged_examples() -> Path:
    """The examples of the installed package, or of the checkout from which it is imported."""
    package = Path(ctrl_megatron.__file__).resolve().parent
    return next(p for p in (package / EXAMPLES, package.parent / EXAMPLES) if p.is_dir())


def require_examples() -> None:
    """UserError where the current folder has no examples."""
    if not EXAMPLES.is_dir():
        raise UserError(
            f"{Path.cwd()} has no folder {EXAMPLES}", remedy="run ctrl-init DIR and go to DIR"
        )
