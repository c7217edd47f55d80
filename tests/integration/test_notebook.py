"""The notebook of ``examples/``, cell after cell as Jupyter runs them."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pytest import approx
from tiny_run import REPOSITORY

NOTEBOOK = REPOSITORY / "examples/demo.ipynb"


async def run(cell: str, names: dict[str, Any]) -> None:
    code = compile(cell, str(NOTEBOOK), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waits = eval(code, names)
    if waits is not None:
        await waits


@pytest.mark.long
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    settings = {"OUT": str(tmp_path), "STEPS": "2", "MPLBACKEND": "agg"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    with asyncio.Runner() as jupyter:
        for cell in cells:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [] and cell["execution_count"] is None
                jupyter.run(run(text, names))
            else:
                links = re.findall(r"\]\(([^)]+)\)", text)
                assert [link for link in links if not Path(link).exists()] == []
    assert names["rewards"] == [turn["after"]["pass_rate"] for turn in names["turns"]]
    assert names["advantages"].sum().item() == approx(0, abs=1e-6)
    assert len(names["curve"]) == 2 and (tmp_path / "run/report.html").is_file()
