"""The judge's end of the connection: what the judge believes of a program's objects, and what the
program may do with the judge's.

One rule: the answer of an *operator* of the program's object to data of the test never decides. It
may return another object; of ``==`` only a no counts, of ``!=`` only a yes. Order, ``in`` and the
predicates of data (``startswith``) count for a class under test: an entry point whose attributes
the test uses as no data has them. What methods, items and attributes return is the program's answer
as much as what its functions return, and the test compares it.
"""

from __future__ import annotations

import os
import reprlib
import socket
import sys
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import data, frames, handles
from ctrl_megatron.sandbox.jail.clock import JudgeClock
from ctrl_megatron.sandbox.jail.connection import (
    ENDINGS,
    OPERATIONS,
    Connection,
    PeerError,
    RequestForbidden,
)
from ctrl_megatron.sandbox.jail.failures import CandidateCannotAnswer, HarnessFailure
from ctrl_megatron.sandbox.limits import (
    ANSWER_BYTES,
    CANNOT_JUDGE,
    DECODING_BYTES,
    DECODING_SECONDS,
    WALL_TIME_OVER,
)

NEW_CANDIDATE = b"N"
TEST_MODULES = ("tests", "__main__")
"""Module names of the tests: of unit tests, and of a script."""
_FRAME_SLACK = 4096
_ORDER = ("lt", "le", "gt", "ge", "contains")
_STRICT_ORDER = ("lt", "gt")
_SIZES = ("abs", "round", "len", "int", "float", "index", "trunc", "floor", "ceil", "hash", "str")
_ASKED = frozenset(
    [
        *("call", "method", "get", "set", "setmember", "del", "op", "generator", "start", "turn"),
        *("cancel",),
    ]
)
"""Kinds of requests that the program may make."""
_DUNDERS = frozenset(
    [
        *("__name__", "__qualname__", "__doc__", "__module__", "__signature__"),
        *("__annotations__", "__wrapped__", "__defaults__", "__kwdefaults__", "__dict__"),
        *("__dataclass_fields__",),
    ]
)
_INSIDE = ("gi_", "cr_", "ag_", "tb_", "f_", "co_")
"""Beginnings of public names that lead from generators and the like into the test itself."""
_MOCK_SETTINGS = frozenset(["configure_mock", "mock_add_spec", "attach_mock", "reset_mock"])
_NAMES_OF_DATA = tuple(
    frozenset(dir(kind))
    for kind in (str, bytes, int, float, complex, list, tuple, dict, set, Decimal, Fraction)
)
"""The attributes of each type of data; a class that has others is used as none of them."""
_NO_TEXT = (int, float, bool, type(None))
_LIBRARY = (types.FunctionType, types.BuiltinFunctionType, type)


class LoopEndingProgramException(Exception):
    """An exception of the program that would silently end a loop of a test, which does not name
    it.
    """


class ProgramConnection(Connection):
    """The connection to the current candidate. ``lost`` is the reason why it ended, None while it
    works; ``failure`` the first failure of the current test that the test cannot take back.
    """

    def __init__(self, requests: socket.socket, clock: JudgeClock) -> None:
        self._clock = clock
        requests.sendall(NEW_CANDIDATE)
        pid, (fd,), _, _ = socket.recv_fds(requests, 64, 1)
        clock.program = int(pid)
        super().__init__(fd, first=2, limit=ANSWER_BYTES + _FRAME_SLACK)
        self.lost: CandidateCannotAnswer | None = None
        self.failure: HarnessFailure | None = None
        self.unjudgeable = False
        """Whether ``failure`` says that the judge cannot judge, not that the program failed."""
        self.busy = 0
        """Questions that were sent and not answered: after an interruption the connection is
        unusable."""
        self.calls = 0
        """Questions to the program in the current test."""
        self.kept_back = ""
        """A check that failed in a function of the test that the program called."""
        self.caught = 0
        """Exceptions of the program that the current test met."""
        self.emptied = False
        """Whether the program emptied a container of the current test."""
        self.stand_in: Callable[[tuple[Any, ...]], Any] | None = None
        """The function that answers calls in place of the program."""
        self.copies = False
        """Whether changes of the program to the test's containers are kept from the test."""
        self.text = ""
        """The text of the current test."""
        self.setup_classes: tuple[type, ...] = ()
        """Classes of the setup that the program may make objects of."""
        self.told_text = False
        """Whether the program may have told the current test a text."""
        self._serving = 0
        """Questions of the program that are being answered."""
        self._given: set[int] = set()
        """Classes that the test itself passed, which the program may decorate."""
        self._doubtful: dict[int, Any] = {}
        """Objects that the program's operators returned for data of the test, by ``id``."""
        self._used: set[Any] = set()
        self._asked: dict[Any, set[str]] = {}
        """Attributes of each entry class that the test used."""
        self._pending: list[tuple[Any, str]] = []
        self._last: tuple[Any, ...] = ()
        self._result: tuple[str, Any] = ("", None)
        self._own_error = False
        self._names: dict[int, str] = {}
        """Entry points by ``id``; ``_kept`` holds them."""
        self._kept: tuple[Any, ...] = ()

    # --- a test -----------------------------------------------------------------------------------

    def begin_test(self, text: str) -> None:
        self.failure, self.unjudgeable, self.calls, self.caught = None, False, 0, 0
        self.emptied, self.text, self.told_text, self.kept_back = False, text, False, ""
        self._used.clear()
        self._asked.clear()
        self._doubtful.clear()
        self._pending.clear()
        self._last = ()

    def end_test(self) -> None:
        """Settle what is known only at the end of a test that did not fail."""
        if self.kept_back:
            self._cannot_judge(f"the program kept back a failed check: {self.kept_back}")
        for kind, reason in self._pending:
            asked = self._asked.get(kind, set())
            if kind not in self._used and any(asked <= names for names in _NAMES_OF_DATA):
                self._cannot_judge(reason)
                return

    @property
    def last_raising_call(self) -> str:
        """The last call and its exception, if that is of the program's own class."""
        kind, _ = self._result
        return self.last_call if kind == "raised" and self._own_error else ""

    @property
    def last_call(self) -> str:
        """The last call of the test and its result, as text; empty if there was none."""
        if not self._last:
            return ""
        what, (kind, value) = _told(self._last), self._result
        if not kind:
            return what
        return f"{what} {kind} {value if kind == 'raised' else shorten_repr(value)}"

    def wait_until_loaded(self) -> tuple[tuple[str, Any], ...]:
        """Wait until the program is loaded. Returns its entry points. Raises
        ``CandidateCannotAnswer``, or ``HarnessFailure`` if it failed.
        """
        self._clock.begin_test()
        self._clock.arm_alarm()
        try:
            frame = self._wait(0)
        finally:
            self._clock.disarm_alarm()
        if "error" in frame:
            raise HarnessFailure(
                "failed", f"the program failed to load: {describe_exception(frame)}"
            )
        found: Any = frame.get("value")
        if not _is_start(found):
            self._lose("protocol", "the program broke the protocol: it told no names")
        self._names = {id(value): name for name, value in found[1:]}
        for _, value in found[1:]:
            if isinstance(value, handles.RemoteMetaclass):
                type.__setattr__(value, "_ctrl_entry", True)
        self._kept = found
        return found

    def close(self) -> None:
        os.close(self._fd)

    # --- asking -----------------------------------------------------------------------------------

    def ask(self, do: str, *parts: Any) -> Any:
        """Ask the program. Raises ``HarnessFailure`` where its answer cannot be used."""
        if self.lost is not None:
            raise self.lost
        if self.stand_in is not None and do in ("call", "method"):
            return self.stand_in(parts)
        if do in ("get", "set", "method"):
            self._attribute_used(parts[0], parts[1])
        if do == "op" and parts[0] in _SIZES and id(parts[1][0]) in self._doubtful:
            handle = parts[1][0]
            self._decides(handle, f"{parts[0]} of what an operator of {_name(handle)} returned")
        if do == "op" and parts[0] == "getitem" and hasattr(type(parts[1][0]), "__next__"):
            self.raise_not_transferable(
                f"an iterator of the program ({_name(parts[1][0])}) has items by number"
            )
        called = do in ("call", "method")
        if called:
            self._last, self._result = self._named(do, parts), ("", None)
        self.calls += 1
        self.busy += 1
        frame = self._ask(do, parts)
        self.busy -= 1
        if "error" in frame:
            error = frame["error"]
            self._own_error = is_handle(error)
            if called:
                self._last, self._result = (
                    self._named(do, parts),
                    ("raised", describe_exception(frame)),
                )
            raise self._met(error, do, parts)
        if "value" not in frame:
            self.raise_not_transferable(str(frame.get("refused", "no answer"))[:500])
        value = frame["value"]
        self.told_text |= type(value) not in _NO_TEXT
        if called:
            self._last, self._result = self._named(do, parts), ("returned", _shown(value))
        return value

    def _ask(self, do: str, parts: tuple[Any, ...]) -> dict[str, Any]:
        try:
            return super()._ask(do, parts)
        except (data.DataError, RequestForbidden, RecursionError) as error:
            self.busy -= 1
            self._cannot_judge(f"a value cannot be passed to the program: {error}")
            raise self.failure from error  # type: ignore[misc]

    def _wait(self, number: int) -> dict[str, Any]:
        try:
            return super()._wait(number)
        except PeerError as error:
            self._lose("protocol", f"the program broke the protocol: {error}")

    def _named(self, do: str, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Name and arguments of a call, without handles."""
        if do == "method":
            handle, name, arguments, _ = parts
            return f"{_shown(handle)}.{name}", tuple(map(_shown, arguments))
        target, arguments, _ = parts
        name = self._names.get(id(target), "")
        if not name and isinstance(target, (type, handles.RemoteFunction)):
            name = target.__name__
        return name or str(_shown(target)), tuple(map(_shown, arguments))

    def _met(self, error: BaseException, do: str, parts: tuple[Any, ...]) -> BaseException:
        self.caught += 1
        iterates = do in ("generator", "turn") or (do == "op" and parts[0] in ("next", "anext"))
        if isinstance(error, ENDINGS) and not iterates and type(error).__name__ not in self.text:
            return LoopEndingProgramException(*error.args)  # the other would end a loop of the test
        return error

    def raise_not_transferable(self, reason: str) -> NoReturn:
        """End the test as one that cannot be judged. The candidate remains usable."""
        self._cannot_judge(reason)
        assert self.failure is not None
        raise self.failure

    def _cannot_judge(self, reason: str) -> None:
        if self.failure is None:
            self.failure = HarnessFailure("failed", f"{CANNOT_JUDGE}: {reason}")
            self.unjudgeable = True

    # --- trust ------------------------------------------------------------------------------------

    def apply_operator(self, name: str, left: Any, right: Any) -> Any:
        """The result of an operator with a handle, as far as it may decide."""
        both = is_handle(left) and is_handle(right)
        comparison = name in handles.COMPARISONS
        if comparison and (_is_mutable_data(left) or _is_mutable_data(right)):
            return OPERATIONS[name](*map(self._as_data, (left, right)))
        value = self.ask("op", name, (left, right))
        handle = left if is_handle(left) else right
        if is_handle(value) and not isinstance(value, data.IMMUTABLE):
            if not both:
                # What it says of itself says something about the test's data.
                self._doubtful[id(value)] = value
            return value
        if comparison or name == "contains":
            if type(value) is not bool:
                self.raise_not_transferable(
                    f"{_sign(name)} of the program's {_name(handle)} is no truth value"
                )
            return self._comparison(name, left, right, handle, value, both)
        if not both:
            self.raise_not_transferable(
                f"{_sign(name)} of the program's {_name(handle)} with the test's data returns data"
            )
        return value

    def truth_value(self, handle: Any) -> bool:
        """Whether a handle is true; the truth of what an operator made of data may not count."""
        if id(handle) in self._doubtful:
            self._decides(handle, f"the truth of what an operator of {_name(handle)} returned")
        return super().truth_value(handle)

    def is_instance(self, instance: Any, kind: Any) -> bool:
        """Only the class under test may say so, and not of data."""
        if type(instance) in (*data.MUTABLE, *data.IMMUTABLE, type(None)):
            return False
        if not vars(kind).get("_ctrl_entry"):
            self.raise_not_transferable(
                f"the program's class {kind.__name__} says what its instances are"
            )
        return super().is_instance(instance, kind)

    def _comparison(
        self, name: str, left: Any, right: Any, handle: Any, value: bool, both: bool
    ) -> bool:
        if both and name == "eq" and value and self.ask("op", "ne", (left, right)):
            self.raise_not_transferable(
                f"two objects of the program's {_name(handle)} are equal and unequal"
            )
        elif both and name in _STRICT_ORDER and value and self.ask("op", name, (right, left)):
            self.raise_not_transferable(
                f"each of two objects of the program's {_name(handle)} is before the other"
            )
        elif both:
            return value
        elif (name == "eq" and value) or (name == "ne" and not value):
            self.raise_not_transferable(
                f"the program's {_name(handle)} says that it equals the test's data"
            )
        elif name in _ORDER:
            container = left if name == "contains" else handle
            self._decides(container, f"{_sign(name)} of the program's {_name(container)} decides")
        return value

    def _decides(self, handle: Any, reason: str) -> None:
        """An answer counts if the test uses the object's class as a class, now or later."""
        entries = _entries(handle)
        if not entries:
            self.raise_not_transferable(reason)
        self._pending.append((entries[0], reason))

    def _attribute_used(self, handle: Any, name: str) -> None:
        module = type(handle) is handles.RemoteModule
        if not is_handle(handle) and not module:
            return
        if name in data.DATA_PREDICATES:
            self._decides(handle, f"{name} of the program's {_name(handle)} decides")
        if not name.startswith("__"):
            for one in _entries(handle):
                self._asked.setdefault(one, set()).add(name)

    def note_class_use(self, kind: Any) -> None:
        """Remember that the test used a class of the program as only a class can be used."""
        self._used.update(_entries(kind))

    def exit_context_manager(self, name: str, manager: Any, error: Any) -> Any:
        """As in ``Connection``, but the program's context manager cannot suppress a failed check:
        for an AssertionError or a HarnessFailure the result is False."""
        left = self.ask("op", name, (manager, error))
        return left if not isinstance(error, (AssertionError, HarnessFailure)) else False

    def _as_data(self, value: Any) -> Any:
        return self.ask("data", value) if _is_mutable_data(value) else value

    # --- being asked ------------------------------------------------------------------------------

    def require_permitted(self, do: str, parts: list[Any]) -> None:
        """The program may call what it was given, read its public attributes and set those that are
        no methods.
        """
        self.told_text = True
        if do not in _ASKED:
            raise RequestForbidden(f"the judge does not do that: {do[:40]}")
        if do == "op":
            if not any(id(one) in self._own_numbers for one in parts[1]):
                raise RequestForbidden("an operation on nothing of the judge")
            maker = type(parts[1][0]).__module__ if parts[1] else ""
            if parts[0].startswith("descriptor") and maker not in (*TEST_MODULES, "unittest.mock"):
                raise RequestForbidden("not a descriptor of the test")
        elif id(parts[0]) not in self._own_numbers:
            raise RequestForbidden("the judge does that only with what it passed")
        target = parts[1] if do == "op" else parts[0]
        if do == "setmember":
            if id(target) not in self._given:
                raise RequestForbidden("attributes of the test's class cannot be changed")
        elif do in ("get", "set", "method", "del"):
            _permit_name(target, parts[1], do)
        elif do == "call" and isinstance(target, type):
            if target.__module__ not in (*TEST_MODULES, "builtins"):
                raise RequestForbidden(f"{target.__name__} may not be made")
        elif do == "generator" and parts[1] not in ("send", "throw", "close"):
            raise RequestForbidden("no such action of a generator")

    def bound_method(self, target: Any, name: str) -> Any:
        """The method of a judge's object that the program passes."""
        if id(target) not in self._own_numbers:
            raise RequestForbidden("a method of nothing that the judge passed")
        _permit_name(target, name, "get")
        return getattr(target, name)

    def call_failed(self, error: BaseException) -> None:
        """A failed check in a function of the test: the program may catch it and hide it."""
        if isinstance(error, HarnessFailure):
            raise error
        if isinstance(error, AssertionError):
            self.kept_back = f"AssertionError: {error}"

    def library_name(self, value: Any) -> tuple[str, str] | None:
        """The program has the library's functions and classes itself."""
        known = super().library_name(value)
        if known is not None or not isinstance(value, _LIBRARY):
            return known
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if type(module) is not str or module.partition(".")[0] not in sys.stdlib_module_names:
            return None
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        return (module, name) if found is value else None

    def _encode_other(self, value: Any) -> Any:
        loaded = sys.modules.get("asyncio")
        if loaded is not None and isinstance(value, loaded.Future):
            raise RequestForbidden("a task of asyncio belongs to the event loop of its process")
        encoded = super()._encode_other(value)
        own = isinstance(value, type) and encoded[0] == "mine" and not self._serving
        if own and value not in self.setup_classes:
            self._given.add(id(value))
        return encoded

    def _answer(self, frame: dict[str, Any]) -> None:
        self._serving += 1
        try:
            super()._answer(frame)
        finally:
            self._serving -= 1

    def _do(self, do: str, parts: list[Any], named: dict[str, Any]) -> Any:
        value = super()._do(do, parts, named)
        # The program gets a copy of what leads into the test's objects.
        return dict(value) if do == "get" and parts[1] == "__dict__" else value

    # --- messages ---------------------------------------------------------------------------------

    def changed_container(self, number: int) -> Any:
        """A test's container that the program changed."""
        container = self._shared[number]
        if number % 2 == 0 and self.copies:
            self._forget_container(number)
            container = type(container)()
            self._share(number, container)
        return container

    def _take_contents(self, contents: list[Any]) -> None:
        before = {
            n: _size(self._shared[n]) for n, _ in contents if n in self._shared and n % 2 == 0
        }
        super()._take_contents(contents)
        self.emptied |= any(size and not _size(self._shared[n]) for n, size in before.items())
        for number, _ in contents:
            container = self._shared[number]
            if type(container) is SimpleNamespace and data.DATA_PREDICATES & vars(container).keys():
                raise data.DataError("a namespace with a method of data")

    def _open(self, frame: dict[str, Any]) -> None:
        def read() -> None:
            try:
                super(ProgramConnection, self)._open(frame)
            except (HarnessFailure, PeerError, MemoryError):
                raise
            except Exception as error:  # whatever a forged message makes of Python
                raise PeerError(f"a malformed message: {error}") from error

        self._decode(read)

    def _decode(self, read: Callable[[], Any]) -> Any:
        """The result of ``read``, which decodes the last message. Decoding has a time limit of its
        own, because a program can return a value that is slow to build, for example a set of equal
        hashes.
        """
        timed = self._frames.size > DECODING_BYTES
        if timed:
            self._clock.arm_alarm_for_reading(DECODING_SECONDS)
        try:
            value = read()
        except PeerError as error:
            self._lose("protocol", f"the program broke the protocol: {error}")
        except MemoryError:
            self._lose("protocol", "the returned value takes too much memory")
        except CandidateCannotAnswer as lost:
            if lost.status != "timeout" or not timed:
                raise
            self._lose("timeout", "the returned value takes too long to read")
        if timed:
            self._clock.arm_alarm()
        return value

    def _write(self, head: dict[str, Any]) -> None:
        try:
            super()._write(head)
        except frames.PeerGone:
            self._lose("died", "the program ended")

    def _receive(self) -> dict[str, Any]:
        try:
            frame = self._frames.receive(self._clock.deadline)
        except frames.PeerGone:
            self._lose("died", "the program ended before it answered")
        except frames.DeadlinePassed:
            self._lose("timeout", self._clock.expired_limit or WALL_TIME_OVER)
        except (frames.FrameError, MemoryError) as error:
            self._lose("protocol", f"the program broke the protocol: {error}")
        if type(frame) is not dict:
            self._lose("protocol", "the program broke the protocol")
        return frame

    def _lose(self, status: str, reason: str) -> NoReturn:
        self.lost = self.lost or CandidateCannotAnswer(status, reason)
        raise self.lost


def _is_start(found: Any) -> bool:
    """Whether a value is what a program tells when it is loaded: its module and names."""
    if type(found) is not tuple or not found or type(found[0]) is not handles.RemoteModule:
        return False
    for one in found[1:]:
        if type(one) is not tuple or len(one) != 2 or type(one[0]) is not str:
            return False
        if isinstance(one[1], type) and not isinstance(one[1], handles.RemoteMetaclass):
            return False
    return True


def _size(container: Any) -> int:
    return len(vars(container) if type(container) is SimpleNamespace else container)


def is_handle(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, handles.RemoteMetaclass) or issubclass(kind, handles.RemoteObject)


def _entries(handle: Any) -> list[Any]:
    """The entry points among the classes of a handle, or a class and its bases."""
    kind = handle if isinstance(handle, type) else type(handle)
    return [one for one in kind.__mro__ if vars(one).get("_ctrl_entry")]


def _is_mutable_data(value: Any) -> bool:
    return is_handle(value) and getattr(type(value), "_ctrl_mutable", None) is not None


def _permit_name(target: Any, name: Any, do: str) -> None:
    if type(name) is not str or (name.startswith("_") and name not in _DUNDERS):
        # Python's own code asks for such names, and takes their absence for an answer.
        raise AttributeError(f"{str(name)[:40]!r} is not a public name")
    inside = name == "__dict__" and isinstance(target, type)
    if name.startswith(_INSIDE) or name in _MOCK_SETTINGS or inside:
        raise RequestForbidden(f"{name[:40]!r} may not be used")
    if do not in ("set", "del"):
        return
    if isinstance(target, (type, types.ModuleType, *_LIBRARY)):
        raise RequestForbidden("attributes of the test's classes and functions cannot be changed")
    mock = sys.modules.get("unittest.mock")
    if mock is not None and isinstance(target, mock.NonCallableMock) and name.startswith("assert"):
        raise RequestForbidden("a check cannot be replaced")
    if callable(getattr(type(target), name, None)):
        raise RequestForbidden("a method of the test's object cannot be replaced")


def describe_exception(frame: dict[str, Any]) -> str:
    """The exception of an answer as text, with type and line."""
    kind, text, line = (frame.get(key) for key in ("type", "text", "line"))
    # Only text is used: a nested value from the program may be too deep to print.
    if not isinstance(kind, str) or not isinstance(text, str):
        return "an error without a description"
    return f"{kind}: {text}{f' (line {line})' if isinstance(line, int) else ''}"[:500]


def _sign(name: str) -> str:
    return f"__{name}__"


def _name(handle: Any) -> str:
    return handle.__name__ if isinstance(handle, type) else type(handle).__name__


class _Shortener(reprlib.Repr):
    """Shows handles by their type, without a question to the program."""

    def repr1(self, x: Any, level: int) -> str:
        if is_handle(x) or type(x) is handles.BoundMethod:
            return f"<{_name(x)} object>"
        return super().repr1(x, level)


_SHORTENER = _Shortener()


def shorten_repr(value: Any) -> str:
    try:
        return _SHORTENER.repr(value)
    except BaseException:  # a program's object in it, which may do anything
        return "<a value that cannot be shown>"


class _Shown(str):
    """The text in place of a handle, so that the object is not kept."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(value: Any) -> Any:
    return _Shown(f"<{_name(value)} object>") if is_handle(value) else value


def _told(call: tuple[Any, ...]) -> str:
    name, arguments = call
    return f"{name}({', '.join(map(shorten_repr, arguments))})"
