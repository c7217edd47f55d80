"""The pages about runs: the values that their templates show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctrl_megatron.config import parse_yaml
from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.report.charts import (
    build_charts,
    chart_title,
    headline_metrics,
    shows_percent,
)
from ctrl_megatron.metrics.report.document import (
    Drawing,
    Example,
    PagePart,
    Table,
    changed_lines,
    format_utc,
    outcome_class,
    render_template,
)
from ctrl_megatron.metrics.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SHADE,
    curve_svg,
    gantt_svg,
    graph_svg,
    shares_svg,
)
from ctrl_megatron.metrics.report.run_files import RunFiles, Series, Timelines
from ctrl_megatron.metrics.timeline import overlapped_host_seconds

_OUTCOMES = ("passed_after", "passed_before", "reward")
"""Fields of an example that are pass rates or rewards; the first one colours the example."""
_EXAMPLES, _CHIP_LENGTH, _NAMED = 6, 40, 5
_TIMELINE_COLOURS = (
    (BLUE, "main thread"),
    (ORANGE, "host, in the background"),
    (GREY, "main thread waits"),
    (SHADE, "host and main work at the same time"),
)
_GRAPH_COLOURS = (
    (BLUE, "trainer"),
    (GREEN, "engines draw, and the ranks share"),
    (ORANGE, "beside the trainer, on the host"),
)


def render_report(run: RunFiles) -> str:
    series = run.series or {}
    return render_template(
        "run.html.jinja",
        title=run.name,
        facts=run_facts(run),
        left_out=run.left_out,
        tiles=_tiles(series) if series else [],
        warnings=_warnings(run.warnings or []),
        stages=_stages(run.summary or []),
        drawings=_drawings(series),
        metrics=_metrics(series),
        timeline=_timeline(run.timelines) if run.timelines else None,
        timeline_colours=_TIMELINE_COLOURS,
        graph=graph_svg(run.graph) if run.graph else None,
        graph_colours=_GRAPH_COLOURS,
        examples=_examples(run.examples or []),
        config=run.config,
    )


def render_comparison(runs: Sequence[RunFiles]) -> str:
    """The page that compares up to four runs: their tables, and a drawing of every metric that two
    of them recorded, with a curve for each.
    """
    series = {run.name: run.series or {} for run in runs}
    counts = []
    for run in runs:
        for name in dict.fromkeys(record["warning"] for record in run.warnings or ()):
            steps = {r["step"] for r in run.warnings or () if r["warning"] == name}
            counts.append([run.name, _words(name), str(len(steps))])
    return render_template(
        "comparison.html.jinja",
        title=" and ".join(run.name for run in runs),
        runs={run.name: run_facts(run) for run in runs},
        left_out=[f"{run.name}: {text}" for run in runs for text in run.left_out],
        not_compared=_not_compared(series),
        stages=_stages([{"run": run.name, **row} for run in runs for row in run.summary or ()]),
        warnings=counts,
        drawings=_compared(series),
    )


def _compared(series: Mapping[str, Series]) -> list[Drawing]:
    drawings = []
    for name in dict.fromkeys(name for one in series.values() for name in one):
        curves = {run: one[name] for run, one in series.items() if name in one}
        if len(curves) > 1 and not name.startswith("time/"):
            percent = all(shows_percent(name, series[run]) for run in curves)
            svg = curve_svg(curves, percent=percent)
            drawings.append(
                Drawing(title=chart_title(name), note=name, svg=svg, alt=f"{name} by step")
            )
    return drawings


def _not_compared(series: Mapping[str, Series]) -> list[str]:
    alone: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for one in series.values() for name in one):
        having = [run for run, one in series.items() if name in one]
        if len(having) == 1:
            alone.setdefault(having[0], []).append(name)
    found = [
        f"metrics that only {run} recorded ({', '.join(names[:_NAMED])}"
        f"{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''})"
        for run, names in alone.items()
    ]
    return [
        *found,
        "times of nodes, steps in time, examples and configurations, which each run's "
        "own report has",
    ]


def run_facts(run: RunFiles) -> dict[str, str]:
    tree = parse_yaml(run.config, "config.yaml")[0] if run.config else None
    tuned = any(name.startswith("sft/") for name in run.series or ())
    of = "sft" if tuned else "data"
    return {
        "data": _value(tree, f"{of}.train_files"),
        "validated on": _value(tree, f"{of}.val_files"),
        "model": _value(tree, "actor_rollout_ref.model.path"),
        "proxy": _value(tree, "actor_rollout_ref.proxy.model.path")
        or _value(tree, "actor_rollout_ref.proxy.api.model"),
        "written": "" if run.written is None else format_utc(run.written),
    }


def _value(tree: Any, key: str) -> str:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return ", ".join(map(str, tree)) if isinstance(tree, list) else str(tree or "")


def _tiles(series: Series) -> list[tuple[str, str, str]]:
    """(label, value, note) of every tile."""
    # A validation alone (before the first step, or at the step of a resume) is no training step.
    trained = {name: points for name, points in series.items() if not name.startswith("val/")}
    steps = {step for points in (trained or series).values() for step, _ in points}
    shown = [("Steps", f"{len(steps)}", f"last is {max(steps)}")]
    for name in headline_metrics(series):
        first, last = (
            format_number(series[name][i][1], percent=shows_percent(name, series)) for i in (0, -1)
        )
        shown.append((chart_title(name), last, f"first step {first}"))
    return shown


def _warnings(warnings: list[dict[str, Any]]) -> list[list[str]]:
    """A row for every kind of warning: its number of steps, the last of them, and its text
    there.
    """
    last = {record["warning"]: record for record in warnings}
    steps = {name: {r["step"] for r in warnings if r["warning"] == name} for name in last}
    return [[_words(n), str(len(steps[n])), str(r["step"]), r["text"]] for n, r in last.items()]


def _stages(summary: list[dict[str, Any]]) -> Table | None:
    if not summary:
        return None
    columns = list(dict.fromkeys(key for row in summary for key in row))
    note = "Every judged row counts the same; rounds counts these rows."
    return Table(
        title="Stages",
        note=note if "rounds" in columns else "",
        head=[_words(column) for column in columns],
        rows=[[_cell(column, row.get(column)) for column in columns] for row in summary],
    )


def _cell(column: str, value: object) -> str:
    if isinstance(value, float) and column.endswith("_rate"):
        return format_number(value, percent=True)
    return _value_text(value)


def _drawings(series: Series) -> list[Drawing]:
    drawings = []
    for chart in build_charts(series):
        curves = {name.partition("/")[2] or name: series[name] for name in chart.metrics}
        svg = shares_svg(curves) if chart.stacked else curve_svg(curves, percent=chart.percent)
        drawings.append(
            Drawing(title=chart.title, note=chart.note, svg=svg, alt=f"{chart.title} by step")
        )
    return drawings


def _metrics(series: Series) -> list[list[str]]:
    rows = []
    for name, points in sorted(series.items()):
        values = [value for _, value in points]
        numbers = (values[0], values[-1], min(values), max(values))
        rows.append([name, *map(format_number, numbers)])
    return rows


def _timeline(timelines: Timelines) -> Drawing:
    step, rank = _telling_step(timelines)
    phases = timelines[step, rank]
    host = [p for p in phases if p.kind == "host"]
    hidden = overlapped_host_seconds(phases)
    partners = [p.name for p in phases if p.kind == "main" and overlapped_host_seconds([p, *host])]
    names = ", ".join(dict.fromkeys(p.name for p in host))
    total = sum(p.end - p.start for p in host)
    note = "No host phase was recorded in this step."
    if host:
        note = f"{names} took {total:.2f} s, of which {hidden:.2f} s ran beside "
        note += f"{', '.join(dict.fromkeys(partners)) or 'nothing'}."
    return Drawing(
        title=f"Step {step}, rank {rank}",
        note=note,
        svg=gantt_svg(phases),
        alt="Phases of one step",
    )


def _telling_step(timelines: Timelines) -> tuple[int, int]:
    """(step, rank) of the newest step with host work, on the rank that hid most of it."""
    with_host = [at for at, phases in timelines.items() if any(p.kind == "host" for p in phases)]
    newest = max(step for step, _ in with_host or timelines)
    places = [at for at in with_host or timelines if at[0] == newest]
    return max(places, key=lambda at: (overlapped_host_seconds(timelines[at]), -at[1]))


def _examples(examples: list[dict[str, Any]]) -> list[Example]:
    """The newest examples; examples of one step keep the pipeline's order."""
    newest = sorted(examples, key=lambda example: -example["step"])[:_EXAMPLES]
    # A field that is long in one example is shown as a text in all, so that the cards look alike.
    texts = {name for example in newest for name, value in example.items() if _is_long(value)}
    return [_example(example, texts) for example in newest]


def _example(example: dict[str, Any], texts: set[str]) -> Example:
    """Short fields as chips and long ones as parts, both in the order of the record."""
    chips: list[tuple[str, str]] = []
    parts: list[PagePart] = []
    before, after = example.get("solution"), example.get("revision")
    for name, value in example.items():
        label, text = _words(name), _value_text(value)
        if name in texts:
            if name == "revision" and isinstance(before, str) and isinstance(after, str):
                parts.append(changed_lines(before, after))
            parts.append((label, text))
        elif name != "step":
            chips.append((f"{label}: {text}", outcome_class(value) if name in _OUTCOMES else ""))
    ended = next((example[n] for n in _OUTCOMES if n in example), None)
    place = f"step {example['step']}"
    return Example(place=place, colour=outcome_class(ended), chips=chips, parts=parts)


def _is_long(value: object) -> bool:
    if isinstance(value, str):
        return "\n" in value or len(value) > _CHIP_LENGTH
    return isinstance(value, list | dict)


def _value_text(value: object) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, list):
        return "\n".join(f"{i}: {_value_text(item)}" for i, item in enumerate(value, start=1))
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_value_text(item)}" for name, item in value.items())
    return str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
