"""Plain CPython and pytest say of each case of the corpus what the corpus says of it.

It takes about a minute: ``pytest -m long tests/sandbox/test_corpus_oracle.py``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from corpus.cases import Case
from corpus.empty import EMPTY
from corpus.plain_python import passes
from corpus.right_classes import RIGHT_CLASSES
from corpus.right_functions import RIGHT_FUNCTIONS
from corpus.right_unit_tests import RIGHT_UNIT_TESTS
from corpus.wrong import WRONG

pytestmark = pytest.mark.long

RIGHT = (*RIGHT_FUNCTIONS, *RIGHT_CLASSES, *RIGHT_UNIT_TESTS)

CONSTANTS = ("None", "0", "'x'", "[]")
FUNCTION = "def {name}(*a, **k):\n    return {value}\n"
COROUTINE = f"async {FUNCTION}"
CLASS = """
class {name}:
    def __init__(self, *a, **k): pass
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return lambda *a, **k: {value}
"""
ONE_OBJECT = """
class One:
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return self
    def __call__(self, *a, **k): return self
"""
CLASS_OF_ONE_OBJECT = (
    ONE_OBJECT + "class {name}(One):\n    def __init__(self, *a, **k): self.__dict__.update(k)\n"
)


def crude_programs(case: Case, values: tuple[str, ...] = CONSTANTS) -> list[str]:
    """Programs that return one value whatever they are asked."""
    programs = []
    for value in values:
        parts = []
        for name in case.names:
            form = CLASS if name[0].isupper() else FUNCTION
            if f"async def {name}(" in case.right:
                form = COROUTINE
            parts.append(form.format(name=name, value=value))
        programs.append("\n".join(parts))
    if all(name[0].isupper() for name in case.names):
        programs.append("\n".join(CLASS_OF_ONE_OBJECT.format(name=name) for name in case.names))
    return programs


def ids(cases: tuple[Case, ...]) -> list[str]:
    return [case.name for case in cases]


@pytest.mark.parametrize("case", RIGHT, ids=ids(RIGHT))
def test_right_programs_pass_and_wrong_ones_fail(case: Case) -> None:
    assert passes(case, case.right)
    assert [passes(case, program) for program in case.wrong] == [False] * len(case.wrong)
    nothing = crude_programs(case, ("object()",))[0]
    assert not passes(case, nothing), "the tests judge nothing"


@pytest.mark.parametrize("case", WRONG, ids=ids(WRONG))
def test_wrong_programs_fail(case: Case) -> None:
    assert passes(case, case.right)
    assert case.wrong
    assert [passes(case, program) for program in case.wrong] == [False] * len(case.wrong)


@pytest.mark.parametrize("case", EMPTY, ids=ids(EMPTY))
def test_empty_tests_pass_for_crude_programs(case: Case) -> None:
    assert passes(case, case.right)
    verdicts = [passes(case, program) for program in crude_programs(case)]
    assert sum(verdicts) >= 3, verdicts


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(RIGHT) >= 220
    assert len(WRONG) >= 65
    assert len(EMPTY) >= 65
    names = Counter(case.name for case in (*RIGHT, *WRONG, *EMPTY))
    assert [name for name, count in names.items() if count > 1] == []
