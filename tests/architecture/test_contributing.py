"""CONTRIBUTING.md names only what exists: paths, commands, packages, keys and names in the code.

``test_docs`` checks what it has in common with the pages of ``docs/``; here every text between
backticks is one of these kinds, and a name is in the files beside which it stands.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest
from test_docs import ROOT, blocks, is_key, prose
from test_docs_registries import TRANSPORTS

from ctrl_megatron.models.families import FAMILIES

PAGE = "CONTRIBUTING.md"
ITEMS = re.split(r"\n\n|\n(?=\d\. |- |\| )", prose(PAGE))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = " ".join(re.findall(r"^([\w -]+):", MAKEFILE, re.MULTILINE)).split()
LOCKED = {
    line.partition("==")[0]
    for lock in (ROOT / "requirements").glob("*.txt")
    for line in lock.read_text(encoding="utf-8").splitlines()
}
MADE_BY_MAKE = {".venv", ".venv/bin/activate"}


def code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def python_text(named: list[str]) -> str:
    """The text of the files, and of the files in the folders, that ``named`` contains."""
    paths = [ROOT / text for text in named if "/" in text and (ROOT / text).exists()]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def is_command(text: str) -> bool:
    """Whether each word that names a target, a path or a package of the command exists."""
    words = [word for word in shlex.split(text) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    match words:
        case ["make", *targets]:
            return bool(targets) and {*targets} <= {*TARGETS}
        case ["pytest" | "python" | "source", path, *_]:
            return (ROOT / path).exists() or path in MADE_BY_MAKE
        case ["pipx", "install", package]:
            return package in LOCKED or (ROOT / f".{package}-config.yaml").is_file()
        case ["pre-commit", "install"]:
            return (ROOT / ".pre-commit-config.yaml").is_file()
        case _:
            return False


def is_there(text: str, beside: list[str], package: str) -> bool:
    if "/" in text and " " not in text:
        return (ROOT / text).exists()
    if (ROOT / text).is_file() or text in MADE_BY_MAKE or is_key(text) or is_command(text):
        return True
    if text in FAMILIES or text in TRANSPORTS:
        return True
    if re.fullmatch(r"\[[\w.-]+\]", text):
        return f"\n{text}\n" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if not re.fullmatch(r"\w+(\.json)?", text):
        return False
    known = python_text(beside) or package
    return re.search(rf"\b{re.escape(text)}\b", known) is not None or (
        text.isidentifier() and find_spec(text) is not None
    )


@pytest.fixture(scope="module")
def package() -> str:
    return python_text(["ctrl_megatron/"])


def test_everything_between_backticks_exists(package: str) -> None:
    named = [(text, code(item)) for item in ITEMS for text in code(item)]
    assert len(named) > 80
    assert [text for text, beside in named if not is_there(text, beside, package)] == []


def test_every_command_of_a_block_exists() -> None:
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
    assert len(lines) > 3 and [line for line in lines if not is_command(line)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "ctrl_megatron/models/no_such_file.py",
        "make no-such-target",
        "pytest tests/no_such_room -q",
        "pipx install no-such-package",
        "python tools/no_such_tool.py",
        "NO_SUCH_NAME",
        "trainer.no_such_key",
        "[project.no_such_table]",
    ],
)
def test_a_wrong_text_would_be_found(wrong: str, package: str) -> None:
    assert not is_there(wrong, [], package)


def test_a_name_is_looked_up_in_the_files_beside_it(package: str) -> None:
    assert is_there("FAMILIES", ["ctrl_megatron/models/families.py"], package)
    assert not is_there("FAMILIES", ["ctrl_megatron/models/fp8.py"], package)
