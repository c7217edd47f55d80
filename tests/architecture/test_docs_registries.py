"""What pages say of the product's parts agrees with the registries of these parts."""

from __future__ import annotations

import re
from pkgutil import iter_modules
from typing import Any

import pytest
from test_docs import ROOT, TEXTS

from ctrl_megatron.config.actor_rollout_ref import POLICY_LOSSES
from ctrl_megatron.config.algorithm import ADV_ESTIMATORS
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.models.families import FAMILIES
from ctrl_megatron.preparation.published import FORMATS, OWN
from ctrl_megatron.resharding import transports

TRANSPORTS = [module.name for module in iter_modules(transports.__path__)]


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the rows below the head whose first cell is ``first``."""
    _, _, below = TEXTS[page].partition(f"\n| {first} |")
    rows = below.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize(
    ("page", "first", "known"),
    [
        ("docs/algorithms.md", "name | advantage of each token of row i", ADV_ESTIMATORS),
        ("docs/algorithms.md", "name | loss", POLICY_LOSSES),
        ("docs/rollout.md", "`actor_rollout_ref.rollout.name`", ENGINES),
        ("docs/checkpoints.md", "family | models", FAMILIES),
        ("docs/data.md", "`--format`", [*FORMATS, OWN]),
    ],
)
def test_a_table_has_a_row_for_everything_and_for_nothing_else(
    page: str, first: str, known: Any
) -> None:
    assert {name for row in table(page, first) for name in code(row[0])} == {*known}


@pytest.mark.parametrize(
    ("what", "known"), [("A model family", FAMILIES), ("A transport", TRANSPORTS)]
)
def test_what_there_is_so_far_is_all_that_there_is(what: str, known: Any) -> None:
    found = re.search(rf"\*\*{what}\*\* \(([^)]*so far[^)]*)\)", TEXTS["CONTRIBUTING.md"])
    assert found is not None and {*code(found[1])} == {*known}


def test_the_readme_counts_estimators_and_losses() -> None:
    counted = re.search(r"(\d+) advantage estimators and (\d+) policy losses", TEXTS["README.md"])
    assert counted is not None
    assert [int(number) for number in counted.groups()] == [len(ADV_ESTIMATORS), len(POLICY_LOSSES)]


def test_what_engines_can_do_is_what_the_page_says() -> None:
    page, head = "docs/rollout.md", "| | `vllm` | `sglang` | `hf` |"
    engines, rows = code(head), {row[0]: row[1:] for row in table(page, head[2:-2].strip())}
    for number, name in enumerate(engines):
        kind = ENGINES[name]
        for what in ("tensor parallel", "devices of several hosts"):
            assert (rows[what][number] == "yes") == kind.tensor_parallel, (name, what)
        assert rows["concurrent calls"][number].startswith("batched") == kind.joins_calls, name
    both = ENGINES["vllm"].tensor_parallel and ENGINES["sglang"].tensor_parallel
    assert ("(both also over hosts)" in TEXTS["README.md"]) == both


def test_families_train_with_the_engines_that_the_page_names() -> None:
    (denoising,) = [name for name, kind in ENGINES.items() if kind.denoises]
    for names, _, engines, tuned in table("docs/checkpoints.md", "family | models"):
        for name in code(names):
            assert tuned == "yes", name
            assert (denoising in code(engines)) == (FAMILIES[name].diffusion is not None), name


def test_names_of_the_guide_are_in_the_files_beside_them() -> None:
    """Of each item of CONTRIBUTING.md: its names in capitals are in one of its files."""
    for item in re.split(r"\n(?=\d\. |\*\*)", TEXTS["CONTRIBUTING.md"]):
        quoted = code(item)
        files = [ROOT / text for text in quoted if (ROOT / text).is_file()]
        for name in (text for text in quoted if re.fullmatch(r"[A-Z][A-Z_]{3,}", text)):
            assert any(name in file.read_text(encoding="utf-8") for file in files), name
