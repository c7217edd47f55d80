"""The candidate process: loads the program and does what the judge asks. It sees the arguments of
calls, never the expected results.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import frames, linux, program
from ctrl_megatron.sandbox.jail.connection import Connection
from ctrl_megatron.sandbox.jail.surroundings import ProgramStateSync, RecordedOutput
from ctrl_megatron.sandbox.limits import ANSWER_BYTES, CALL_BYTES


def serve_calls(
    fd: int, prelude: str, code: str, entry_points: list[str], classes: list[str]
) -> NoReturn:
    """Load ``prelude`` (the setup's imports) and then ``code``, and serve the judge; never returns.

    Functions of the prelude are not the program's answer: a name of ``entry_points`` that the
    prelude defines is removed before ``code`` is loaded. ``classes`` are the names of classes that
    the tests define and the program uses: it finds an empty class of that name until it is loaded,
    then the tests' own.
    """
    linux.allow_stack(program.PYTHON_STACK)
    outputs = program.mimic_fresh_interpreter(RecordedOutput)
    # Not __main__: what the program does under its main guard is not judged here.
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    side = _ProgramSide(fd, module, entry_points, ProgramStateSync(outputs))
    try:
        for name in classes:
            module.__dict__[name] = type(name, (), {"__module__": "solution"})
        if prelude:
            exec(compile(prelude, "setup.py", "exec", dont_inherit=True), module.__dict__)
            for name in entry_points:
                module.__dict__.pop(name, None)
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        side.failed_to_load(error)
        os._exit(0)
    side.loaded()
    side.serve()


class _ProgramSide(Connection):
    """The program's end of the connection."""

    def __init__(
        self,
        fd: int,
        module: types.ModuleType,
        entry_points: list[str],
        surroundings: ProgramStateSync,
    ) -> None:
        super().__init__(fd, first=1, limit=CALL_BYTES)
        self._module, self._entry_points = module, entry_points
        self._entries: tuple[Any, ...] = ()
        self.effects = lambda: surroundings.collect_changes(self.encode)
        self.apply_effects = lambda effects: surroundings.apply(effects, self.decode)

    def is_entry(self, kind: type) -> bool:
        return any(entry in kind.__mro__ for entry in self._entries)

    def failed_to_load(self, error: BaseException) -> None:
        self._send({"a": 0, **self._error(error)})

    def loaded(self) -> None:
        """Tell the judge the entry points."""
        names = vars(self._module)
        found = [(name, names[name]) for name in self._entry_points if name in names]
        self._entries = tuple(value for _, value in found if isinstance(value, type))
        told = [["tuple", [name, self._encode_entry(value)]] for name, value in found]
        self._send({"a": 0, "value": ["tuple", [self.encode(self._module), *told]]})

    def _encode_entry(self, value: Any) -> Any:
        """An entry point that is Python's own, such as ``abs``, is asked too."""
        encoded = self.encode(value)
        own = type(encoded) is list and encoded[0] in ("name", "type", "error")
        return ["mine", self._own_number(value)] if own else encoded

    def _do_names(self, names: tuple[tuple[str, Any], ...]) -> None:
        """Names of the tests' classes in the program, as in plain Python's one namespace."""
        self._module.__dict__.update(names)

    def _write(self, head: dict[str, Any]) -> None:
        frame = frames.encode_frame(head)
        if len(frame) > ANSWER_BYTES and "a" in head:
            reason = f"the returned value takes more than {ANSWER_BYTES} bytes"
            frame = frames.encode_frame({"a": head["a"], "refused": reason})
        frames.send_encoded(self._fd, frame)

    def named(self, module: str, name: str) -> Any:
        found: Any = builtins if module == "builtins" else importlib.import_module(module)
        for part in filter(None, name.split(".")):
            found = getattr(found, part)
        return found
