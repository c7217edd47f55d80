"""``python -m ctrl_megatron`` prints the version and the commands, with what each does."""

from __future__ import annotations

import ast
import re
from importlib.resources import files

from ctrl_megatron.config.flags import VERSION, CommandParser


def main() -> int:
    """Exit codes: 0 printed, 2 wrong arguments."""
    CommandParser(__doc__).parse_args()
    print(VERSION)
    # Read, not imported, which would take seconds.
    for file in sorted(files("ctrl_megatron.commands").iterdir(), key=lambda file: file.name):
        name = f"ctrl-{file.name.removesuffix('.py').replace('_', '-')}"
        text = ast.get_docstring(ast.parse(file.read_text())) if file.name.endswith(".py") else ""
        if text and re.search(rf"``{name}[ `]", text):
            about = " ".join(text.partition("\n\n")[0].split())
            print(f"  {name:<29}{about}")
    print("Each has --help.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
