"""Training examples from mutants: programs with one known fault.

A model of 135M parameters cannot repair programs, and does not follow a critique in prose, so a
right critique earns no reward with it. Fine-tuned on ``proxy_examples`` it does what a critique
asks, right or wrong, and becomes a proxy whose revisions measure the critique. ``critic_examples``
are critiques that name the fault. Both become ordinary files for ``ctrl-train-sft``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal, get_args

from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.data.rows import Row, row_of_attempt
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.mutations import Mutation, MutationKind, count_occurrences, mutations
from ctrl_megatron.preparation.selection import choose_by_right_share
from ctrl_megatron.prompts import (
    JUDGED_CORRECT,
    JUDGED_INCORRECT,
    critique_messages,
    fence_code,
    revision_messages,
)
from ctrl_megatron.sft.examples import SftExample
from ctrl_megatron.types import Attempt, Problem

Split = Literal["train", "unseen_mutants", "unseen_problems"]
FaultKind = MutationKind | Literal["human", "model"]
"""The kind of an edit, or who made the fault."""

BLAND = f"Analysis: The answer is right.\nImprovement suggestions: None.\n{JUDGED_CORRECT}"
"""A critique that asks for no change; right for a right program."""
_REQUESTS = ("Replace `{0}` with `{1}`.", "Change `{0}` to `{1}`.", "Use `{1}` instead of `{0}`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A program with one known fault, and its pass rate."""

    id: str
    problem_id: str
    split: Split
    """Problems of ``unseen_problems`` are in no other split; problems of ``unseen_mutants`` are
    also in ``train``, with other mutants."""
    kind: FaultKind
    code: str
    wrong: str
    """The expression with the fault, which occurs once in ``code``."""
    right: str
    """The expression of the reference at that place."""
    pass_rate: float
    """Share of tests that ``code`` passes; below 1."""


def read_mutants(path: Path, problems: dict[str, Problem]) -> list[Mutant]:
    """The mutants of a file. Raises UserError naming line and key of a wrong value."""
    found = []
    for place, record in read_json_lines_with_places(path):
        try:
            mutant = Mutant(**record)
        except TypeError as error:
            raise UserError(f"{place}: {error}") from None
        _check(mutant, problems, place)
        found.append(mutant)
    return found


def _check(mutant: Mutant, problems: dict[str, Problem], place: str) -> None:
    for name in ("id", "problem_id", "split", "kind", "code", "wrong", "right"):
        if not isinstance(getattr(mutant, name), str):
            raise UserError(f"{place}: key {name!r} must be a text")
    for name, known in (("split", get_args(Split)), ("kind", get_args(MutationKind))):
        if getattr(mutant, name) not in known:
            raise UserError(f"{place}: key {name!r} must be one of {', '.join(known)}")
    rate = mutant.pass_rate
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise UserError(f"{place}: key 'pass_rate' must be a number from 0, below 1")
    if mutant.problem_id not in problems:
        raise UserError(f"{place}: problem {mutant.problem_id!r} is not among the problems")
    if count_occurrences(mutant.code, mutant.wrong) != 1:
        raise UserError(f"{place}: key 'wrong' must occur once in 'code'")
    repaired = mutant.code.replace(mutant.wrong, mutant.right)
    if repaired != problems[mutant.problem_id].reference.strip():
        raise UserError(
            f"{place}: with 'right' in place of 'wrong', 'code' is not the problem's reference",
            remedy="make the file anew from these problems, or name those that it was made from",
        )


def oracle_critique(wrong: str, right: str, wording: int = 0) -> str:
    """The oracle critique, which names the fault and its repair; ``wording`` chooses one of
    three.
    """
    request = _REQUESTS[wording % len(_REQUESTS)].format(wrong, right)
    return f"Analysis: `{wrong}` is wrong.\nImprovement suggestions: {request}\n{JUDGED_INCORRECT}"


def attempt_row(mutant: Mutant, problem: Problem) -> Row:
    """The row that requests a critique of ``mutant``, with the extra columns ``wrong``, ``right``
    and ``kind``.
    """
    attempt = Attempt(
        id=mutant.id, problem=problem, solution=fence_code(mutant.code), pass_rate=mutant.pass_rate
    )
    known = {"wrong": mutant.wrong, "right": mutant.right, "kind": mutant.kind}
    return replace(row_of_attempt(attempt), extra=known)


def reference_row(problem: Problem) -> Row:
    """The row that requests a critique of the problem's reference."""
    attempt = Attempt(
        id=f"{problem.id}/right",
        problem=problem,
        solution=fence_code(problem.reference.strip()),
        pass_rate=1.0,
    )
    return replace(row_of_attempt(attempt), extra={"wrong": "", "right": "", "kind": "none"})


def proxy_examples(
    mutants: Sequence[Mutant], problems: dict[str, Problem], seed: int
) -> list[SftExample]:
    """Examples of following a critique: repairs (in three wordings), right programs left unchanged,
    wrong programs left unchanged because the critique finds no fault, and right expressions
    replaced by wrong ones because the critique asks for it. Shuffled by ``seed``.
    """
    rng = Random(seed)
    every = [_example(*lesson) for lesson in _lessons(mutants, problems, rng)]
    rng.shuffle(every)
    return every


def critic_examples(
    mutants: Sequence[Mutant],
    problems: dict[str, Problem],
    seed: int,
    *,
    right: int = 80,
    right_share: float | None = None,
    held_out: Collection[str] = (),
) -> list[SftExample]:
    """The oracle critique of every mutant, and ``BLAND`` for up to ``right`` right programs; with
    ``right_share`` as many of both as give that share of right ones. Right programs of the problems
    ``held_out`` are left out.
    """
    rng = Random(seed)
    known = sorted({m.problem_id for m in mutants} - {*held_out})
    if right_share is None:
        chosen = list(mutants), rng.sample(known, min(right, len(known)))
    else:
        kept = choose_by_right_share(known, mutants, right_share, seed, _problem_of)
        chosen = (
            [one for one in kept if isinstance(one, Mutant)],
            [one for one in kept if isinstance(one, str)],
        )
    every = [
        SftExample(
            id=m.id,
            prompt=tuple(critique_messages(problems[m.problem_id], fence_code(m.code))),
            response=oracle_critique(m.wrong, m.right),
        )
        for m in chosen[0]
    ]
    for name in chosen[1]:
        row = reference_row(problems[name])
        every.append(SftExample(id=row.id, prompt=row.prompt, response=BLAND))
    rng.shuffle(every)
    return every


def _problem_of(one: Mutant | str) -> str:
    """The problem of a mutant, or the problem itself, which stands for its right program."""
    return one if isinstance(one, str) else one.problem_id


def evaluation_rows(
    mutants: Sequence[Mutant], problems: dict[str, Problem], count: int, *, right: bool
) -> list[Row]:
    """Rows of a test set of at most ``count`` programs: the first of ``mutants``, or with ``right``
    the first one of every problem, each beside the right program of its problem.
    """
    if not right:
        return [attempt_row(m, problems[m.problem_id]) for m in mutants[:count]]
    first = {mutant.problem_id: mutant for mutant in reversed(mutants)}
    distinct = [mutant for mutant in mutants if first[mutant.problem_id] is mutant]
    pairs = [(m, problems[m.problem_id]) for m in distinct[: count // 2]]
    return [row for m, p in pairs for row in (attempt_row(m, p), reference_row(p))]


def rl_rows(
    mutants: Sequence[Mutant],
    problems: dict[str, Problem],
    seed: int,
    *,
    highest_pass_rate: float,
    longest: int | None = None,
    right_share: float,
    held_out: Collection[str] = (),
) -> list[Row]:
    """Rows for reinforcement learning: mutants of at most ``longest`` characters that pass at most
    ``highest_pass_rate`` of their tests, and right programs, which are the share ``right_share`` of
    all rows (``choose_by_right_share``). Right programs of the problems ``held_out``, and longer
    ones, are left out.

    If most tests pass already, a weak critic loses more by a wrong edit than it gains by a right
    one, and learns to ask for nothing. A program that the proxy cannot copy with one change gets
    the same reward for every critique (docs/experiments/learning.md, 2026-11-23).
    """
    rng = Random(seed)
    chosen = [
        mutant
        for mutant in mutants
        if mutant.pass_rate <= highest_pass_rate
        and (longest is None or len(mutant.code) <= longest)
    ]
    known = [
        name
        for name in sorted({m.problem_id for m in mutants} - {*held_out})
        if longest is None or len(problems[name].reference.strip()) <= longest
    ]
    kept = choose_by_right_share(known, chosen, right_share, seed, _problem_of)
    rows = [
        reference_row(problems[one])
        if isinstance(one, str)
        else attempt_row(one, problems[one.problem_id])
        for one in kept
    ]
    rng.shuffle(rows)
    return rows


_Lesson = tuple[str, Row, str, str]
"""Id, row, critique, and the program after the revision."""


def _lessons(
    mutants: Sequence[Mutant], problems: dict[str, Problem], rng: Random
) -> Iterator[_Lesson]:
    chosen = list(mutants)
    rng.shuffle(chosen)
    for number, mutant in enumerate(chosen):
        row = attempt_row(mutant, problems[mutant.problem_id])
        repaired = mutant.code.replace(mutant.wrong, mutant.right)
        if number % 6 == 4:
            yield f"{mutant.id}/bland", row, BLAND, mutant.code
        elif number % 6 == 5 and (spoil := _spoiled(mutant.code, _second_faults(mutant), rng)):
            yield f"{mutant.id}/spoil", row, spoil[0], spoil[1]
        else:
            critique = oracle_critique(mutant.wrong, mutant.right, number)
            yield f"{mutant.id}/repair", row, critique, repaired
    known = sorted({m.problem_id for m in mutants})
    rng.shuffle(known)
    for number, name in enumerate(known):
        row, code = reference_row(problems[name]), problems[name].reference.strip()
        faults = [m for m in chosen if m.problem_id == name]
        spoil = _spoiled(code, faults, rng) if number % 3 == 2 else None
        if spoil:
            yield f"{name}/spoil", row, spoil[0], spoil[1]
        else:
            yield f"{name}/right", row, BLAND, code


def _second_faults(mutant: Mutant) -> list[Mutation]:
    """Further mutations of a mutant. A result that is itself a mutant of the reference is left out,
    because it may belong to a test set.
    """
    reference = mutant.code.replace(mutant.wrong, mutant.right)
    taken = {reference, *(m.code for m in mutations(reference))}
    return [m for m in mutations(mutant.code) if m.code not in taken]


def _spoiled(code: str, faults: Sequence[Mutation | Mutant], rng: Random) -> tuple[str, str] | None:
    """A critique that asks for one of ``faults``, and the program that has it; None if none
    fits.
    """
    fits = [m for m in faults if count_occurrences(code, m.right) == 1]
    if not fits:
        return None
    fault = rng.choice(fits)
    return oracle_critique(fault.right, fault.wrong, rng.randrange(len(_REQUESTS))), fault.code


def _example(name: str, row: Row, critique: str, code: str) -> SftExample:
    return SftExample(
        id=name,
        prompt=tuple(revision_messages(row.attempt().problem, row.solution, critique)),
        response=fence_code(code.strip()),
    )
