"""The judge process: executes the tests as plain Python. What the program defines is reached
through the connection to the candidate's process (``trust``).

A test passes if it ends without a failure and has executed a check, and if the program's process
neither died nor exceeded its time nor broke the protocol meanwhile, whatever the test's own code
caught.
"""

from __future__ import annotations

import _pickle
import builtins
import contextlib
import dataclasses
import functools
import importlib._bootstrap_external
import itertools
import marshal
import os
import pickle
import random
import re
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import PathFinder
from types import CodeType, ModuleType
from typing import Any, NoReturn

from ctrl_megatron.sandbox.jail import checks, collection, frames, linux, pytest_stand_in
from ctrl_megatron.sandbox.jail.clock import JudgeClock
from ctrl_megatron.sandbox.jail.data import MUTABLE
from ctrl_megatron.sandbox.jail.failures import (
    CandidateCannotAnswer,
    HarnessFailure,
    Skipped,
    TestsRefused,
)
from ctrl_megatron.sandbox.jail.handles import connection_of_handle
from ctrl_megatron.sandbox.jail.program import PYTHON_STACK
from ctrl_megatron.sandbox.jail.surroundings import JudgeStateSync
from ctrl_megatron.sandbox.jail.trust import TEST_MODULES, ProgramConnection, is_handle
from ctrl_megatron.sandbox.limits import CANNOT_JUDGE, NOT_RUN, UNCHECKED

_REASON_LENGTH = 600
_LABEL_LENGTH = 2000
_STARTING_SECONDS = 2.0
"""Allowance for the supervisor's work before the program loads."""
_FILE = "test_solution.py"
PROGRAM = "solution"
"""The module name of the program."""
_RUN_THEIR_OWN_CODE = (
    *("ast", "collections", "dataclasses", "enum", "functools", "unittest.mock"),
    *("importlib._bootstrap", "importlib._bootstrap_external"),
)
"""Modules of Python that run code which they wrote or which belongs to Python."""
UNIT_TESTS = "def test"
"""A text that contains it may hold unit tests."""


def run_tests(
    requests: socket.socket, verdicts: int, spec: dict[str, Any], directory: str
) -> NoReturn:
    """Run the tests of ``spec``. Each request on ``requests`` brings a new candidate, which sees
    the same ``directory``.

    For each test one frame is written to ``verdicts``: this job's nonce, the test's index, its
    status (``passed``, ``failed``, ``unjudgeable``, ``timeout``, ``died``, ``protocol``,
    ``not_run``), the reason if it did not pass, seconds of wall clock, and the text of a unit test.
    A frame with the nonce alone, and exit status 0, mark the end. A time (``time.monotonic``) at
    the end of a frame is the deadline of the next step: an alarm cannot interrupt a loop in C, so
    the supervisor ends a judge that is late, and another judge continues with test ``first``.
    """
    # Equal tests draw equal random numbers. A program that does not know the tests cannot predict
    # them.
    random.seed("\n".join((spec["setup"], *spec["tests"])))
    os.chdir(directory)
    linux.allow_stack(PYTHON_STACK)
    pytest_stand_in.install_pytest_stand_in()
    if any("unittest" in text for text in (spec["setup"], *spec["tests"])):
        checks.count_library_checks()
        # A script may call it at its end; the judge runs the tests.
        sys.modules["unittest"].main = pytest_stand_in.main  # type: ignore[attr-defined]
    _ask_owners()
    _Judge(requests, verdicts, spec, directory).run()
    os._exit(0)


class _Judge:
    def __init__(
        self, requests: socket.socket, verdicts: int, spec: dict[str, Any], directory: str
    ) -> None:
        self._requests = requests
        self._verdicts = verdicts
        self._spec = spec
        self._directory = directory
        self._clock = JudgeClock(spec["seconds"], spec["wall_seconds"], self._send_verdict)
        self._candidate: ProgramConnection | None = None
        self._timeouts: int = spec["timeouts"]
        self._reloading = 0.0
        """Seconds spent on restarts of the program since they last counted as a time-out."""
        self._unusable: tuple[str, str] | None = None
        """Status and reason of every test, if none can be run."""
        self._sent: int = spec["first"]
        """Verdicts that were sent, those of an earlier judge included."""
        self._place = 0
        """Number of the next test, those that do not count included."""
        self._skip_reason = ""
        self._skipped = 0
        """Tests that skipped themselves."""
        self._texts = 0
        """Texts of tests that were begun."""
        self._verdict: list[Any] = []
        """The last verdict, until it is sent."""
        self._namespace: dict[str, Any] = {}
        self._codes: list[CodeType] = []
        """Compiled texts of the tests, which may evaluate the texts that they contain."""
        _keep_programs_code_out(self, directory)
        self._surroundings = JudgeStateSync()

    # --- verdicts ---------------------------------------------------------------------------------

    def run(self) -> None:
        if self._timeouts < self._spec["max_timeouts"]:
            self._unusable = self._prepare()
        for text in self._spec["tests"]:
            self._texts += 1
            for name, test in self._tests_of(text, contextlib.ExitStack()):
                if not self._judge(text, name, test):
                    self._send_verdict()
                    self._report()
                    return
        if self._sent == 0 and self._skip_reason:
            # Nothing but skipped tests: no program can be judged.
            self._verdict = [
                0,
                "unjudgeable",
                f"{CANNOT_JUDGE}: {NOT_RUN}: {self._skip_reason}",
                0.0,
                "",
            ]
        self._send_verdict()
        self._report()

    def _judge(self, text: str, name: str, test: Callable[[], Any] | tuple[str, str]) -> bool:
        """Run a test if it counts and has no verdict yet. Returns whether to go on."""
        place, self._place = self._place, self._place + 1
        left_out = sum(1 for one in self._spec["uncounted"] if one < place)
        if place in self._spec["uncounted"] or place - left_out < self._spec["first"]:
            return True
        started = time.monotonic()
        if self._unusable is None and self._timeouts >= self._spec["max_timeouts"]:
            reason = f"not run: {self._timeouts} tests timed out before"
            self._unusable = "not_run", reason
        if self._unusable:
            status, reason = self._unusable
        else:
            status, reason = test if isinstance(test, tuple) else self._run_test(text, test)
        if status == "skipped":
            self._skipped += 1
            self._report("tests", self._count_with(0))
            self._skip_reason = reason
            return True
        self._timeouts += status == "timeout"
        # A program influences this text, and lone surrogates cannot be encoded.
        reason = reason[:_REASON_LENGTH].encode(errors="backslashreplace").decode()
        # Sent together with the next frame, because a write costs as much as a call of the program.
        self._send_verdict()
        label = name[:_LABEL_LENGTH].encode(errors="backslashreplace").decode()
        self._verdict = [self._sent, status, reason, time.monotonic() - started, label]
        self._sent += 1
        return status == "passed" or self._spec["run_all"]

    def _report(self, *parts: Any) -> None:
        frames.send(self._verdicts, [self._spec["nonce"], *parts])

    def _send_verdict(self, *until: float) -> None:
        """Send the pending verdict, and the deadline of the next step."""
        if self._verdict or until:
            self._report(*self._verdict, *until)
        self._verdict = []

    # --- program and setup ------------------------------------------------------------------------

    def _prepare(self) -> tuple[str, str] | None:
        """Load the program and run the setup. Returns None, or the status and reason that every
        test gets.
        """
        try:
            found = self._connect()
        except CandidateCannotAnswer as lost:
            self._define(None, {})
            reason = f"the program failed to load: {lost.reason}"
            return ("timeout" if lost.status == "timeout" else "failed"), reason
        except HarnessFailure as failure:
            self._define(None, {})
            return failure.status, failure.reason
        self._define(found[0], dict(found[1:]))
        return self._run_setup()

    def _connect(self) -> tuple[Any, ...]:
        if self._candidate is not None:
            self._candidate.close()
            self._surroundings.forget_sent_changes()
        self._send_verdict(time.monotonic() + self._spec["wall_seconds"] + _STARTING_SECONDS)
        self._candidate = candidate = ProgramConnection(self._requests, self._clock)
        candidate.effects = lambda: self._surroundings.collect_changes(candidate.encode)
        candidate.apply_effects = lambda e: self._surroundings.apply(
            [one for one in e if self._is_harmless(one)], candidate.decode
        )
        return candidate.wait_until_loaded()

    def _is_harmless(self, effect: Any) -> bool:
        """Whether a change that the program made to the surroundings is made here too."""
        kind, *rest = effect
        if kind == "directory":
            return os.path.abspath(rest[0]).startswith(self._directory)
        return kind != "recursion"

    def _define(self, program: Any, names: dict[str, Any]) -> None:
        """A new namespace of the tests with the program's ``names``."""
        # Dataclasses look up the module of their annotations.
        module = ModuleType("tests")
        self._namespace = vars(module)
        self._namespace.update(
            __file__=os.path.join(self._directory, _FILE), __path__=[], __package__="tests"
        )
        self._namespace[checks.NAME] = checks.count_check
        self._namespace[checks.BRANCH] = self._branched
        sys.modules["tests"] = sys.modules["__main__"] = module
        for name in self._spec["stubs"]:
            self._namespace[name] = names[name] if name in names else self._missing(name)
        if program is None:
            program = ModuleType(PROGRAM)
        for name in self._spec["stubs"]:
            if name not in names:
                vars(program)[name] = self._namespace[name]
        stubs = self._spec["stubs"]
        vars(program)["__all__"] = [name for name in stubs if name in names]
        for name in (PROGRAM, *self._spec["modules"]):
            _install_module(name, program)

    def _branched(self) -> None:
        if self._candidate is not None and self._candidate.calls:
            checks.count_check()

    def _missing(self, name: str) -> Any:
        """The object that the tests get for a name that the program does not define."""
        reason = f"NameError: name {name!r} is not defined"

        def used(*_: Any, **__: Any) -> NoReturn:
            failure = HarnessFailure("failed", reason)
            if self._candidate is not None:
                self._candidate.failure = self._candidate.failure or failure
            raise failure

        return type(type)(name, (type,), {"__call__": used})(name, (Exception,), {})

    def _run_setup(self) -> tuple[str, str] | None:
        setup = self._spec["setup"]
        if not setup.strip():
            return None
        status, reason = self._guarded(setup, lambda: self._execute(setup, "setup.py"))
        if status != "passed":
            return status, f"the tests' setup failed: {reason}"
        if self._candidate is not None and self._candidate.emptied:
            return "unjudgeable", f"{CANNOT_JUDGE}: the program emptied the setup's data"
        mentioned = set(re.findall(r"[^\W\d]\w*", self._spec["code"]))
        classes = tuple(
            (name, value)
            for name, value in self._namespace.items()
            if isinstance(value, type) and value.__module__ in TEST_MODULES and name in mentioned
        )
        if classes:
            assert self._candidate is not None
            candidate = self._candidate
            candidate.setup_classes = tuple(kind for _, kind in classes)
            status, reason = self._guarded("", lambda: candidate.ask("names", classes))
            return None if status == "passed" else (status, reason)
        return None

    def _execute(self, source: str, name: str, *, main: bool = False) -> None:
        # A text without unit tests is a script.
        self._namespace["__name__"] = "__main__" if main else "tests"
        code = checks.compile_counting_checks(source, name)
        self._codes.append(code)
        exec(code, self._namespace)

    def _reconnect(self) -> tuple[str, str] | None:
        """Restart the program. Returns None, or the status and reason of the test's failure. The
        time counts: a program that loads slowly and dies at every call must not use more time than
        one that hangs.
        """
        started = time.monotonic()
        try:
            found = self._connect()
            self._define(found[0], dict(found[1:]))
            return self._run_setup()
        except HarnessFailure as failure:
            return failure.status, failure.reason
        finally:
            self._reloading += time.monotonic() - started
            if self._reloading >= self._spec["seconds"]:
                self._timeouts, self._reloading = self._timeouts + 1, 0.0

    # --- tests ------------------------------------------------------------------------------------

    def _tests_of(
        self, text: str, ended: contextlib.ExitStack
    ) -> Iterator[tuple[str, Callable[[], Any] | tuple[str, str]]]:
        """Label and code of each test in a text, or the verdict of one that cannot be run."""
        if UNIT_TESTS not in text:
            yield "", lambda: self._execute(text, "test.py", main=True)
            return
        outcome, tests = self._collected(text, ended)
        self._report("tests", self._count_with(max(len(tests), 1)))
        if not tests:
            yield "", outcome
        number = 0
        while number < len(tests):
            test = tests[number]
            number += 1
            # What ends all tests of a text belongs to the last one.
            run = test.run if number < len(tests) else functools.partial(_last, test.run, ended)
            yield f"{test.source}\n# {test.name}", run
            if self._must_reconnect() and number < len(tests) and self._unusable is None:
                # What the text keeps of the old program is of no use to the tests that follow.
                if failure := self._reconnect():
                    tests = [replace(one, run=functools.partial(_raise, *failure)) for one in tests]
                else:
                    again = self._collected(text, ended)[1]
                    tests = again if len(again) == len(tests) else tests

    def _count_with(self, found: int) -> int:
        """The number of tests as far as it is known, those of the current text included."""
        left = len(self._spec["tests"]) - self._texts
        return self._place + found + left - len(self._spec["uncounted"]) - self._skipped

    def _collected(
        self, text: str, ended: contextlib.ExitStack
    ) -> tuple[tuple[str, str], list[collection.UnitTest]]:
        """Execute a text and find its unit tests; the outcome is the verdict if there are none."""
        known, found = set(self._namespace), list[collection.UnitTest]()

        def execute() -> None:
            before = checks.checks_executed()
            self._execute(text, "test.py")
            found.extend(collection.collect_tests(self._namespace, text, known, ended))
            if not found:
                self._require_check(before)

        if self._candidate is None or self._unusable:
            try:
                self._clock.begin_test()
                self._clock.arm_alarm()
                execute()
            except BaseException as error:
                return ("failed", f"{type(error).__name__}: {error}"), found
            finally:
                self._clock.disarm_alarm()
            return ("failed", ""), found
        return self._guarded(text, execute), found

    def _must_reconnect(self) -> bool:
        candidate = self._candidate
        return candidate is None or candidate.lost is not None or candidate.busy > 0

    def _run_test(self, text: str, test: Callable[[], Any]) -> tuple[str, str]:
        if self._must_reconnect() and (failure := self._reconnect()):
            return failure
        candidate = self._candidate
        assert candidate is not None

        def checked_test() -> None:
            before = checks.checks_executed()
            test()
            self._require_check(before)

        status, reason = self._guarded(text, checked_test)
        if status == "passed" and candidate.emptied and self._allows_emptying(text, checked_test):
            candidate.copies = True
            again, _ = self._guarded(text, checked_test)
            candidate.copies = False
            if again != "passed":
                reason = f"{CANNOT_JUDGE}: the test passes only because its data was emptied"
                return "unjudgeable", reason
        return status, reason

    def _allows_emptying(self, text: str, test: Callable[[], None]) -> bool:
        """Whether the test passes for a program that only empties its arguments."""
        candidate = self._candidate
        assert candidate is not None
        found = False
        for returns, later in itertools.product((True, False), (True, False)):
            candidate.stand_in = functools.partial(_emptied, [], returns, later)
            found |= self._guarded(text, test)[0] == "passed"
            candidate.stand_in = None
        return found

    def _require_check(self, before: int) -> None:
        candidate = self._candidate
        if checks.checks_executed() == before and not (candidate and candidate.caught):
            raise _Unchecked

    def _guarded(self, text: str, work: Callable[[], Any]) -> tuple[str, str]:
        """Do ``work``, which may call the candidate, for the time of a test. Returns status and
        reason.
        """
        candidate = self._candidate
        assert candidate is not None
        self._clock.begin_test()
        candidate.begin_test(f"{text}\n{self._spec['setup']}")
        status, reason = "failed", ""
        try:
            self._clock.arm_alarm()
            try:
                work()
            finally:
                self._clock.disarm_alarm()
            status = "passed"
        except AssertionError as error:
            reason = _join("AssertionError", error, candidate.last_call)
        except HarnessFailure as failure:
            status, reason = failure.status, failure.reason
            if candidate.busy and isinstance(failure, CandidateCannotAnswer):
                candidate.lost = candidate.lost or failure
        except _Unchecked:
            reason = UNCHECKED
        except TestsRefused as refused:
            status, reason = "unjudgeable", f"{CANNOT_JUDGE}: {NOT_RUN}: {refused}"
        except BaseException as error:
            if _is_skip(error):
                # Only a test that skips itself before it asks the program anything is none.
                skipped = "failed" if candidate.calls else "skipped"
                status, reason = skipped, f"the test was skipped: {error}"
            else:
                limit = "memory limit exceeded" if isinstance(error, MemoryError) else ""
                reason = _join(type(error).__name__, error, limit or candidate.last_raising_call)
        # These apply even if the test's own code swallowed the exception.
        if candidate.lost is not None:
            return candidate.lost.status, candidate.lost.reason
        if over := self._clock.expired_limit:
            return "timeout", over
        if status == "passed":
            candidate.end_test()
        if candidate.failure is not None:
            status = "unjudgeable" if candidate.unjudgeable else candidate.failure.status
            return status, candidate.failure.reason
        if candidate.busy:
            return "protocol", "a call was left unanswered"
        return status, reason

    # --- code of the program ----------------------------------------------------------------------

    def refuse_code(self, source: Any) -> None:
        """End the test if it is about to run code that the program may have written."""
        candidate = self._candidate
        if candidate is None or not candidate.calls or _contain(self._codes, source):
            return
        if candidate.told_text or os.listdir(self._directory):
            candidate.raise_not_transferable("the test runs code that the program may have written")


class _Unchecked(Exception):
    """A test ended without a check."""


def _emptied(seen: list[Any], returns: bool, later: bool, parts: tuple[Any, ...]) -> Any:
    """Empty the containers among the arguments of a call and of those before it, or with ``later``
    of those before it only. The result is the first, or an empty list.
    """
    *_, arguments, named = parts
    containers = [one for one in (*arguments, *named.values()) if type(one) in MUTABLE]
    for container in [*seen] if later else [*seen, *containers]:
        if hasattr(container, "clear"):
            container.clear()
    seen += containers
    return containers[0] if containers and returns else []


def _last(run: Callable[[], None], ended: contextlib.ExitStack) -> None:
    with ended:
        run()


def _is_skip(error: BaseException) -> bool:
    unittest = sys.modules.get("unittest")
    kinds = (Skipped,) if unittest is None else (Skipped, unittest.SkipTest)
    return isinstance(error, kinds)


def _raise(status: str, reason: str) -> NoReturn:
    raise HarnessFailure(status, reason)


def _contain(codes: list[CodeType], text: Any) -> bool:
    """Whether a text is a constant of one of ``codes``."""
    left: list[Any] = [*codes]
    while left and isinstance(text, (str, bytes)):
        one = left.pop()
        if isinstance(one, CodeType):
            left += one.co_consts
        elif isinstance(one, (tuple, frozenset)):
            left += one
        elif type(one) is type(text) and one == text:
            return True
    return False


def _install_module(name: str, program: Any) -> None:
    """Make ``import name`` return the program's module, also for a dotted name."""
    parents = name.split(".")[:-1]
    for end in range(1, len(parents) + 1):
        path = ".".join(parents[:end])
        if path not in sys.modules:
            package = ModuleType(path)
            package.__path__ = []
            sys.modules[path] = package
    sys.modules[name] = program
    if parents:
        vars(sys.modules[".".join(parents)])[name.rpartition(".")[2]] = program


def _keep_programs_code_out(judge: _Judge, directory: str) -> None:
    """Let the tests neither import files that the program may have written, nor evaluate its texts,
    nor unpickle its bytes: the code would run in this process.
    """
    fixed = [*sys.path]

    class _LibraryFinder(PathFinder):
        @classmethod
        def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
            return PathFinder.find_spec(fullname, fixed if path is None else path, target)

    sys.meta_path[:] = [_LibraryFinder if one is PathFinder else one for one in sys.meta_path]
    loader: Any = importlib._bootstrap_external.FileLoader  # type: ignore[attr-defined]
    read = loader.get_data

    def get_data(self: Any, path: Any) -> Any:
        if os.path.abspath(path).startswith(directory):
            raise ImportError("the judge imports no files of the working directory")
        return read(self, path)

    loader.get_data = get_data
    plain = {name: getattr(builtins, name) for name in ("eval", "exec", "compile")}

    def guarded(name: str) -> Callable[..., Any]:
        def run(source: Any, *arguments: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            module = str(frame.f_globals.get("__name__"))
            if module not in _RUN_THEIR_OWN_CODE and not module.startswith("ctrl_megatron"):
                if not isinstance(source, CodeType):
                    judge.refuse_code(source)
                    if name == "exec":
                        source = checks.compile_counting_checks(source, "<string>")
                        space = arguments[0] if arguments else frame.f_globals
                        space.setdefault(checks.NAME, checks.count_check)
                        space.setdefault(checks.BRANCH, checks.count_check)
                if name != "compile" and not arguments and "globals" not in named:
                    arguments = frame.f_globals, frame.f_locals
            return plain[name](source, *arguments, **named)

        return run

    for name in plain:
        setattr(builtins, name, guarded(name))
    for name in ("load", "loads", "_load", "_loads", "Unpickler", "_Unpickler"):
        setattr(pickle, name, _refusing(judge, getattr(pickle, name)))
        if hasattr(_pickle, name):
            setattr(_pickle, name, _refusing(judge, getattr(_pickle, name)))
    for name in ("load", "loads"):
        setattr(marshal, name, _refusing(judge, getattr(marshal, name)))


def _refusing(judge: _Judge, function: Any) -> Any:
    def read(source: Any, *arguments: Any, **named: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") not in _RUN_THEIR_OWN_CODE:
            judge.refuse_code(source if isinstance(source, bytes) else None)
        return function(source, *arguments, **named)

    return read


def _ask_owners() -> None:
    """Let functions of the library that look into objects ask the program for its own."""
    for name in ("asdict", "astuple", "fields", "is_dataclass", "replace"):
        setattr(dataclasses, name, _asking(name, getattr(dataclasses, name)))

    class Reference(weakref.ref):  # type: ignore[type-arg]
        """A weak reference that the test makes: the program knows whether its object lives."""

        behind: Any = None

        def __init__(self, found: Any, *rest: Any) -> None:
            super().__init__(found, *rest)  # type: ignore[call-arg]
            if is_handle(found) and sys._getframe(1).f_globals.get("__name__") in TEST_MODULES:
                self.behind = connection_of_handle(found).ask("op", "weakref", (found,))

        def __call__(self) -> Any:
            found = super().__call__()
            return self.behind() if found is None and self.behind is not None else found

    weakref.ref = Reference  # type: ignore[misc]


def _asking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(record: Any, *arguments: Any, **named: Any) -> Any:
        if not is_handle(record):
            return function(record, *arguments, **named)
        given = (tuple(named.items()),) if name == "replace" else arguments
        return connection_of_handle(record).ask("op", name, (record, *given))

    return asked


def _join(kind: str, error: BaseException, call: str) -> str:
    try:
        # The last call tells the text of the program's own exceptions.
        text = "" if is_handle(error) else str(error)
    except BaseException:  # the text of a program's object, which may do anything
        text = ""
    return ": ".join(part for part in (kind, text, call) if part)
