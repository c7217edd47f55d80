# ruff: noqa: E501 - a sentence stays on one line
"""The wording of critiques from templates: alternatives in which ``{...}`` is a fact of a diagnosis."""

from __future__ import annotations

OPENINGS = (
    "I read {subject} step by step against the task.",
    "I compared what {subject} does with what the task asks for.",
    "I followed {subject} through typical inputs and edge cases.",
    "I checked {subject} against each requirement of the task.",
)

FINDINGS: dict[str, tuple[str, ...]] = {
    "none": (
        "It covers the requirement, {shape_praise}, and each input I considered gives the expected result.",
        "The logic matches the requirement: {shape_praise}, and edge cases are treated properly as well.",
        "It does what is asked, {shape_praise}, and I found no input on which it would go wrong.",
    ),
    "syntax": (
        "It cannot run at all: Python stops with a syntax error near line {line}, so no case can succeed.",
        "The code does not parse. Around line {line} the syntax is invalid, so every input fails.",
    ),
    "missing": (
        "The required function `{name}` is never defined, so any caller fails before the logic is reached.",
        "There is no definition of `{name}` in the code. The task needs exactly this name, so calls fail.",
    ),
    "timeout": (
        "It does not finish in time on {share}: the work grows too fast or a loop never ends.",
        "On {share} it keeps running past the time limit, because it repeats work or does not stop.",
    ),
    "exception": (
        "It stops with {exception} on {share}, because the code does not handle such values.",
        "On {share} it raises {exception} instead of producing a result, so the code breaks midway.",
    ),
    "died": (
        "On {share} it ends the whole process before a result is handed back.",
        "It does not survive {share}: the process ends, by an exit or by using too much memory.",
    ),
    "no_return": (
        "It never returns a value, so a caller receives None on {share}.",
        "The function ends without returning its result; on {share} the caller gets None.",
    ),
    "wrong": (
        "It runs without an exception but produces the wrong result on {share}, so {shape_doubt}.",
        "The result is wrong on {share}: {shape_doubt}, although the code runs to the end.",
        "It finishes, yet its result differs from what the task asks on {share}; {shape_doubt}.",
    ),
}

SUGGESTIONS: dict[str, tuple[str, ...]] = {
    "none": (
        "No change is needed. Keep the same logic and hand in the code in the same format.",
        "Nothing has to be fixed; keep the code as it is and do not add anything to it.",
        "Keep this solution unchanged and answer with exactly the same code again.",
    ),
    "syntax": (
        "Hand in only valid Python in one code block, close every bracket and quote, and indent consistently.",
        "Rewrite the part near line {line} as valid Python, keep prose out of the block, and read it once more.",
    ),
    "missing": (
        "Define `{name}` at the top level with the arguments the task describes and return the result from it.",
        "Rename or add the function so that it is called exactly `{name}`, and let it return the answer.",
    ),
    "timeout": (
        "Make sure that every loop moves towards its end, and replace repeated work by a direct computation or a set.",
        "Use a cheaper method: avoid nested passes over the data, remember earlier results, and check the stop condition.",
    ),
    "exception": ("{exception_advice} Then walk through an empty, a small and a typical input.",),
    "died": (
        "Do not call exit functions inside the solution, build no huge values, and return the result normally.",
        "Remove every exit call and keep memory small; produce the result and let the code end by itself.",
    ),
    "no_return": (
        "Return the computed result instead of printing it or dropping it, on every path through the function.",
        "End each branch of the function with a return statement that hands back the computed result.",
    ),
    "wrong": (
        "Read the task again and {shape_advice}. Try a small example by hand before answering.",
        "Work out a small example by hand and {shape_advice}. Also consider empty and extreme inputs.",
        "{shape_advice_capital}, then compare with the task sentence by sentence, including the order and type of the result.",
    ),
}

SHAPE_PRAISE = {
    "recursion": "the recursion reaches its base case",
    "loop": "the loop visits the right elements",
    "branch": "the conditions separate the cases correctly",
    "formula": "the expression computes the right quantity",
}
SHAPE_DOUBT = {
    "recursion": "the recursion or its base case does not follow the task",
    "loop": "the loop collects or updates something other than the task needs",
    "branch": "the conditions do not separate the cases as the task needs",
    "formula": "the expression does not compute what the task describes",
}
SHAPE_ADVICE = {
    "recursion": "check the base case and what each recursive call should return",
    "loop": "check where the loop starts and ends and what it adds up in each turn",
    "branch": "check every condition, above all equal and boundary values",
    "formula": "derive the expression again from the definition in the task",
}

EXCEPTION_ADVICE = {
    "NameError": "Define or import {undefined} before it is used.",
    "UnboundLocalError": "Give every variable a value before the first path that reads it.",
    "ImportError": "Use only the standard library and import names that exist.",
    "ModuleNotFoundError": "Use only the standard library, without third-party packages.",
    "TypeError": "Check the number of arguments and convert values to the types that each operation needs.",
    "AttributeError": "Use only methods that the value's type really has.",
    "IndexError": "Keep every index inside the sequence and treat empty or short input first.",
    "KeyError": "Test that a key exists, or use a default, before reading it.",
    "ValueError": "Check each value before converting, unpacking or searching it.",
    "ZeroDivisionError": "Treat a divisor of zero as a case of its own before dividing.",
    "RecursionError": "Add a base case that every call reaches, or use a loop.",
    "EOFError": "Read exactly as many lines of input as the task describes.",
}
OTHER_EXCEPTION_ADVICE = (
    "Find the statement that raises {exception} and treat that situation before it."
)
