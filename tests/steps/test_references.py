"""Corners of import paths that users type."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctrl_megatron.pipeline import Node, NodeType


def node(reference: str) -> Node:
    return Node("n", NodeType.COMPUTE, executable_ref=reference)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_error_of_the_modules_own_passes_unchanged(folder: Path) -> None:
    (folder / "breaks_on_import.py").write_text("import math\nmath.no_such_thing\n")
    with pytest.raises(AttributeError, match="no_such_thing"):
        node("breaks_on_import:f")
    assert "breaks_on_import" not in sys.modules


@pytest.mark.parametrize("reference", ["breaks_on_import_too:f", "breaks_on_import_too.f"])
def test_a_missing_import_of_the_module_is_named_with_the_node(
    folder: Path, reference: str
) -> None:
    (folder / "breaks_on_import_too.py").write_text("import no_such_dependency\n")
    with pytest.raises(ValueError, match=rf"'n': .*{reference}.*no_such_dependency"):
        node(reference)


@pytest.mark.parametrize("reference", [".here:f", "..there:f", "...f", "a..b:f", "a:b:c", "a:"])
def test_what_is_no_full_path_is_a_sentence_not_a_crash(reference: str) -> None:
    with pytest.raises(ValueError, match="node 'n'"):
        node(reference)


def test_nested_classes_resolve(folder: Path) -> None:
    (folder / "nested_classes.py").write_text(
        "class A:\n    class B:\n        @staticmethod\n        def f():\n            return 7\n"
    )
    assert node("nested_classes:A.B.f").run() == 7
