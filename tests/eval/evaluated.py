"""Transcripts of our own making."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ctrl_megatron.eval.pairwise import JudgedPair
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.types import Verdict

SAID = {"C": True, "I": False, "-": None}


def program(quarters: int, *, timed_out: bool = False) -> Verdict:
    """A verdict with the fewest tests, as a transcript is read."""
    share = Fraction(quarters, 4)
    passed = tuple(n < share.numerator for n in range(share.denominator))
    return Verdict(passed=passed, total=share.denominator, timed_out=timed_out)


def chain(
    problem: str,
    said: str,
    passed: tuple[int, ...],
    *,
    critic: str = "ours",
    sample: int = 0,
    seed: int = 0,
    difficulty: int = 1,
    **changes: Any,
) -> list[Turn]:
    """A turn per letter of ``said`` (Correct, Incorrect, -); ``passed`` are quarters of tests of
    the first solution and of every revision.
    """
    return [
        Turn(
            **{
                "critic": critic,
                "seed": seed,
                "problem_id": problem,
                "attempt": f"{problem}/0",
                "difficulty": difficulty,
                "sample": sample,
                "turn": number,
                "solution": f"answer {passed[number - 1]}",
                "critique": f"because {letter}",
                "judgment": SAID[letter],
                "revision": f"answer {passed[number]}",
                "before": program(passed[number - 1]),
                "after": program(passed[number]),
                "critique_tokens": 10,
                "revision_tokens": 20,
                **changes,
            }
        )
        for number, letter in enumerate(said, start=1)
    ]


def pair(label: str, choices: tuple[str | None, str | None], a: str = "", b: str = "") -> Any:
    """A judged pair; ``a`` and ``b`` are what critiques say of the responses, as in ``chain``."""
    return JudgedPair(
        critic="ours",
        seed=0,
        pair_id=f"{label}{choices}{a}{b}",
        source="own",
        label=label,  # type: ignore[arg-type]
        choices=choices,
        answers=("", ""),
        judgments_a=tuple(SAID[letter] for letter in a),
        judgments_b=tuple(SAID[letter] for letter in b),
        critiques_a=tuple(a),
        critiques_b=tuple(b),
    )


TWO_TURNS = [
    *chain("p1", "II", (2, 4, 4)),
    *chain("p1", "II", (2, 2, 4), sample=1),
    *chain("p2", "CC", (4, 0, 0), difficulty=2),
    *chain("p2", "CI", (4, 4, 4), sample=1, difficulty=2),
    *chain("p3", "-C", (0, 1, 1)),
    *chain("p3", "II", (0, 0, 2), sample=1),
]
"""Three problems, two samples each."""
