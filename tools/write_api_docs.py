"""Write docs/api.md from the public names of the package: ``python tools/write_api_docs.py``."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TARGET = ROOT / "docs/api.md"
_INTRODUCTION = """# Public names

Written by `python tools/write_api_docs.py` from the docstrings; do not edit by hand.

What a room lists in its `__all__` is meant to be imported by others; everything else may move. A
line here is the first sentence; the docstring has shapes, units and errors (`help(NAME)`).
"""


def rooms() -> list[str]:
    """Packages that list public names."""
    package = ROOT / "ctrl_megatron"
    files = sorted(package.rglob("__init__.py"))
    found = [f for f in files if "__all__ =" in f.read_text(encoding="utf-8")]
    return [".".join(f.parent.relative_to(ROOT).parts) for f in found]


def sentence(module: ModuleType, name: str) -> str:
    """The first sentence about a public name; "" if it has no docstring."""
    value: Any = getattr(module, name)
    own = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    text = inspect.getdoc(value) if own else _said_below(module, name)
    if own and inspect.isclass(value) and text and text.startswith(f"{name}("):
        text = ""  # what dataclasses write themselves
    first = re.split(r"(?<=[.!?])\s", " ".join((text or "").split()), maxsplit=1)[0]
    return first.replace("``", "`").replace("|", "\\|")


def _said_below(module: ModuleType, name: str) -> str:
    """The docstring after the assignment of a constant; "" if there is none."""
    tree = ast.parse(inspect.getsource(module))
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            assert node.module is not None
            return _said_below(importlib.import_module(node.module), name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = any(isinstance(t, ast.Name) and t.id == name for t in targets)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return str(after.value.value)
    return ""


def render() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for room in rooms():
        module = importlib.import_module(room)
        lines = "".join(f"| `{name}` | {sentence(module, name)} |\n" for name in module.__all__)
        parts.append(f"\n## {room}\n\n| name | what it is |\n|---|---|\n{lines}")
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET.relative_to(ROOT))
