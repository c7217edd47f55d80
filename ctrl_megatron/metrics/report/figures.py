"""The drawings of reports, as SVG text. No other file imports matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.timeline import Kind, Phase, interval_intersection, interval_union

INK, MUTED, GRID = "#1f2933", "#66727f", "#e6eaee"
BLUE, ORANGE, GREY, GREEN, SHADE = "#2563c9", "#e0701a", "#9aa5b1", "#17734f", "#fde3cf"
CURVE_COLOURS = (BLUE, ORANGE, GREEN, GREY, "#7d4fc4", "#b8344c", "#0f8b9d", "#8a6d3b")
STACK_COLOURS = {
    "zero": GREY,
    "up_to_half": "#c6d8f5",
    "below_one": "#7fa8e8",
    "one": BLUE,
    "elsewhere": ORANGE,
}
KIND_COLOURS: dict[Kind, str] = {"main": BLUE, "host": ORANGE, "wait": GREY}
PLACE_COLOURS = {"trainer": BLUE, "engines": GREEN, "aside": ORANGE}
Points = Sequence[tuple[int, float]]
"""(step, value) pairs in the order of steps."""
Interval = tuple[float, float]
"""(lower end, upper end)."""
_POINTS_WITH_MARKERS, _POINTS_SMOOTHED, _WINDOW, _ENDS_LABELLED = 40, 60, 15, 4
_WIDTH, _HEIGHT, _LETTER = 3.9, 2.3, 0.085
"""Inches of a plot, and of a digit in it."""
_LEGEND_ROW, _LEGEND_ROWS, _LEGEND_LINE = 0.18, 2, 0.45
"""Inches of a row of a legend, rows for which a plot has room, inches of a label's line."""


def curve_svg(
    curves: Mapping[str, Points],
    *,
    percent: bool = False,
    bands: Mapping[str, Sequence[Interval | None]] | None = None,
    x_label: str = "step",
) -> str:
    """A plot of curves by label. Up to four curves have their last value at their end.

    Long curves are pale, under their mean over the last 15 steps. ``bands`` are shaded intervals,
    one for each point of a curve; None for no interval.
    """
    rows = _legend_rows(list(curves))
    figure, axes = _plot_below(rows)
    for (label, points), colour in zip(curves.items(), cycle(CURVE_COLOURS), strict=False):
        steps, values = zip(*points, strict=True)
        known = [
            (step, *band)
            for step, band in zip(steps, (bands or {}).get(label, ()), strict=False)
            if band is not None
        ]
        if known:
            axes.fill_between(*zip(*known, strict=True), color=colour, alpha=0.12, lw=0)
        many = len(steps) > _POINTS_SMOOTHED
        if many:
            axes.plot(steps, values, color=colour, lw=0.9, alpha=0.35)
        marker = "o" if len(steps) <= _POINTS_WITH_MARKERS else ""
        drawn = trailing_mean(values, _WINDOW) if many else values
        axes.plot(steps, drawn, color=colour, lw=1.8, marker=marker, ms=3.5, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set_xlabel(x_label, color=MUTED, fontsize=9)
    at = {step for points in curves.values() for step, _ in points}
    if len(at) == 1:
        axes.set_xlim(min(at) - 1, min(at) + 1)
    shown = [v for points in curves.values() for _, v in points]
    shown += [v for band in (bands or {}).values() for ends in band if ends for v in ends]
    bottom, top = axis_range(shown, percent)
    axes.set_ylim(bottom, top)
    text = partial(_percent, small=top < 0.1) if percent else _plain
    axes.yaxis.set_major_formatter(FuncFormatter(text))
    if len(curves) <= _ENDS_LABELLED:
        _label_ends(
            axes, [points[-1] for points in curves.values()], percent, (top - bottom) * 0.11
        )
    _legend(axes, len(curves), rows)
    axes.grid(axis="y", color=GRID, lw=0.8)
    _margins(figure, axes, legend_rows=rows)
    return _svg(figure)


def interval_svg(
    groups: Mapping[str, Mapping[str, tuple[float, Interval | None]]], *, percent: bool = True
) -> str:
    """A plot with a row for every label, and a point with its interval for each of its named
    values.
    """
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    height = 0.75 + len(groups) * (0.16 + 0.23 * len(names))
    figure, axes = _canvas(3.9, max(1.5, height))
    colour_of = dict(zip(names, cycle(CURVE_COLOURS), strict=False))
    step = 0.7 / max(1, len(names))
    for row, values in enumerate(groups.values()):
        for name, (value, interval) in values.items():
            place = -row + (len(names) - 1) * step / 2 - names.index(name) * step
            colour = colour_of[name]
            if interval is not None:
                axes.plot(interval, (place, place), color=colour, lw=2.4, alpha=0.45)
            axes.plot([value], [place], marker="o", ms=5, lw=0, color=colour)
            axes.annotate(
                format_number(value, percent=percent),
                (value, place),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=colour,
            )
    axes.set_yticks([-row for row in range(len(groups))], list(groups))
    axes.set_ylim(-len(groups) + 0.4, 0.6)
    axes.margins(x=0.12)
    if percent:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.grid(axis="x", color=GRID, lw=0.8)
    if len(names) > 1:
        marks = [Line2D([], [], color=colour_of[n], marker="o", lw=0, ms=5, label=n) for n in names]
        figure.legend(
            handles=marks, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8
        )
    return _svg(figure)


def unit_square_svg(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str
) -> str:
    """A square plot of curves by label whose coordinates are shares, with a dashed diagonal."""
    rows = _legend_rows(list(curves))
    figure, axes = _canvas(_WIDTH, _WIDTH + _LEGEND_ROW * rows, layout=None)
    axes.plot([0, 1], [0, 1], color=GREY, lw=0.9, ls="--")
    for (label, points), colour in zip(curves.items(), cycle(CURVE_COLOURS), strict=False):
        x, y = zip(*points, strict=True)
        marker = "o" if len(x) <= _POINTS_WITH_MARKERS else ""
        axes.plot(x, y, color=colour, lw=1.8, marker=marker, ms=3.5, label=label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5))
        axis.set_major_formatter(FuncFormatter(partial(_percent, small=False)))
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel(x_label, color=MUTED, fontsize=9)
    axes.set_title(y_label, color=MUTED, fontsize=9, loc="left", y=1.0, pad=6 + 14 * rows)
    _legend(axes, len(curves), rows)
    axes.grid(color=GRID, lw=0.8)
    _margins(figure, axes, legend_rows=rows + 1)
    return _svg(figure)


def axis_range(values: Sequence[float], percent: bool) -> tuple[float, float]:
    """(least, largest) value of the axis, with a small margin. The axis of values that are never
    negative begins at 0; the axis of shares ends at 100 % unless all are small. Values that are
    not finite do not count.
    """
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    least, most = min(finite), max(finite)
    if percent and most > 0.3:
        return -0.03, 1.03
    if least >= 0:
        return -0.03 * (most or 1.0), 1.12 * most or 1.0
    margin = 0.12 * (most - least) or 0.12 * abs(least)
    return least - margin, most + margin


def _plain(value: float, _: int) -> str:
    return format_number(value)


def _percent(value: float, _: int, *, small: bool) -> str:
    return f"{value:.1%}" if small else f"{value:.0%}"


def _legend_rows(labels: Sequence[str]) -> int:
    """Rows of a legend: two labels in a row where both fit into a plot's width; 0 for one label."""
    if len(labels) < 2:
        return 0
    label = _LEGEND_LINE + 0.75 * _LETTER * max(map(len, labels))
    return math.ceil(len(labels) / 2) if 2 * label <= _WIDTH else len(labels)


def _plot_below(legend_rows: int) -> tuple[Figure, Any]:
    return _canvas(_WIDTH, _HEIGHT + _LEGEND_ROW * max(0, legend_rows - _LEGEND_ROWS), layout=None)


def _legend(axes: Any, count: int, rows: int) -> None:
    """Add a legend above the plot, where no curve is; none of 0 rows."""
    if not rows:
        return
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    columns = math.ceil(count / rows)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=columns, **place)


def shares_svg(shares: Mapping[str, Points]) -> str:
    """A plot of shares of a whole by label, stacked: the axis goes from 0 to 100 percent. Each
    label has a point in every step."""
    rows = _legend_rows(list(shares))
    figure, axes = _plot_below(rows)
    steps = [step for step, _ in next(iter(shares.values()))]
    heights = [[value for _, value in points] for points in shares.values()]
    if len(steps) == 1:  # an area needs a width
        steps, heights = [steps[0] - 0.5, steps[0] + 0.5], [values * 2 for values in heights]
    colours = [STACK_COLOURS.get(label, GREEN) for label in shares]
    labels = [label.replace("_", " ") for label in shares]
    axes.stackplot(steps, heights, labels=labels, colors=colours, lw=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.set_xlabel("step", color=MUTED, fontsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(partial(_percent, small=False)))
    axes.set_ylim(0, 1)
    axes.margins(x=0)
    _legend(axes, len(shares), rows)
    _margins(figure, axes, legend_rows=rows)
    return _svg(figure)


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values at every place; of fewer values at the beginning."""
    parts = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def gantt_svg(phases: Sequence[Phase]) -> str:
    """A plot of the phases of one step, with a row for every name. Times when host and main work
    ran together are shaded.
    """
    names = list(dict.fromkeys(p.name for p in sorted(phases, key=lambda p: p.start)))
    rows = {name: len(names) - 1 - i for i, name in enumerate(names)}
    figure, axes = _canvas(9.2, 0.75 + 0.3 * len(names))
    host = [p.interval for p in phases if p.kind == "host"]
    for start, end in interval_intersection(host, [p.interval for p in phases if p.kind == "main"]):
        axes.axvspan(start, end, color=SHADE, lw=0, zorder=0)
    last = max(p.end for p in phases)
    for name in names:
        same = [p for p in phases if p.name == name]
        colour = KIND_COLOURS[same[0].kind]
        bars = [(start, end - start) for start, end in interval_union(p.interval for p in same)]
        axes.broken_barh(bars, (rows[name] - 0.36, 0.72), color=colour, lw=0, zorder=2)
        seconds, right = sum(length for _, length in bars), max(p.end for p in same)
        axes.text(
            right + last * 0.006, rows[name], f"{seconds:.2f} s", va="center", fontsize=8, color=INK
        )
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(min(0.0, *(p.start for p in phases)), last * 1.07)
    axes.set_xlabel("seconds since the step began", color=MUTED, fontsize=8)
    axes.grid(axis="x", color=GRID, lw=0.8)
    return _svg(figure)


def graph_svg(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The nodes of a step with arrows from those that each waits for, from left to right.
    ``nodes`` are those of ``graph.picture.describe_nodes``.
    """
    column: dict[str, int] = {}
    for node in nodes:
        column[node["name"]] = 1 + max((column[name] for name in node["after"]), default=-1)
    columns = [
        [n for n in nodes if column[n["name"]] == i] for i in range(1 + max(column.values()))
    ]
    tallest = max(map(len, columns))
    place = {
        node["name"]: (i, (row - (len(same) - 1) / 2))
        for i, same in enumerate(columns)
        for row, node in enumerate(same)
    }
    figure = Figure(figsize=(1.35 * len(columns), 0.4 + 0.62 * tallest), layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    for node in nodes:
        x, y = place[node["name"]]
        axes.text(
            *(x, y, node["name"].replace("_", "\n")),
            **{"ha": "center", "va": "center", "fontsize": 8, "color": INK, "zorder": 3},
            bbox={"boxstyle": "round,pad=0.35", "fc": "white", "ec": PLACE_COLOURS[node["place"]]},
        )
        for name in node["after"]:
            arrow = {"arrowstyle": "->", "color": GREY, "lw": 0.9, "shrinkA": 24, "shrinkB": 24}
            axes.annotate("", xy=(x, y), xytext=place[name], arrowprops=arrow, zorder=1)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    axes.set_ylim(tallest / 2 + 0.1, -tallest / 2 - 0.1)
    return _svg(figure)


def _label_ends(axes: Any, ends: Points, percent: bool, apart: float) -> None:
    """Write the last values beside the ends of the curves, at least ``apart`` apart on the axis."""
    finite = [pair for pair in zip(ends, CURVE_COLOURS, strict=False) if math.isfinite(pair[0][1])]
    lowest = -math.inf
    for (step, value), colour in sorted(finite, key=lambda pair: pair[0][1]):
        lowest = max(value, lowest + apart)
        axes.annotate(
            format_number(value, percent=percent),
            (step, lowest),
            xytext=(5, 0),
            va="center",
            textcoords="offset points",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )


def _margins(figure: Figure, axes: Any, *, legend_rows: int) -> None:
    """Set the margins of a plot by the lengths of its texts. matplotlib would draw everything a
    second time to measure them, and a report has dozens of plots.
    """
    ticks = axes.yaxis.get_major_formatter().format_ticks(axes.get_yticks())
    ends = [text.get_text() for text in axes.texts]
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=(0.1 + _LETTER * max(map(len, ticks))) / width,
        right=1 - (0.2 + _LETTER * max(map(len, ends), default=0)) / width,
        bottom=0.45 / height,
        top=1 - (0.1 + _LEGEND_ROW * legend_rows) / height,
    )


def _canvas(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout=layout)
    axes = figure.subplots()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "report"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
