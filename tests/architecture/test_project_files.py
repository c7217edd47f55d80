"""Files that other tools read: each is well formed, and agrees with the package."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_has_the_version_and_every_source_of_an_algorithm() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    cited = {
        one["value"].removeprefix("arXiv:")
        for reference in citation["references"]
        for one in reference["identifiers"]
    }
    sources = {
        number
        for file in (ROOT / "ctrl_megatron/algorithms").glob("*.py")
        for number in re.findall(r"arXiv (\d{4}\.\d{5})", file.read_text(encoding="utf-8"))
    }
    assert len(sources) > 10 and sources - cited == set()
    assert "2502.03492" in cited


def test_hooks_run_the_checks_of_make_test() -> None:
    """By the programs of the environment, whose versions are locked."""
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    words = [shlex.split(hook["entry"]) for hook in local["hooks"]]
    assert all(hook["language"] == "system" for hook in local["hooks"])
    rules = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    for program, *arguments in words:
        own = [word for word in arguments if word != "--force-exclude"]
        assert " ".join([program, *own]) in rules


def test_the_quick_tests_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^QUICK := (.*)$", makefile, re.MULTILINE)
    for word in shlex.split(line):
        file, _, test = word.partition("::")
        assert (ROOT / file).exists(), word
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), word


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_exist(workflow: Path) -> None:
    """What GitHub requires of it is for actionlint: make lint-workflows."""
    targets = re.findall(r"^[\w -]+(?=:)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    runs = [step["run"] for job in read(workflow)["jobs"].values() for step in job["steps"][2:]]
    for program, *arguments in map(shlex.split, runs):
        assert program != "make" or {*arguments} <= {*" ".join(targets).split()}
        assert not program.startswith("ctrl-") or program in PROJECT["scripts"]
        locked = (ROOT / "requirements/cpu.txt").read_text()
        assert all(f"\n{word}+cpu\n" in locked for word in arguments if word.startswith("torch"))


def test_the_site_has_every_page() -> None:
    placed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/**/*.md")]
    assert sorted([*placed, "AGENTS.md"]) == sorted(str(page.relative_to(ROOT)) for page in pages)


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_requires(form: Path) -> None:
    read_form = read(form)
    if form.stem == "config":
        assert read_form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= read_form.keys()
    fields = read_form["body"]
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert all(f["type"] == "textarea" and f["attributes"]["label"] for f in fields)
