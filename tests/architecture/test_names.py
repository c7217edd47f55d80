"""A name means one thing: no two classes of the package share one."""

from __future__ import annotations

import ast

from package_imports import FILES, PACKAGE


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                place = f"{file.relative_to(PACKAGE)}:{node.lineno}"
                places.setdefault(node.name, []).append(place)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
