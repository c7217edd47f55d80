"""Programs that people and models wrote, right and wrong, and the faults of those that differ from
a right one by one edit.

Sources: HumanEvalPack (octopack, arXiv 2308.07124), whose wrong programs were written by hand, and
collected solutions: one JSON object per line with ``model``, ``task_id`` (``MBPP/N`` or
``HumanEval/N``), ``prompt``, ``solution``, ``tests`` and ``stub`` (the functions that tests call).
Pure; verdicts are the sandbox's.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from random import Random
from typing import Any, Literal

from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.errors import UserError
from ctrl_megatron.preparation.evalplus import human_eval_problem
from ctrl_megatron.preparation.mutants import Mutant, Split
from ctrl_megatron.preparation.mutations import mutations, smallest_edit
from ctrl_megatron.preparation.published import DroppedItems
from ctrl_megatron.prompts import extract_code, fence_code
from ctrl_megatron.sandbox.datasets.functions import read_function_tests
from ctrl_megatron.types import Attempt, Problem

_TEXTS = ("model", "task_id", "prompt", "solution", "source")
_PACK = ("task_id", "prompt", "declaration", "canonical_solution", "buggy_solution", "docstring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Programs by benchmark, not judged yet."""

    mbpp: tuple[Attempt, ...]
    """Programs that models wrote for problems of MBPP: for training."""
    human_eval: tuple[Attempt, ...]
    """Programs that models wrote for problems of HumanEval: for tests."""
    human: tuple[Attempt, ...]
    """Programs with a fault that a person made in HumanEval's references."""
    references: tuple[Attempt, ...]
    """References of HumanEval."""
    dropped: DroppedItems


def read_programs(solutions: Path, humanevalpack: Path) -> Programs:
    """The programs of both files in tidy form (``tidy``); those that are no Python are dropped.
    UserError that names file and line of a mistake.
    """
    dropped, problems = DroppedItems(), dict[str, Problem]()
    human, references = list[Attempt](), list[Attempt]()
    for place, record in read_json_lines_with_places(humanevalpack):
        _require_texts(record, _PACK, place)
        problem = _pack_problem(record, place)
        problems[problem.id] = problem
        for column, name, found in (
            ("buggy_solution", "human", human),
            ("canonical_solution", "reference", references),
        ):
            code = f"{record['declaration']}{record[column]}"
            found += _attempts(f"{problem.id}/{name}", problem, code, dropped)
    written: dict[Literal["MBPP", "HumanEval"], list[Attempt]] = {"MBPP": [], "HumanEval": []}
    for number, (place, record) in enumerate(read_json_lines_with_places(solutions)):
        _require_texts(record, _TEXTS, place)
        benchmark, _, task = record["task_id"].partition("/")
        if benchmark == "Python":  # HumanEvalPack's, which its own file has as well
            continue
        if benchmark not in written or not task.isdecimal():
            raise UserError(f"{place}: key 'task_id' must be MBPP/N or HumanEval/N")
        key = f"HumanEval/{task}" if benchmark == "HumanEval" else f"mbpp/{task}"
        if benchmark == "MBPP" and key not in problems:
            problems[key] = _mbpp_problem(key, record, place)
        if key not in problems:
            raise UserError(f"{place}: {humanevalpack} has no problem {key}")
        name, problem = f"{key}/{record['model']}/{number}", problems[key]
        if _can_be_judged(problem):
            written[benchmark] += _attempts(name, problem, record["solution"], dropped)
        else:
            dropped.add("tests of other functions than the prompt's", name)
    return Programs(
        mbpp=tuple(written["MBPP"]),
        human_eval=tuple(written["HumanEval"]),
        human=tuple(human),
        references=tuple(references),
        dropped=dropped,
    )


def _require_texts(record: Mapping[str, Any], names: Iterable[str], place: str) -> None:
    for name in names:
        if not isinstance(record.get(name), str):
            raise UserError(f"{place}: key {name!r} is missing or no text")


def _pack_problem(record: Mapping[str, Any], place: str) -> Problem:
    """HumanEval's problem with its docstring as the statement: the program shows the rest."""
    try:
        problem = human_eval_problem(record, 0)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error
    name = f"HumanEval/{record['task_id'].rpartition('/')[2]}"
    return replace(problem, id=name, statement=record["docstring"].strip())


def _mbpp_problem(name: str, record: Mapping[str, Any], place: str) -> Problem:
    tests, stub = (record.get(key) for key in ("tests", "stub"))
    for key, value in (("tests", tests), ("stub", stub)):
        texts = isinstance(value, list) and value and all(isinstance(t, str) for t in value)
        if not texts:
            raise UserError(f"{place}: key {key!r} must be a list of texts that is not empty")
    tree = parsed_program(record["prompt"])
    first = tree.body[-1] if tree is not None and tree.body else None
    statement = ast.get_docstring(first) if isinstance(first, ast.FunctionDef) else None
    if not statement:
        raise UserError(f"{place}: key 'prompt' must end with a function and its docstring")
    assert isinstance(tests, list) and isinstance(stub, list)
    return Problem(
        id=name,
        statement=statement,
        prompter_type="mbppplus",
        selected_uts=tuple(tests),
        entry_point=stub[0],
    )


def _can_be_judged(problem: Problem) -> bool:
    """Whether the tests of a function problem call what its prompt asks for."""
    tests = {"test_list": list(problem.selected_uts), "test_setup_code": problem.test_setup}
    try:
        read_function_tests({**tests, "entry_point": problem.entry_point})
    except ValueError:
        return False
    return True


def _attempts(name: str, problem: Problem, code: str, dropped: DroppedItems) -> Iterator[Attempt]:
    kept = tidy(code)
    if kept is None:
        dropped.add("no Python", name)
    else:
        yield Attempt(id=name, problem=problem, solution=fence_code(kept))


def parsed_program(code: str) -> ast.Module | None:
    """The syntax tree of ``code``; None where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def tidy(code: str) -> str | None:
    """``code`` without docstrings, which repeat the problem, and without blank lines and lines of
    comments, so that equal programs are equal texts. None where it is no Python.
    """
    tree = parsed_program(code)
    if tree is None:
        return None
    lines, removed = code.split("\n"), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and len(node.body) > 1:
            first, second = node.body[:2]
            end = first.end_lineno or first.lineno
            if ast.get_docstring(node, clean=False) is not None and end < second.lineno:
                removed |= set(range(first.lineno - 1, end))
                node.body = node.body[1:]
    kept = [line for number, line in enumerate(lines) if number not in removed]
    short = "\n".join(ln.rstrip() for ln in kept if ln.strip() and not ln.strip().startswith("#"))
    for text in (short, "\n".join(kept).strip("\n")):
        # Lines of a string may look like comments.
        made = parsed_program(text)
        if made is not None and ast.dump(made) == ast.dump(tree):
            return text
    return code.strip("\n")


def code_of(attempt: Attempt) -> str:
    """The program of an attempt."""
    return extract_code(attempt.solution)


def with_references(judged: Iterable[Attempt]) -> dict[str, Problem]:
    """Problem id -> the problem with its shortest right program as the reference; problems without
    a right program are left out.
    """
    found: dict[str, Problem] = {}
    for attempt in judged:
        code, name = code_of(attempt), attempt.problem.id
        if attempt.pass_rate == 1 and (name not in found or len(code) < len(found[name].reference)):
            found[name] = replace(attempt.problem, reference=code)
    return found


def right_programs(judged: Iterable[Attempt]) -> dict[str, list[str]]:
    """Problem id -> its right programs."""
    found: dict[str, list[str]] = {}
    for attempt in judged:
        if attempt.pass_rate == 1:
            found.setdefault(attempt.problem.id, []).append(code_of(attempt))
    return found


def with_nearest_reference(
    problem: Problem, code: str, known: Mapping[str, Sequence[str]]
) -> Problem:
    """The problem with that one of its ``known`` right programs as the reference which is most like
    ``code``; without one where none is known."""

    def likeness(other: str) -> float:
        return SequenceMatcher(None, code, other, autojunk=False).ratio()

    return replace(problem, reference=max(known.get(problem.id, [""]), key=likeness))


def known_faults(
    wrong: Sequence[Attempt],
    right: Iterable[Attempt],
    kind: Literal["human", "model"],
    split: Split = "train",
) -> list[Mutant]:
    """The wrong programs that one edit turns into a right program of the same problem, with the
    smallest such edit (``smallest_edit``).
    """
    of_problem = right_programs(right)
    found = []
    for attempt in wrong:
        code = code_of(attempt)
        edits = [smallest_edit(other, code) for other in of_problem.get(attempt.problem.id, ())]
        known = [edit for edit in edits if edit is not None]
        if known and attempt.pass_rate is not None:
            expression, repair = min(known, key=lambda edit: (sum(map(len, edit)), edit))
            found.append(
                Mutant(
                    id=attempt.id,
                    problem_id=attempt.problem.id,
                    split=split,
                    kind=kind,
                    code=code,
                    wrong=expression,
                    right=repair,
                    pass_rate=attempt.pass_rate,
                )
            )
    return found


def mutants_of(right: Sequence[Attempt], seed: int, *, most: int) -> list[tuple[Attempt, Mutant]]:
    """Up to ``most`` mutants of the right programs of each problem, chosen by ``seed``, with their
    attempts, which are not judged yet (``pass_rate`` is 0).
    """
    changed: dict[str, dict[str, Mutant]] = {}
    problems: dict[str, Problem] = {}
    for attempt in right:
        name = attempt.problem.id
        problems[name] = attempt.problem
        for mutation in mutations(code_of(attempt)):
            known = changed.setdefault(name, {})
            known.setdefault(
                mutation.code,
                Mutant(
                    id=f"{name}/mutant{len(known)}",
                    problem_id=name,
                    split="train",
                    kind=mutation.kind,
                    code=mutation.code,
                    wrong=mutation.wrong,
                    right=mutation.right,
                    pass_rate=0.0,
                ),
            )
    rng, found = Random(seed), []
    for name, of_code in changed.items():
        for mutant in rng.sample(list(of_code.values()), min(most, len(of_code))):
            attempt = Attempt(
                id=mutant.id, problem=problems[name], solution=fence_code(mutant.code)
            )
            found.append((attempt, mutant))
    return found
