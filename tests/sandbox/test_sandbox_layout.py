"""The imports that are allowed: the trainer imports the client side only, the jail nothing but the
standard library.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ctrl_megatron"
SANDBOX = "ctrl_megatron.sandbox"
SHARED = {
    f"{SANDBOX}.{name}" for name in ("wire", "limits", "access", "languages", "cores", "task")
}
"""Modules that client and service share."""


def imported(file: Path) -> Iterator[str]:
    """Modules of the sandbox that a file names, ``from x import y`` as ``x`` and ``x.y``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(SANDBOX))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(SANDBOX):
            assert node.module
            submodule = (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            yield from (f"{node.module}.{a.name}" if submodule else node.module for a in node.names)


def side(module: str) -> str:
    """The folder of a module, or the room itself."""
    return module.removeprefix(SANDBOX).strip(".").partition(".")[0]


def test_the_trainer_imports_the_client_side_only() -> None:
    allowed = (*SHARED, *(f"{SANDBOX}.{name}" for name in ("client", "datasets", "kept")))
    starts_the_service = PACKAGE / "commands" / "serve_sandbox.py"
    for file in PACKAGE.rglob("*.py"):
        if PACKAGE / "sandbox" not in file.parents and file != starts_the_service:
            for module in imported(file):
                public = module.count(".") == 2 and module.rpartition(".")[2][0].isupper()
                assert public or module.startswith(allowed), f"{file} imports {module}"


def test_client_service_and_jail_keep_apart() -> None:
    permitted = {
        "client": {"client"},
        "jail": {"jail"},
        "datasets": {"datasets", "jail"},
        "service": {"service", "datasets", "jail"},
    }
    for name, sides in permitted.items():
        for file in (PACKAGE / "sandbox" / name).rglob("*.py"):
            for module in imported(file):
                shared = ".".join(module.split(".")[:3]) in SHARED or side(module) == "wire"
                assert shared or side(module) in sides, f"{file} imports {module}"


def test_the_jail_loads_the_standard_library_only() -> None:
    """In an interpreter without site packages, as a worker's is."""
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import {SANDBOX}.jail.zygote; "
        f"print(*(m for m in sys.modules if m.startswith('{SANDBOX}.')))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {side(module) for module in loaded} == {"jail", "limits"}
