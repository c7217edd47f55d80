"""Reads from the text of tests which names the program defines, and which modules are the
program's. What the tests do with them is not read: the judge measures it.

A name is the program's only where it can mean nothing else, because a function that is taken for
the program's gets arguments that may contain the expected result, and its answer may decide the
verdict.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Container, Iterable, Iterator, Sequence

from ctrl_megatron.sandbox.jail.pytest_stand_in import NAMES

SOLUTION_CLASS = "Solution"
PROGRAM_MODULES = frozenset(
    [
        *("answer", "implementation", "main", "my_module", "my_solution", "program", "solution"),
        *("solutions", "submission", "your_module", "your_solution"),
    ]
)
"""Module names that tests use for the program's file."""
_BUILTINS = frozenset({*dir(builtins), "__name__", "__file__", "__package__", "__doc__"})
_LIBRARY = """
bisect collections copy datetime decimal fractions functools heapq itertools json math operator
random re statistics string sys
"""
_MODULES = frozenset(_LIBRARY.split())
_HELPERS = {
    **dict.fromkeys(("ceil", "floor", "inf", "isclose", "nan", "pi", "sqrt"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections"),
    "Decimal": "decimal",
    "Fraction": "fractions",
    "permutations": "itertools",
}
"""Names that published tests use without an import, and their modules. The judge defines them."""


def program_imports(
    trees: Iterable[ast.Module], entries: Container[str]
) -> tuple[set[str], set[str]]:
    """The modules that the tests take for the program's file, and the names that they use of it. A
    module is the program's if it is one of ``PROGRAM_MODULES``, or if one of ``entries`` is
    imported from it and it is outside the standard library.
    """
    modules, names, known = set[str](), set[str](), set[str]()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                taken = [alias for alias in node.names if alias.name in PROGRAM_MODULES]
                modules.update(alias.name for alias in taken)
                known.update(alias.asname or alias.name for alias in taken)
            elif isinstance(node, ast.ImportFrom):
                root = (node.module or "").split(".")[0]
                foreign = root not in sys.stdlib_module_names
                ours = root in PROGRAM_MODULES or node.level > 0
                taken = [a for a in node.names if ours or (foreign and a.name in entries)]
                if taken:
                    modules.add(f"{'tests.' if node.level else ''}{node.module or ''}")
                for alias in taken:
                    if node.module is None:
                        modules.add(f"tests.{alias.name}")
                        known.add(alias.asname or alias.name)
                    elif alias.name != "*":
                        names.add(alias.name)
    for tree in trees:
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in known
        }
    return modules - {"", "tests."}, names


def refuse_imports(tree: ast.Module, modules: Container[str], place: str) -> None:
    """Raise ``ValueError`` for an import that the judge does not have: it has the standard library,
    the program's ``modules`` and the part of pytest that ``jail.pytest_stand_in`` defines. Imports
    inside ``try`` are left alone: the text handles their failure.
    """
    tried = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for statement in node.body
        for part in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in tried:
            found = [alias.name for alias in node.names]
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                found = [] if node.level or node.module is None else [node.module]
                names = [a.name for a in node.names] if found == ["pytest"] else []
            for module in found:
                root = module.split(".")[0]
                known = root == "pytest" or root in sys.stdlib_module_names
                if not known and module not in modules:
                    raise ValueError(
                        f"{place} imports {root}, which the judge does not have: tests may "
                        "import Python's own modules and pytest"
                    )
            _refuse_names(names, place)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            _refuse_names([node.attr] if node.value.id == "pytest" else [], place)


def _refuse_names(names: Iterable[str], place: str) -> None:
    for name in names:
        if name not in NAMES and name != "*":
            known = ", ".join(NAMES)
            raise ValueError(f"{place} uses pytest.{name}; the judge has {known} of pytest")


def asserts_constants(text: str, tree: ast.Module) -> bool:
    """Whether a script asserts expressions without a name, and can fail by nothing else but an
    exception of the program."""
    asserts = [node for node in tree.body if isinstance(node, ast.Assert)]
    if not asserts or text.count("assert") > len(asserts) or "raise" in text or "exit" in text:
        return False
    named = (part for node in asserts for part in _walk_code(node.test))
    return not any(isinstance(part, ast.Name) for part in named)


def find_program_names(
    entries: tuple[str, ...], setup: ast.Module, tests: Sequence[ast.Module]
) -> set[str]:
    """The names that the program defines.

    With ``entries`` (entry points) these are the entries, and class ``Solution`` where the tests
    call an entry as its method. Without them it is the only function name that the tests use and
    that is no builtin, not well known (``_MODULES``, ``_HELPERS``) and not defined by the setup or
    a test, together with the class names of this kind; if there is none, the only builtin name
    that every test calls. Raises ``ValueError`` for a name that nothing defines and for a record
    that leaves more than one choice.
    """
    aliases = [node for node in ast.walk(setup) if isinstance(node, ast.alias)]
    imports_all = any(alias.name == "*" for alias in aliases)
    if not entries and imports_all:
        raise ValueError(
            "provided_data.test_setup_code imports *, which may hide the program's functions; "
            "give provided_data.entry_point"
        )
    free = free_names([setup, *tests])
    if entries:
        return _named(entries, free, [setup, *tests], imports_all)
    return _inferred(free) or _shadowed_builtin(tests, setup)


def helper_imports(names: Iterable[str]) -> str:
    """Import statements for those of ``names`` that published tests use without importing them."""
    lines = []
    for name in sorted(names):
        if name in _MODULES:
            lines.append(f"import {name}\n")
        elif name in _HELPERS:
            lines.append(f"from {_HELPERS[name]} import {name}\n")
    return "".join(lines)


def free_names(trees: Iterable[ast.Module]) -> set[str]:
    """Names that ``trees`` read and that neither they nor Python's builtins define."""
    loaded: set[str] = set()
    bound = set(_BUILTINS)
    for tree in trees:
        for node in _walk_code(tree):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            else:
                bound.update(_bindings(node))
    return loaded - bound


def names_defined_by(node: ast.stmt) -> Iterable[str]:
    """Names that a statement at the top of a test defines."""
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.ExceptHandler)):
        return ()
    return _bindings(node)


def _named(
    entries: tuple[str, ...], free: set[str], trees: Sequence[ast.Module], imports_all: bool
) -> set[str]:
    stubs = set(entries)
    unknown = free - stubs - _MODULES - _HELPERS.keys()
    methods = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and getattr(node.value.func, "id", None) == SOLUTION_CLASS
    }
    if SOLUTION_CLASS in unknown and methods and methods <= stubs:
        stubs.add(SOLUTION_CLASS)
        unknown.remove(SOLUTION_CLASS)
    if unknown and not imports_all:
        raise ValueError(
            f"the tests use {', '.join(sorted(unknown))[:200]}, which nothing defines: define it "
            "in provided_data.test_setup_code, or name it in provided_data.entry_point if the "
            "program must"
        )
    return stubs


def _inferred(free: set[str]) -> set[str]:
    """The one function and the classes among ``free``. Two functions are refused: one of them may
    be there to judge the other.
    """
    stubs = free - _MODULES
    stubs = (stubs - _HELPERS.keys()) or stubs
    functions = sorted(name for name in stubs if not name[0].isupper())
    if len(functions) > 1:
        raise ValueError(
            f"the tests use {', '.join(functions)[:200]}, each of which may be the program's or "
            "the tests' own; give provided_data.entry_point"
        )
    return stubs


def _shadowed_builtin(tests: Sequence[ast.Module], setup: ast.Module) -> set[str]:
    """The builtin name that every test calls: a problem may ask for a function of that name. A name
    that the setup defines does not count, since the setup's function would be judged instead.
    """
    defined = {name for node in ast.walk(setup) for name in _bindings(node)}
    called = [
        {
            n.func.id
            for n in ast.walk(tree)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        for tree in tests
    ]
    names = set().union(*called)
    if len(names) != 1 or not all(called) or not names <= _BUILTINS - defined:
        raise ValueError(
            "the tests name no function of the program; give provided_data.entry_point"
        )
    return names


def _walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """Like ``ast.walk``, but without constants, of which a test may contain a hundred thousand."""
    parts = [node]
    while parts:
        part = parts.pop()
        yield part
        parts.extend(p for p in ast.iter_child_nodes(part) if type(p) is not ast.Constant)


def _bindings(node: ast.AST) -> Iterable[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.alias):
        return ((node.asname or node.name).split(".")[0],)
    if isinstance(node, ast.ExceptHandler) and node.name:
        return (node.name,)
    if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
        return (node.name,)
    if isinstance(node, ast.MatchMapping) and node.rest:
        return (node.rest,)
    return ()
