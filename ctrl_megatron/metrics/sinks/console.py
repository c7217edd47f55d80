"""One table of metrics per step on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from ctrl_megatron.metrics.display import Display

_FIRST = ("reward", "critique", "pass_rate", "actor")


class ConsoleSink:
    """Prints the metrics of a step, one row per group (the part of the name before the slash)."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print one table."""
        self._display.print(step_table(step, self._display.total_steps, metrics))

    def close(self) -> None:
        """Nothing to let go of; the display belongs to the caller."""


def step_table(step: int, total_steps: int, metrics: Mapping[str, float]) -> Table:
    """The metrics of one step as a table that wraps to any width."""
    groups: dict[str, Text] = {}
    for name, value in metrics.items():
        group, _, rest = name.rpartition("/")
        text = groups.setdefault(group, Text())
        if text:
            text.append("  ")
        # No-break spaces keep a name and its number together when the row wraps.
        text.append(f"{rest}\u00a0", style="dim").append(format_value(value), style="bold")
    title = f"step {step}/{total_steps}" if total_steps else f"step {step}"
    table = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for group in sorted(groups, key=_group_order):
        table.add_row(group, groups[group])
    return table


def format_value(value: float) -> str:
    """Four significant digits, without an exponent where that stays readable."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.3g}"


def _group_order(group: str) -> tuple[int, str]:
    return (_FIRST.index(group), "") if group in _FIRST else (len(_FIRST), group)
