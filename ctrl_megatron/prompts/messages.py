"""The conversations: first answer, critique, critique with an execution hint, revision; and the
line in which a critic commits itself.

The wording is short because the smallest critic has 135M parameters and sees a few hundred prompt
tokens. No text ever contains a complete judgment line, so that echoing the prompt is not a
judgment.
"""

from __future__ import annotations

import re
from typing import get_args

from ctrl_megatron.prompts.code_block import sanitized_answer
from ctrl_megatron.types import Message, Problem, PrompterType

REVISION_SENTENCE = "Please finalize your answer accordingly using the same format."
"""Ends every request for a revision; CTRL's wording."""

JUDGED_CORRECT = "Overall judgment: Correct"
"""What a critique says of a solution that it holds to be right."""
JUDGED_INCORRECT = "Overall judgment: Incorrect"
"""And of one that it holds to be wrong."""

_CRITIQUE_TASK = (
    "Review the answer to this programming problem. Say what is right or wrong and how to "
    "improve it. Do not write the full solution."
)
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
    """Ask for a first answer. Raises ``ValueError`` for an unknown ``prompter_type``."""
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
    answer = "Answer with one ```python code block."
    return [_user(f"{task}\n{_tagged('problem', problem.statement)}\n{answer}")]


def critique_messages(problem: Problem, solution: str) -> list[Message]:
    """Ask for a critique of ``solution``; ``ValueError`` for an unknown ``prompter_type``."""
    return [_user("\n".join((_CRITIQUE_TASK, *_subject(problem, solution), _CRITIQUE_FORMAT)))]


def hint_messages(problem: Problem, solution: str, hint: str) -> list[Message]:
    """Ask for a critique that reasons from ``hint`` (execution feedback) but never mentions it."""
    task = f"{_CRITIQUE_TASK} {_HINT_TASK}"
    parts = (task, *_subject(problem, solution), _tagged("hint", hint), _CRITIQUE_FORMAT)
    return [_user("\n".join(parts))]


def revision_request(critique: str) -> Message:
    """The turn that follows a criticised answer: the critique, then the request to answer again.

    Of a critique with ``<format>`` and ``</format>`` only what stands between their first
    occurrences counts.
    """
    opening, closing = critique.find(_FORMAT_OPEN), critique.find(_FORMAT_CLOSE)
    if opening >= 0 and closing >= 0:
        critique = critique[opening + len(_FORMAT_OPEN) : closing]
    return _user(f"{critique.strip()}\n\n{REVISION_SENTENCE}")


def choice_messages(question: str, first: str, second: str) -> list[Message]:
    """Ask which of two answers to ``question`` is better."""
    parts = (("question", question), ("first_answer", first), ("second_answer", second))
    return [_user("\n".join((_CHOICE_TASK, *(_tagged(tag, text) for tag, text in parts))))]


def parse_choice(text: str) -> str | None:
    """``first`` or ``second``, which ``text`` names last as the better answer; None for neither."""
    named = _CHOICE.findall(text)
    return named[-1].lower() if named else None


def revision_messages(problem: Problem, solution: str, critique: str) -> list[Message]:
    """The dialogue that asks for a revision: problem, the code of ``solution``, ``critique``."""
    answer: Message = {"role": "assistant", "content": sanitized_answer(solution)}
    return [*generation_messages(problem), answer, revision_request(critique)]


def parse_judgment(critique: str) -> bool | None:
    """What a critique says about the answer: True correct, False incorrect, None where it does not
    say.

    The two judgment strings count anywhere and case-sensitively, as in CTRL; anything else (a bold
    label, another case) is no judgment. Where a critique contains both, the last one holds.
    """
    correct = critique.rfind(JUDGED_CORRECT)
    incorrect = critique.rfind(JUDGED_INCORRECT)
    return None if correct == incorrect else correct > incorrect


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
    """A LiveCodeBench prompt without its instructions; a bare question is returned as it is."""
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
