"""A program's normal form: CTRL's, restricted to names that only their own scope can know."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from ctrl_megatron.prompts.python_source import parse_python

_READS_NAMES = """
    eval exec compile globals locals vars dir help breakpoint __import__ import_module modules
    __main__ __code__ __globals__ __closure__ _getframe f_locals f_globals f_code tb_frame gi_frame
    cr_frame settrace setprofile inspect traceback doctest NameError UnboundLocalError *
"""
"""A program that uses one of these can read the names of its variables."""
_DATA_CALLS = """
    abs bool bytes chr complex dict divmod enumerate float frozenset input int len list map ord pow
    range repr round set sorted str sum tuple zip
"""
_TEXT_METHODS = """
    count find format index join lower lstrip read readline readlines replace rstrip split
    splitlines strip upper
"""
_DATA = (
    *(ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    *(ast.BinOp, ast.UnaryOp, ast.Compare),
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = frozenset({"listcomp", "setcomp", "dictcomp", "genexpr"})


def normalize_code(code_str: str) -> str:
    """``code_str`` with private variables renamed to ``v_0, v_1, ...`` and a canonical layout.

    Private variables are those of functions, and those of the module (or of a function's body,
    where ``code_str`` is one) that contain data, so that no test can call them. Arguments,
    attributes, functions, classes, imports, names of builtins, and names that occur elsewhere in
    the program or in one of its strings are not private. A program that can read the names of its
    variables has no private variables. Numbers follow the order in which a visit of the syntax tree
    first meets a name as the target of an assignment. Code that does not parse is returned
    unchanged. Raises ``TypeError`` for anything but a string. Source: CTRL, ``critic_rm.py``, which
    renames every assigned name.
    """
    if not isinstance(code_str, str):
        raise TypeError(f"normalize_code needs a str, got {type(code_str).__name__}")
    tree = parse_python(code_str)
    if tree is None:
        return code_str
    try:
        private = _private_names(tree, code_str)
        others = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - private
        numbered = (name for i in count() if (name := f"v_{i}") not in others)
        names = dict(zip(_in_order(tree, private), numbered, strict=False))
        return ast.unparse(_Renamer(names).visit(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # SyntaxError: found by the compiler only. ValueError: numbers too long to print. Other
        # errors: extreme nesting.
        return code_str


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(id=self._names.get(node.id, node.id), ctx=node.ctx)


def _in_order(tree: ast.Module, names: set[str]) -> list[str]:
    stored = dict.fromkeys(
        node.id
        for node in _visited(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    return [name for name in stored if name in names]


def _visited(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _visited(child)


def _private_names(tree: ast.Module, code: str) -> set[str]:
    spelled = set(_spelled(tree))
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not (spelled | named).isdisjoint(_READS_NAMES.split()):
        return set()
    is_body = any(isinstance(node, ast.Return) for node in _module_level(tree))
    tables = list(_tables(symtable.symtable(code, "<program>", "exec")))
    public = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if not _is_private(symbol, table)
    }
    private = {
        name
        for name in named - spelled - public
        if not hasattr(builtins, name) and not name.startswith("__")
    }
    if is_body:
        return private
    stored = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_local()}
    shadows = not stored.isdisjoint(_DATA_CALLS.split())
    if shadows or any(isinstance(node, ast.ClassDef) for node in ast.walk(tree)):
        return private - stored  # Calls and operators may return any object.
    return (private - stored) | _holding_data(tree, private & stored)


def _spelled(tree: ast.Module) -> Iterator[str]:
    """Every name that is not that of a variable where it is read or assigned: names of arguments,
    attributes, functions and imports, in statements such as ``global``; and every word of a string.
    """
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.Name) and field == "id":
                continue
            for text in value if isinstance(value, list) else (value,):
                if isinstance(text, (str, bytes)):
                    words = text if isinstance(text, str) else text.decode("latin-1")
                    yield from re.findall(r"\w+|^\*$", words)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _is_private(symbol: symtable.Symbol, table: symtable.SymbolTable) -> bool:
    """True for a variable of this function or module, or of the function around it."""
    if symbol.is_imported() or symbol.is_namespace() or symbol.is_parameter():
        return False
    if table.get_type() == "module":
        return symbol.is_local() and not symbol.is_annotated()
    if table.get_type() != "function" or symbol.is_declared_global() or symbol.is_nonlocal():
        return False
    if table.get_name() in _COMPREHENSIONS:
        return symbol.is_free()
    return symbol.is_local() or symbol.is_free()


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose code runs in the scope of the module."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield from _module_level(child)


def _holding_data(tree: ast.Module, names: set[str]) -> set[str]:
    """The module's ``names`` that are never bound to a value that could be called."""
    bound = [binding for node in _module_level(tree) for binding in _bindings(node)]
    kept, before = names, None
    while kept != before:
        before = kept
        kept = kept - {name for name, value in bound if not _is_data(value, before)}
    return kept


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value) of every name that ``node`` binds; None for an unknown value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, ast.NamedExpr):
        yield from _unpacked(node.target, node.value)
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield from _unpacked(node.target, _element(node.iter))
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _unpacked(item.optional_vars, None)


def _unpacked(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Starred):
        yield from _unpacked(target.value, value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        parts: Iterable[ast.expr | None] = [_element(value)] * len(target.elts)
        starred = any(isinstance(part, ast.Starred) for part in target.elts)
        if isinstance(value, (ast.Tuple, ast.List)) and not starred:
            parts = value.elts if len(value.elts) == len(target.elts) else [None] * len(target.elts)
        for part, one in zip(target.elts, parts, strict=True):
            yield from _unpacked(part, one)


def _element(value: ast.expr | None) -> ast.expr | None:
    """A node of data for every element of ``value``; None where an element may not be data."""
    data = ast.Constant(value=0)
    if isinstance(value, ast.Call):
        name = value.func.id if isinstance(value.func, ast.Name) else ""
        if name == "map" and value.args and isinstance(value.args[0], ast.Name):
            return data if value.args[0].id in ("int", "float", "str") else None
        if name == "range" or (isinstance(value.func, ast.Attribute) and _is_data(value, set())):
            return data
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return data if all(isinstance(e, ast.Constant) for e in value.elts) else None
    return data if isinstance(value, (ast.Constant, ast.JoinedStr)) else None


def _is_data(value: ast.expr | None, names: set[str]) -> bool:
    if isinstance(value, _DATA):
        return True
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, ast.IfExp):
        return _is_data(value.body, names) and _is_data(value.orelse, names)
    if isinstance(value, ast.BoolOp):
        return all(_is_data(part, names) for part in value.values)
    if isinstance(value, ast.NamedExpr):
        return _is_data(value.value, names)
    if not isinstance(value, ast.Call):
        return False
    if isinstance(value.func, ast.Name):
        return value.func.id in _DATA_CALLS.split()
    if isinstance(value.func, ast.Attribute) and value.func.attr in _TEXT_METHODS.split():
        receiver = value.func.value
        return _is_data(receiver, names) or ast.unparse(receiver) in ("sys.stdin", "stdin")
    return False
