"""The conversations that request a first solution, a critique, a critique with an execution hint
and a revision; and the judgment line of a critique.

The prompts are short because the smallest critic has 135M parameters and sees a few hundred prompt
tokens. No prompt contains a complete judgment line, so that a critique that repeats its prompt has
no judgment.
"""

from __future__ import annotations

import re
from difflib import unified_diff
from typing import get_args

from ctrl_megatron.prompts.code_block import extract_code, fence_code, sanitized_answer
from ctrl_megatron.types import Message, Problem, PrompterType, Verdict

REVISION_SENTENCE = "Please finalize your answer accordingly using the same format."
"""The last sentence of every request for a revision; CTRL's wording."""

JUDGED_CORRECT = "Overall judgment: Correct"
"""The judgment line of a critique that finds the solution right."""
JUDGED_INCORRECT = "Overall judgment: Incorrect"
"""The judgment line of a critique that finds the solution wrong."""

_ONE_BLOCK = "Answer with one ```python code block."
_CRITIQUE_TASK = (
    "Review the answer to this programming problem. Say what is right or wrong and how to "
    "improve it. Do not write the full solution."
)
_JUDGING_TASK = "Decide whether the answer to this programming problem passes every test."
_JUDGING_FORMAT = """Think first, and end with this line:
Overall judgment: (one word, Correct or Incorrect)"""
_HINT_TASK = "Base your review on the hint, but never mention that there is one."
_CRITIQUE_FORMAT = """<format>
Analysis: is the answer correct, and why
Improvement suggestions: what to change
Overall judgment: (one word, Correct or Incorrect)
</format>"""
_FORMAT_OPEN, _FORMAT_CLOSE = "<format>", "</format>"
_CHOICE_TASK = (
    "Two answers to a question follow. Compare them, then name the better one: end with the line "
    '"Better answer:" and one word, first or second.'
)
_CHOICE = re.compile(r"Better answer:\W*(first|second)\b", re.IGNORECASE)
_LCB_HEADINGS = ("### Question:", "### Format:")


def generation_messages(problem: Problem) -> list[Message]:
    """The request for a first solution. Raises ``ValueError`` for an unknown ``prompter_type``."""
    _check_type(problem)
    if problem.prompter_type == "livecodebench":
        return [_user(problem.statement)]
    if problem.prompter_type == "code_contests":
        task = (
            "Write a Python program that solves this problem. "
            "Read standard input, print to standard output."
        )
    else:
        name = _named(problem.entry_point) if problem.entry_point else ""
        task = f"Write Python code that solves this problem.{name} Do not include tests."
    return [_user(f"{task}\n{_tagged('problem', problem.statement)}\n{_ONE_BLOCK}")]


def critique_messages(problem: Problem, solution: str) -> list[Message]:
    """The request for a critique of ``solution``. Raises ``ValueError`` for an unknown
    ``prompter_type``.
    """
    return [_user("\n".join((_CRITIQUE_TASK, *_subject(problem, solution), _CRITIQUE_FORMAT)))]


def judging_messages(problem: Problem, solution: str) -> list[Message]:
    """The question whether ``solution`` is right. Raises ``ValueError`` for an unknown
    ``prompter_type``.
    """
    return [_user("\n".join((_JUDGING_TASK, *_subject(problem, solution), _JUDGING_FORMAT)))]


def hint_messages(problem: Problem, solution: str, hint: str) -> list[Message]:
    """The request for a critique that uses ``hint`` (execution feedback) without mentioning it."""
    task = f"{_CRITIQUE_TASK} {_HINT_TASK}"
    parts = (task, *_subject(problem, solution), _tagged("hint", hint), _CRITIQUE_FORMAT)
    return [_user("\n".join(parts))]


def reference_hint(solution: str, reference: str, *, changes: bool) -> str:
    """A hint with a program that passes every test, whole or, for ``changes``, as its difference
    from the program of ``solution``."""
    if not changes:
        return f"This program passes every test:\n{fence_code(reference.strip())}"
    sides = (extract_code(solution).splitlines(), reference.splitlines())
    lines = [*unified_diff(*sides, lineterm="", n=1)][2:]
    if not lines:
        return "The answer equals a program that passes every test."
    return "These changes make a program of it that passes every test:\n" + "\n".join(lines)


def revision_request(critique: str) -> Message:
    """The turn after the criticised solution: the critique and the request for a revision.

    Where a critique contains ``<format>`` and ``</format>``, only the text between their first
    occurrences is used.
    """
    opening, closing = critique.find(_FORMAT_OPEN), critique.find(_FORMAT_CLOSE)
    if opening >= 0 and closing >= 0:
        critique = critique[opening + len(_FORMAT_OPEN) : closing]
    return _user(f"{critique.strip()}\n\n{REVISION_SENTENCE}")


def repair_request(verdict: Verdict | None) -> str:
    """The request for another program after the ``verdict`` on the last one; None where the answer
    had no program that could run.

    It tells numbers and time-outs only. The messages of failed tests contain expected values, and
    whatever the program printed or raised, its input included, from which the next program, judged
    on the same tests, could copy the answers.
    """
    if verdict is None:
        found = "Your answer contains no program."
    else:
        failed = verdict.total - sum(verdict.passed)
        found = f"Your program fails {failed} of {verdict.total} tests."
        found += " It runs out of time." if verdict.timed_out else ""
    return f"{found}\nWrite the whole program again. {_ONE_BLOCK}"


def choice_messages(question: str, first: str, second: str) -> list[Message]:
    """The question which of two answers to ``question`` is better."""
    parts = (("question", question), ("first_answer", first), ("second_answer", second))
    return [_user("\n".join((_CHOICE_TASK, *(_tagged(tag, text) for tag, text in parts))))]


def parse_choice(text: str) -> str | None:
    """``first`` or ``second``, the last one that ``text`` names as better; None without a name."""
    named = _CHOICE.findall(text)
    return named[-1].lower() if named else None


def revision_messages(problem: Problem, solution: str, critique: str) -> list[Message]:
    """The dialogue that requests a revision: problem, code of ``solution``, ``critique``."""
    answer: Message = {"role": "assistant", "content": sanitized_answer(solution)}
    return [*generation_messages(problem), answer, revision_request(critique)]


def parse_judgment(critique: str) -> bool | None:
    """The judgment in a critique: True for correct, False for incorrect, None for no judgment.

    The two judgment strings count anywhere in the text and in this case only, as in CTRL; any other
    form (a bold label, another case) is no judgment. Where a critique contains both, the last one
    counts.
    """
    found = find_judgment_word(critique)
    return None if found is None else found[2]


def find_judgment_word(critique: str) -> tuple[int, int, bool] | None:
    """(first character of the word "Correct" or "Incorrect" of ``parse_judgment``, the character
    behind it, True for "Correct"); None where a critique contains no judgment.
    """
    correct = critique.rfind(JUDGED_CORRECT)
    incorrect = critique.rfind(JUDGED_INCORRECT)
    if correct == incorrect:
        return None
    line = JUDGED_CORRECT if correct > incorrect else JUDGED_INCORRECT
    start, word = max(correct, incorrect), line.rpartition(" ")[2]
    end = start + len(line)
    return end - len(word), end, correct > incorrect


def _named(entry_point: str) -> str:
    function, *classes = entry_point.split(", ")
    owner, _, method = function.rpartition("().")
    name = f" Write method `{method}` of class `{owner}`." if owner else ""
    return (name or f" Name the function `{function}`.") + "".join(
        f" Define class `{name}`." for name in classes
    )


def _subject(problem: Problem, solution: str) -> tuple[str, str]:
    _check_type(problem)
    statement = problem.statement
    if problem.prompter_type == "livecodebench":
        statement = _question_of(statement)
    elif problem.prompter_type == "mbppplus" and problem.entry_point:
        statement = f"{statement.strip()}\nFunction name: `{problem.entry_point}`"
    return _tagged("problem", statement), _tagged("answer", sanitized_answer(solution))


def _question_of(statement: str) -> str:
    """A LiveCodeBench prompt without its instructions; a bare question is returned unchanged."""
    start, end = (statement.find(heading) for heading in _LCB_HEADINGS)
    if start < 0 or end < start:
        return statement
    return statement[start + len(_LCB_HEADINGS[0]) : end]


def _check_type(problem: Problem) -> None:
    known = get_args(PrompterType)
    if problem.prompter_type not in known:
        raise ValueError(
            f"problem {problem.id!r}: unknown prompter_type {problem.prompter_type!r}; "
            f"use one of {', '.join(known)}"
        )


def _tagged(tag: str, text: str) -> str:
    return f"<{tag}>\n{text.strip()}\n</{tag}>"


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
