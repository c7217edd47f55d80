"""What a case of the corpus is: tests from a data set, programs, and what plain Python says."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True)
class Case:
    """Tests as a data set has them, a program that passes them all and programs that fail one."""

    name: str
    kind: str
    tests: tuple[str, ...]
    right: str
    wrong: tuple[str, ...] = ()
    entry_point: str | tuple[str, ...] = "f"
    setup: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a program must define."""
        return (self.entry_point,) if isinstance(self.entry_point, str) else self.entry_point


def text(lines: str) -> str:
    """A text without the indentation and the empty lines around it that it has in a module."""
    return dedent(lines).strip("\n") + "\n"


def asserts(lines: str) -> tuple[str, ...]:
    """Each line is a test of its own, as in MBPP."""
    return tuple(line + "\n" for line in text(lines).splitlines() if line)


def case(
    name: str,
    kind: str,
    entry_point: str | tuple[str, ...],
    tests: str | tuple[str, ...],
    right: str,
    wrong: str | tuple[str, ...] = (),
    setup: str = "",
) -> Case:
    """A case of texts that are indented as the module is; one text of tests is one test."""
    return Case(
        name=name,
        kind=kind,
        tests=tuple(text(test) for test in ((tests,) if isinstance(tests, str) else tests)),
        right=text(right),
        wrong=tuple(text(program) for program in ((wrong,) if isinstance(wrong, str) else wrong)),
        entry_point=entry_point,
        setup=text(setup) if setup else "",
    )
