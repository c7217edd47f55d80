"""Critiques from templates and execution feedback: targets of supervised fine-tuning.

Source: CTRL (arXiv 2502.03492). There a large model writes these critiques; templates need no
second model. A critique states facts about the run and the structure of the code, and contains no
test, no expected value and no solution.
"""

from __future__ import annotations

from random import Random

from ctrl_megatron.preparation.diagnosis import Diagnosis, diagnose
from ctrl_megatron.preparation.phrases import (
    EXCEPTION_ADVICE,
    FINDINGS,
    OPENINGS,
    OTHER_EXCEPTION_ADVICE,
    SHAPE_ADVICE,
    SHAPE_DOUBT,
    SHAPE_PRAISE,
    SUGGESTIONS,
)
from ctrl_megatron.prompts import JUDGED_CORRECT, JUDGED_INCORRECT
from ctrl_megatron.types import Attempt, Verdict

_LONGEST_SIGNATURE = 40


def synthesise_critique(attempt: Attempt, verdict: Verdict, rng_seed: int) -> str:
    """A critique of ``attempt`` in the required format whose judgment is ``verdict.accepted``.

    Deterministic: ``rng_seed`` and the attempt's id choose the wording. Raises ``ValueError`` for a
    verdict without tests.
    """
    if not verdict.passed:
        raise ValueError(
            f"attempt {attempt.id!r}: the verdict covers no test, nothing can be said about it"
        )
    diagnosis = diagnose(attempt, verdict)
    facts = _facts(diagnosis)
    rng = Random(f"{rng_seed}/{attempt.id}")
    opening, finding, advice = (
        rng.choice(phrases).format_map(facts)
        for phrases in (OPENINGS, FINDINGS[diagnosis.fault], SUGGESTIONS[diagnosis.fault])
    )
    judgment = JUDGED_CORRECT if verdict.accepted else JUDGED_INCORRECT
    return f"Analysis: {opening} {finding}\nImprovement suggestions: {advice}\n{judgment}"


def _facts(diagnosis: Diagnosis) -> dict[str, str]:
    advice = SHAPE_ADVICE[diagnosis.shape]
    undefined = f"`{diagnosis.undefined}`" if diagnosis.undefined else "every name"
    exception_advice = EXCEPTION_ADVICE.get(diagnosis.exception, OTHER_EXCEPTION_ADVICE)
    return {
        "subject": _subject(diagnosis),
        "name": diagnosis.name,
        "line": str(diagnosis.line),
        "share": _share(diagnosis),
        "exception": diagnosis.exception,
        "exception_advice": exception_advice.format(
            undefined=undefined, exception=diagnosis.exception
        ),
        "shape_praise": SHAPE_PRAISE[diagnosis.shape],
        "shape_doubt": SHAPE_DOUBT[diagnosis.shape],
        "shape_advice": advice,
        "shape_advice_capital": advice[0].upper() + advice[1:],
    }


def _subject(diagnosis: Diagnosis) -> str:
    if not diagnosis.name:
        return "the program"
    signature = f"{diagnosis.name}({', '.join(diagnosis.parameters)})"
    fits = diagnosis.parameters and len(signature) <= _LONGEST_SIGNATURE
    return f"`{signature}`" if fits else f"`{diagnosis.name}`"


def _share(diagnosis: Diagnosis) -> str:
    """The share of failed tests, in words that do not mention tests."""
    if diagnosis.failed == diagnosis.total:
        return "all inputs" if diagnosis.total > 1 else "typical inputs"
    if diagnosis.failed == 1:
        return "one kind of input"
    return "most inputs" if diagnosis.failed * 2 > diagnosis.total else "some inputs"
