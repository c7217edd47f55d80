"""The keys of a configuration that are read, recorded by the configuration's own classes."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import ctrl_megatron.config.load as not_a_reader


def record_reads(config: Any) -> set[str]:
    """The dotted keys of ``config`` that are read from now on, in a set that grows with them.

    For processes that end afterwards: the classes keep the hook. What is written to
    ``config.yaml`` or handed to a tracker as a whole has not been read.
    """
    seen: set[str] = set()
    prefixes: dict[int, str] = {}

    def watch(group: Any, prefix: str) -> None:
        prefixes[id(group)] = prefix
        names = {field.name for field in dataclasses.fields(group)}
        for name in names:
            # A class of two groups has the hook already.
            if dataclasses.is_dataclass(value := object.__getattribute__(group, name)):
                watch(value, f"{prefix}{name}.")

        def read(self: Any, name: str) -> Any:
            if name in names and id(self) in prefixes and not _only_written():
                seen.add(prefixes[id(self)] + name)
            return object.__getattribute__(self, name)

        type(group).__getattribute__ = read  # type: ignore[method-assign]

    watch(config, "")
    return seen


def _only_written() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals["__name__"].startswith(
        ("dataclasses", "ctrl_megatron.config.")
    ):
        if frame.f_globals is vars(not_a_reader):
            return True
        frame = frame.f_back
    return False
