"""Rows of AceCode-87K (arXiv 2502.01718): questions with asserts, and answers of two coders whose
pass rates say how hard a question is. DiffuCoder trains on the hard ones (arXiv 2506.20639).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.contests import NoTests
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.preparation.records import Record
from ctrl_megatron.preparation.task_rows import SOLVING
from ctrl_megatron.problems.fields import non_empty_list_field, text_field

Difficulty = Literal["all", "easy", "medium", "hard"]
CODERS = ("qwen_coder_2.5", "llama3_instruct")
"""The models whose answers DiffuCoder's selection counts."""
_CALLED = re.compile(r"assert\s+\(*\s*([A-Za-z_]\w*)\s*\(")
_SIGNATURE = re.compile(r"def\s+([A-Za-z_]\w*)\s*\(.*\)[^:\n]*:\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PassRates:
    """The pass rates of the answers to one question."""

    mean: float
    std: float


def pass_rates(record: Record, coders: Sequence[str] = CODERS) -> PassRates | None:
    """Those of the answers of ``coders``; None where there is none. UserError naming the place of a
    malformed record."""
    place, item = record
    try:
        answers = non_empty_list_field(item.get("inferences"), "inferences")
        rates = [float(a["pass_rate"]) for a in answers if a["model_name"] in coders]
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"column inferences: {error!r}", file=place) from error
    return PassRates(float(np.mean(rates)), float(np.std(rates))) if rates else None


def select(rates: Sequence[PassRates | None], difficulty: Difficulty) -> list[bool]:
    """Which questions have the difficulty, by percentiles over all with pass rates.

    ``hard``: a mean in the lowest fifth and a deviation above the lowest two fifths, so that an
    answer is right now and then; ``medium``: a mean in the middle half; ``easy``: in the highest
    quarter. Source: the selection of DiffuCoder, ``recipes/process_data.py``.
    """
    if difficulty == "all":
        return [True] * len(rates)
    known = [one for one in rates if one is not None]
    if not known:
        raise UserError(
            f"no answer is by {' or '.join(CODERS)}",
            key=f"--difficulty {difficulty}",
            remedy="name the models of the file (--coders), or keep all questions",
        )
    means, stds = [one.mean for one in known], [one.std for one in known]
    fifth, quarter, last = np.percentile(means, (20, 25, 75))
    varied = np.percentile(stds, 40)
    keeps = {
        "hard": lambda one: one.mean <= fifth and one.std >= varied,
        "medium": lambda one: quarter <= one.mean <= last,
        "easy": lambda one: one.mean >= last,
    }[difficulty]
    return [one is not None and keeps(one) for one in rates]


def acecode_rows(
    records: Iterable[Record], *, as_functions: bool = True
) -> tuple[list[Row], DroppedItems]:
    """A row for every question whose asserts call one function, and what was left out.

    With ``as_functions`` a question that addresses nobody ("you") has a second row, in which it is
    the docstring of the function that the best answer defines. UserError naming the place of a
    malformed record.
    """
    rows, dropped = list[Row](), DroppedItems()
    for place, item in records:
        try:
            row = _row(item)
        except NoTests as error:
            dropped.add(str(error), place)
            continue
        except ValueError as error:
            raise UserError(str(error), file=place) from error
        rows.append(row)
        if as_functions and (header := _header(item)):
            rows.append(_as_function(row, header))
    return rows, dropped


def _row(item: dict[str, Any]) -> Row:
    name, asked = text_field(item.get("id"), "id"), text_field(item.get("question"), "question")
    tests = [
        text_field(test, "test_cases")
        for test in non_empty_list_field(item.get("test_cases"), "test_cases")
    ]
    called = {found[1] for test in tests if (found := _CALLED.match(test.strip()))}
    if len(called) != 1:
        raise NoTests("has asserts that do not call one function")
    example = "" if "```" in asked else f"\n\nA test of it: `{tests[0].strip()}`"
    return Row(
        id=f"acecode/{name}",
        prompt=({"role": "user", "content": f"{asked.strip()}{example}"},),
        problem=asked,
        prompter_type="mbppplus",
        selected_uts=tuple(tests),
        entry_point=called.pop(),
        problem_id=f"acecode/{name}",
        task=SOLVING,
    )


def _header(item: dict[str, Any]) -> str:
    """The first line of the best answer, if it defines a function and the question fits into its
    docstring; else empty."""
    asked = str(item["question"])
    if "you" in asked.lower() or '"""' in asked or not item.get("inferences"):
        return ""
    best = max(item["inferences"], key=lambda answer: float(answer["pass_rate"]))
    header = str(best["completion"]).strip().partition("\n")[0]
    return header if _SIGNATURE.fullmatch(header) else ""


def _as_function(row: Row, header: str) -> Row:
    docstring = "\n".join(f"    {line}".rstrip() for line in row.problem.strip().splitlines())
    asked = f'Complete this function:\n```python\n{header}\n    """\n{docstring}\n    """\n```'
    return Row(
        id=f"{row.id}/function",
        prompt=({"role": "user", "content": asked},),
        problem=asked,
        prompter_type=row.prompter_type,
        selected_uts=row.selected_uts,
        entry_point=row.entry_point,
        problem_id=row.problem_id,
        task=SOLVING,
    )
