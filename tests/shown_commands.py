"""The commands that pages and the first comments of configurations show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_EXAMPLES = ROOT / "examples"
CONFIGS = [*sorted(_EXAMPLES.glob("*.yaml")), _EXAMPLES / "study_smollm2/mutants.yaml"]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"\A(?:#.*\n)+")


def blocks(file: Path) -> list[str]:
    """The blocks of shell commands of a page; of a configuration the indented lines of its first
    comment as one block.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return [body.strip() for kind, body in _FENCE.findall(text) if kind == "bash"]
    head = _HEAD.match(text)
    assert head is not None, file
    return ["".join(re.findall(r"^#   (.*\n)", head[0], re.MULTILINE)).strip()]
