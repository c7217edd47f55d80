"""The terminal during a run: phases, step count, remaining time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_RECENT = 10
_SHOWN_SHARE = 0.02
"""Share of a step below which a phase is not in the step's line."""


class Display:
    """A live bar on a terminal, and plain lines elsewhere. Only rank 0 has one."""

    def __init__(
        self, total_steps: int, *, first_step: int = 0, console: Console | None = None
    ) -> None:
        self.console = console if console is not None else Console(soft_wrap=False)
        self.total_steps = total_steps
        self._done = first_step
        self._active: list[str] = []
        self._began: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._durations: list[float] = []
        self._lock = threading.Lock()
        self._step_start = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[phases]}"),
            TextColumn("[dim]{task.fields[eta]} to go"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task(
            "start", total=total_steps, completed=first_step, phases="", eta="-"
        )

    def start(self) -> Display:
        self._bar.start()
        return self

    def close(self) -> None:
        if not self._bar.disable:  # else it would print an empty line
            self._bar.stop()

    def begin_step(self, step: int) -> None:
        self._step_start, self._done, self._took = time.monotonic(), step - 1, {}
        self._bar.update(self._task, description=f"step {step}")

    def begin_phase(self, name: str) -> None:
        """A phase begins; several may be active at the same time."""
        with self._lock:
            self._active.append(name)
            self._began[name] = time.monotonic()
            beside = [n for n in self._active if n != name]
        if self._bar.disable:
            seconds = time.monotonic() - self._step_start
            aside = f" (beside {', '.join(beside)})" if beside else ""
            step = min(self._done + 1, self.total_steps)
            self.print_line(f"[step {step}/{self.total_steps}] {seconds:7.1f}s {name}{aside}")
        self._show_phases()

    def end_phase(self, name: str) -> None:
        with self._lock:
            self._active.remove(name)
            seconds = time.monotonic() - self._began[name]
            self._took[name] = self._took.get(name, 0.0) + seconds
        self._show_phases()

    def end_step(self, step: int) -> None:
        """Step number ``step`` is complete: one line with its phases, the longest first."""
        self._durations.append(time.monotonic() - self._step_start)
        self._done = step
        eta = format_seconds(eta_seconds(self._durations, self.total_steps - step))
        self._bar.update(self._task, completed=step, eta=eta)
        whole = self._durations[-1]
        with self._lock:
            longest = sorted(self._took.items(), key=lambda phase: -phase[1])
        shown = [f"{name} {took:.1f}s" for name, took in longest if took >= _SHOWN_SHARE * whole]
        phases = f" ({', '.join(shown)})" if shown else ""
        done = f"[step {step}/{self.total_steps}] done in {format_seconds(whole)}{phases}"
        self.print_line(f"{done}, {eta} to go")

    def print_line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show_phases(self) -> None:
        with self._lock:
            text = " + ".join(self._active)
        self._bar.update(self._task, phases=text)


def eta_seconds(durations: Sequence[float], steps_left: int) -> float:
    """Remaining seconds, from the durations of the recent steps."""
    recent = durations[-_RECENT:]
    return sum(recent) / len(recent) * max(0, steps_left)


def format_number(value: float, *, percent: bool = False) -> str:
    """A number with four significant digits, without an exponent if possible, or a percentage."""
    if not math.isfinite(value):
        return str(value)
    if percent:
        return f"{value:.1%}"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


@contextmanager
def count_progress_bar(
    what: str, total: int, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """A live bar with the remaining time, on a terminal; yields a function that sets
    how much of ``total`` is done."""
    console = console if console is not None else Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = (*columns, TimeRemainingColumn())
    with Progress(*shown, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def byte_progress_bar(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A live bar on a terminal for work that is counted in bytes; returns a function of the bytes
    done and the bytes in all."""
    console = console if console is not None else Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
