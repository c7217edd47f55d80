"""Functions that a configuration or a pipeline names by their import path."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from ctrl_megatron.errors import UserError, user_line_of

_SIIRL = (
    "siiRL's names are here in ctrl_megatron.pipeline (Pipeline, NodeType, DAGWorker.generate) and "
    "in ctrl_megatron.algorithms (register_adv_est, register_policy_loss)"
)


class UnresolvedReference(UserError, ImportError):
    """An import path that leads to no function: an ImportError caused by what the user wrote."""


def import_callable(path: str, what: str) -> Callable[..., Any]:
    """The callable at ``module:name``, ``module.name`` or ``FILE.py:name``; a name may be dotted.

    ``what`` begins every message, for example ``node 'reward'``. Raises UnresolvedReference for a
    path of another form, for a module, a file or a name that does not exist, and for an object that
    cannot be called. Other exceptions that the module raises while it is imported pass unchanged.
    """
    module, _, names = path.rpartition(":")
    is_file = module.endswith(".py")
    if not module:
        module, _, names = path.rpartition(".")
    if not (module and names):
        raise UnresolvedReference(
            f"{what}: {path!r} is not an import path: neither 'module:Class.method' nor "
            "'module.function' nor 'FILE.py:function'"
        )
    if module.startswith(".") and not is_file:
        raise UnresolvedReference(f"{what}: {path!r} is relative; write the module's full name")
    try:
        found: Any = _module_at(Path(module)) if is_file else importlib.import_module(module)
    except (ImportError, FileNotFoundError) as error:
        line, hint = user_line_of(error), ""
        place = f" ({line})" if line else ""
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "siirl":
            hint = f"; {_SIIRL}"
        raise UnresolvedReference(
            f"{what}: cannot import {path!r}: {error}{place}{hint}"
        ) from error
    try:
        for name in names.split("."):
            found = getattr(found, name)
    except AttributeError as error:
        raise UnresolvedReference(f"{what}: cannot import {path!r}: {error}") from error
    if not callable(found):
        raise UnresolvedReference(f"{what}: {path!r} is not callable")
    return found


def _module_at(file: Path) -> ModuleType:
    """The module of a Python file; a file is executed once per process."""
    file = file.resolve()
    name = f"file_{file.stem}_{crc32(os.fsencode(file)):08x}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
