"""Effects of a test on surroundings that plain Python would share with the program: attributes of
the library's modules (``sys.stdin``, ``time.sleep``, ``builtins.input``), ``random``'s seed, the
environment, arguments, the recursion limit, warnings and logging.

The judge collects changes and sends them with its next message (``JudgeStateSync``); the program's
side makes them (``ProgramStateSync``) and sends back what was printed, warned and logged.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import random
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from ctrl_megatron.sandbox.jail.originals import Originals

_ERASED = object()
_STREAMS = ("stdout", "stderr")
_WATCHED = (
    *("builtins", "sys", "os", "os.path", "time", "random", "math", "datetime", "io", "json"),
    *("shutil", "glob", "socket", "subprocess", "threading", "uuid", "secrets", "getpass"),
    *("urllib.request", "pathlib", "tempfile", "platform", "string", "re"),
)
_NOT_SENT = frozenset(
    [
        *("sys.modules", "sys.path", "sys.meta_path", "sys.path_hooks"),
        *("sys.path_importer_cache", "sys.excepthook", "sys.last_type", "sys.last_value"),
        *("sys.last_traceback", "sys.stdout", "sys.stderr", "sys.flags", "builtins._"),
        *("sys.dont_write_bytecode",),
    ]
)


class _Watched(types.ModuleType):
    """A module whose changes reach the program."""

    def __setattr__(self, name: str, value: Any) -> None:
        _notice(self, name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        _notice(self, name)
        super().__delattr__(name)


_NOTICED: dict[tuple[str, str], None] = {}
_ORIGINAL: dict[tuple[str, str], Any] = {}


def _notice(module: types.ModuleType, name: str) -> None:
    key = module.__name__, name
    if f"{key[0]}.{name}" not in _NOT_SENT and not name.startswith("__"):
        _ORIGINAL.setdefault(key, vars(module).get(name, _ERASED))
        _NOTICED[key] = None


class _Common:
    """The surroundings of both sides: the environment, the working directory, the state of
    ``random`` once a side has seeded it, arguments and the recursion limit.
    """

    def __init__(self) -> None:
        self._common = self._now()
        self._random: Any = None
        self._seed = random.seed
        random.seed = self._seeded  # type: ignore[assignment]

    def _seeded(self, *arguments: Any, **named: Any) -> None:
        self._seed(*arguments, **named)
        self._random = ()

    @staticmethod
    def _now() -> dict[str, Any]:
        return {
            "environment": dict(getattr(os.environ, "_data", {})),
            "directory": _directory(),
            "arguments": [*sys.argv],
            "recursion": sys.getrecursionlimit(),
        }

    def common(self, encode: Callable[[Any], Any]) -> list[Any]:
        """The changes since the last message."""
        now = self._now()
        if now == self._common and self._random is None:
            return []
        found = [[k, _told(k, v)] for k, v in now.items() if v != self._common[k]]
        self._common = now
        if self._random is not None and (state := random.getstate()) != self._random:
            self._random = state
            found.append(["random", encode(state)])
        return found

    def take(self, kind: str, value: Any, decode: Callable[[Any], Any]) -> bool:
        """Make a change of the other side; False for one of another kind."""
        if kind == "environment":
            os.environ.clear()
            os.environ.update({str(k): str(v) for k, v in value.items()})
        elif kind == "directory":
            with contextlib.suppress(OSError):
                os.chdir(str(value))
        elif kind == "arguments":
            sys.argv[:] = [str(one) for one in value]
        elif kind == "recursion":
            sys.setrecursionlimit(int(value))
        elif kind == "random":
            self._random = decode(value)
            random.setstate(self._random)
        else:
            return False
        if kind in self._common:
            self._common = {**self._common, kind: self._now()[kind]}
        return True


def _told(kind: str, value: Any) -> Any:
    if kind == "environment":
        return {os.fsdecode(name): os.fsdecode(text) for name, text in value.items()}
    return [str(one) for one in value] if kind == "arguments" else value


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


class JudgeStateSync(_Common):
    """The judge's side: it collects what the test has changed, for the program's side to make the
    same changes, and repeats what the program has printed, warned and logged."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: set[str] = set()
        self._heard = [False, False]
        self._streams = [getattr(sys, name) for name in _STREAMS]
        self._log_levels: dict[str, int] = {}
        self.watch()

    def watch(self) -> None:
        """Notice from now on what the test does to the modules that are imported."""
        for name in _WATCHED:
            module = sys.modules.get(name)
            if name in self._watched or type(module) is not types.ModuleType:
                continue
            self._watched.add(name)
            module.__class__ = _Watched

    def forget_sent_changes(self) -> None:
        """A new program knows nothing of what the last one was told."""
        self._common = dict.fromkeys(self._common)
        self._random = None if self._random is None else ()
        self._heard, self._log_levels = [False, False], {}
        for (module, name), before in _ORIGINAL.items():
            if vars(sys.modules[module]).get(name, _ERASED) is not before:
                _NOTICED[module, name] = None

    def collect_changes(self, encode: Callable[[Any], Any]) -> list[Any]:
        """The changes since the last message."""
        found = self.common(encode)
        self.watch()
        while _NOTICED:
            (module, name), _ = _NOTICED.popitem()
            now = vars(sys.modules[module]).get(name, _ERASED)
            if now is _ORIGINAL[module, name]:
                found.append(["restore", module, name])
            elif now is _ERASED:
                found.append(["delete", module, name])
            else:
                found.append(["set", module, name, encode(now)])
        heard = [getattr(sys, n) is not s for n, s in zip(_STREAMS, self._streams, strict=True)]
        if heard != self._heard:
            self._heard = heard
            found.append(["hear", heard])
        if "logging" in sys.modules:
            found += self._logging()
        return found

    def _logging(self) -> list[Any]:
        logging = sys.modules["logging"]
        loggers = {"": logging.root, **logging.root.manager.loggerDict}
        if len(loggers) == 1 and not logging.root.handlers and logging.root.level == 30:
            return []
        levels = {
            name: logger.level
            for name, logger in loggers.items()
            if isinstance(logger, logging.Logger) and (logger.handlers or logger.level)
        }
        unused = levels == {"": 30} and not logging.root.handlers
        if levels == self._log_levels or (unused and not self._log_levels):
            return []
        gone = {name: 30 if not name else 0 for name in self._log_levels.keys() - levels.keys()}
        self._log_levels = levels
        return [["logging", [*{**gone, **levels}.items()]]]

    def apply(self, effects: list[Any], decode: Callable[[Any], Any]) -> None:
        """Repeat what the program printed, warned and logged."""
        for kind, *rest in effects:
            if self.take(kind, rest[0], decode):
                continue
            if kind == "printed" and rest[0] in _STREAMS:
                with contextlib.suppress(ValueError):
                    getattr(sys, rest[0]).write(str(rest[1]))
            elif kind == "warned":
                self._warn(str(rest[0]), decode(rest[1]))
            elif kind == "logged" and "logging" in sys.modules:
                self._log(*rest[:3])

    def _warn(self, text: str, category: Any) -> None:
        if not (isinstance(category, type) and issubclass(category, Warning)):
            category = UserWarning
        warnings.warn(text, category, stacklevel=2)

    def _log(self, name: str, level: int, text: str) -> None:
        logging = sys.modules["logging"]
        logger = logging.getLogger(str(name) if name != "root" else None)
        if logger.isEnabledFor(int(level)):
            logger.handle(
                logger.makeRecord(logger.name, int(level), "solution.py", 0, str(text), (), None)
            )


class ProgramStateSync(_Common):
    """The program's side."""

    def __init__(self, streams: dict[str, Any]) -> None:
        super().__init__()
        self._printed: list[Any] = []
        self._originals = Originals()
        self._streams = {name: streams[name] for name in _STREAMS}
        self._warn = warnings.warn
        self._forwarding = False
        warnings.warn = self._warned  # type: ignore[assignment]

    def collect_changes(self, encode: Callable[[Any], Any]) -> list[Any]:
        """The output, warnings and log records since the last message."""
        for name, stream in self._streams.items():
            if stream.heard is not None:
                _flush(name)
                if stream.heard:
                    text = b"".join(stream.heard).decode(errors="replace")
                    stream.heard.clear()
                    self._printed.append(["printed", name, text])
        found = [
            [kind, *rest[:-1], encode(rest[-1])] if kind == "warned" else [kind, *rest]
            for kind, *rest in self._printed
        ]
        self._printed.clear()
        return [*self.common(encode), *found]

    def apply(self, effects: list[Any], decode: Callable[[Any], Any]) -> None:
        """Make the test's changes."""
        for kind, *rest in effects:
            if self.take(kind, rest[0], decode):
                continue
            if kind == "hear":
                self._hear(rest[0])
            elif kind == "logging":
                self._logging(rest[0])
            else:
                self._set(kind, *rest, decode=decode)

    def _set(self, kind: str, module: str, name: str, value: Any = None, *, decode: Any) -> None:
        found = importlib.import_module(module)
        if kind == "restore":
            self._originals.restore_attribute(found, name)
            return
        self._originals.keep_attribute(found, name)
        if kind == "delete":
            delattr(found, name)
        else:
            setattr(found, name, decode(value))

    def _hear(self, heard: list[bool]) -> None:
        for name, on in zip(_STREAMS, heard, strict=True):
            _flush(name)
            self._streams[name].heard = [] if on else None

    def _warned(
        self, message: Any, category: Any = None, stacklevel: int = 1, **named: Any
    ) -> None:
        if isinstance(message, Warning):
            category = type(message)
        self._printed.append(["warned", str(message), category or UserWarning])
        self._warn(message, category, stacklevel + 1, **named)

    def _logging(self, levels: list[Any]) -> None:
        logging = importlib.import_module("logging")
        for name, level in levels:
            logging.getLogger(name or None).setLevel(level)
        if not self._forwarding:
            self._forwarding = True
            handler = logging.Handler()
            handler.emit = lambda record: self._printed.append(
                ["logged", record.name, record.levelno, record.getMessage()]
            )
            logging.root.addHandler(handler)


class RecordedOutput(io.FileIO):
    """An output stream of the program. ``heard`` collects the bytes that are written, unless it is
    None.
    """

    heard: list[bytes] | None = None

    def write(self, data: Any, /) -> int:
        """Write, and remember what was written."""
        written = super().write(data)
        if self.heard is not None:
            self.heard.append(bytes(data[:written]))
        return written


def _flush(name: str) -> None:
    for stream in {id(s): s for s in (getattr(sys, name), getattr(sys, f"__{name}__"))}.values():
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
