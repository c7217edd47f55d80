"""The report as one HTML text."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import unified_diff
from html import escape
from typing import Any, TypeVar

from ctrl_megatron.config import read_yaml
from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.report.charts import charts, is_share, tiles, title_of
from ctrl_megatron.metrics.report.document import date_of
from ctrl_megatron.metrics.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    SHADE,
    curve_svg,
    gantt_svg,
    stack_svg,
)
from ctrl_megatron.metrics.report.run_files import RunFiles, Series, Timelines
from ctrl_megatron.metrics.report.style import CSS
from ctrl_megatron.metrics.timeline import hidden_seconds

T = TypeVar("T")
_OUTCOMES = ("passed_after", "passed_before", "reward")
"""Fields of an example that are shares of what could be had; the first says how it ended."""
_EXAMPLES, _CHIP_LENGTH, _NAMED = 6, 40, 5


def render(run: RunFiles) -> str:
    """The whole page."""
    return whole_page(run.name, _body(run))


def render_comparison(runs: Sequence[RunFiles]) -> str:
    """The page on which up to four runs stand side by side: their tables, and a curve each in the
    drawing of every metric that two of them recorded.
    """
    series = {run.name: run.series or {} for run in runs}
    every = dict.fromkeys(name for one in series.values() for name in one)
    cards = []
    for name in every:
        curves = {run: one[name] for run, one in series.items() if name in one}
        if len(curves) > 1 and not name.startswith("time/"):
            percent = all(is_share(name, series[run]) for run in curves)
            drawing = image(curve_svg(curves, percent=percent), f"{name} by step")
            title = f"<h3>{escape(title_of(name))}</h3>"
            cards.append(f'<div class="card">{title}<p class="note">{name}</p>{drawing}</div>')
    stages = [{"run": run.name, **row} for run in runs for row in run.summary or ()]
    counts = []
    for run in runs:
        for name in dict.fromkeys(record["warning"] for record in run.warnings or ()):
            steps = {r["step"] for r in run.warnings or () if r["warning"] == name}
            counts.append([run.name, _words(name), str(len(steps))])
    title = " and ".join(run.name for run in runs)
    warned = f'<div class="card scroll">{html_table(("run", "warning", "steps"), counts)}</div>'
    return whole_page(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            *(f"<h3>{escape(run.name)}</h3>{facts(facts_of(run))}" for run in runs),
            left_out([f"{run.name}: {text}" for run in runs for text in run.left_out]),
            left_out(_not_compared(series)),
            *_section("Stages", stages, _summary_table),
            *(("<h2>Warnings</h2>", warned) if counts else ()),
            *_section("Curves", cards, lambda c: f'<div class="charts">{"".join(c)}</div>'),
        ],
    )


def _not_compared(series: Mapping[str, Series]) -> list[str]:
    alone: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for one in series.values() for name in one):
        having = [run for run, one in series.items() if name in one]
        if len(having) == 1:
            alone.setdefault(having[0], []).append(name)
    found = [
        f"what {run} alone recorded ({', '.join(names[:_NAMED])}"
        f"{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''})"
        for run, names in alone.items()
    ]
    return [
        *found,
        "times of nodes, steps in time, examples and configurations, which each run's "
        "own report has",
    ]


def _body(run: RunFiles) -> list[str]:
    return [
        f"<h1>{escape(run.name)}</h1>",
        facts(facts_of(run)),
        left_out(run.left_out),
        _tiles(run.series) if run.series else "",
        _warnings(run.warnings) if run.warnings else "",
        *_section("Stages", run.summary, _summary_table),
        *_section("Training curves", run.series, _charts),
        *_section("One step in time", run.timelines, _timeline),
        *_section("Examples", run.examples, _examples),
        *_section("Configuration", run.config, _config),
        "<footer>Made from metrics.jsonl, timeline.jsonl, examples.jsonl, summary.json and "
        "config.yaml in this directory.</footer>",
    ]


def whole_page(title: str, body: Sequence[str]) -> str:
    """An HTML document of its own with the report's style; ``body`` is HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{CSS}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n' + (
        "\n".join(body) + "\n</main></body></html>\n"
    )


def _section(title: str, content: T | None, draw: Callable[[T], str]) -> list[str]:
    """Nothing where there is nothing to show: the top of the page says what is left out."""
    return [f"<h2>{title}</h2>", draw(content)] if content else []


def facts(named: Mapping[str, str]) -> str:
    """Short facts at the top of a page, by what they are."""
    parts = (f"<span>{escape(name)}</span> {escape(text)}" for name, text in named.items() if text)
    return f'<p class="facts">{" · ".join(parts)}</p>'


def left_out(sentences: Sequence[str]) -> str:
    """What the page does not show, at its top."""
    if not sentences:
        return ""
    return f'<p class="left-out">Left out: {escape("; ".join(sentences))}.</p>'


def facts_of(run: RunFiles) -> dict[str, str]:
    """Data, model and date of a run."""
    tree = read_yaml(run.config, "config.yaml")[0] if run.config else None
    data = [_value(tree, f"{key}.train_files") for key in ("data", "sft")]
    validated = [_value(tree, f"{key}.val_files") for key in ("data", "sft")]
    return {
        "data": next(filter(None, data), ""),
        "validated on": next(filter(None, validated), ""),
        "model": _value(tree, "actor_rollout_ref.model.path"),
        "proxy": _value(tree, "actor_rollout_ref.proxy.model.path"),
        "written": "" if run.written is None else date_of(run.written),
    }


def _value(tree: Any, key: str) -> str:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return ", ".join(map(str, tree)) if isinstance(tree, list) else str(tree or "")


def image(svg: str, text: str) -> str:
    """A drawing as part of the page, with its description."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}">'


def _tiles(series: Series) -> str:
    # Validation alone (before the first step, or of a step that was resumed from) is not a step.
    trained = {name: points for name, points in series.items() if not name.startswith("val/")}
    steps = {step for points in (trained or series).values() for step, _ in points}
    shown = [("Steps", f"{len(steps)}", f"last is {max(steps)}")]
    for name in tiles(series):
        first, last = (
            format_number(series[name][i][1], percent=is_share(name, series)) for i in (0, -1)
        )
        shown.append((title_of(name), last, f"first step {first}"))
    return tile_row(shown)


def tile_row(shown: Sequence[tuple[str, str, str]]) -> str:
    """Big numbers: what each is, its value, and a note on it."""
    cells = (
        f'<div class="card tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{value}</div><div class="from">{escape(note)}</div></div>'
        for label, value, note in shown
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _warnings(warnings: list[dict[str, Any]]) -> str:
    """One row per kind: in how many steps, the last of them, and what it said there."""
    last = {record["warning"]: record for record in warnings}
    steps = {name: {r["step"] for r in warnings if r["warning"] == name} for name in last}
    rows = [[_words(n), str(len(steps[n])), str(r["step"]), r["text"]] for n, r in last.items()]
    table = html_table(("warning", "steps", "last", "what to try"), rows)
    return f'<h2>Warnings</h2><div class="card scroll">{table}</div>'


def _summary_table(summary: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in summary for key in row))
    rows = [[_cell(column, row.get(column)) for column in columns] for row in summary]
    note = '<p class="note">Every judged row counts the same; rounds counts these rows.</p>'
    table = html_table([_words(column) for column in columns], rows)
    return f'{note if "rounds" in columns else ""}<div class="card scroll">{table}</div>'


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are texts."""
    lines = ["".join(f"<th>{escape(word)}</th>" for word in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"


def _cell(column: str, value: object) -> str:
    if isinstance(value, float) and column.endswith("_rate"):
        return format_number(value, percent=True)
    return _value_text(value)


def _charts(series: Series) -> str:
    cards = []
    for chart in charts(series):
        curves = {name.partition("/")[2] or name: series[name] for name in chart.metrics}
        svg = stack_svg(curves) if chart.stacked else curve_svg(curves, percent=chart.percent)
        drawing = image(svg, f"{chart.title} by step")
        cards.append(
            f'<div class="card"><h3>{escape(chart.title)}</h3>'
            f'<p class="note">{escape(chart.note)}</p>{drawing}</div>'
        )
    rows = []
    for name, points in sorted(series.items()):
        values = [value for _, value in points]
        numbers = (values[0], values[-1], min(values), max(values))
        rows.append([name, *map(format_number, numbers)])
    table = html_table(("metric", "first", "last", "least", "most"), rows)
    return (
        '<p class="note">Numbers are last values; long curves are drawn pale under their mean '
        f'over the last 15 steps.</p><div class="charts">{"".join(cards)}</div>'
        f'<div class="card all"><details><summary>All metrics</summary>{table}</details></div>'
    )


def _timeline(timelines: Timelines) -> str:
    step, rank = _telling_step(timelines)
    phases = timelines[step, rank]
    host = [p for p in phases if p.kind == "host"]
    hidden = hidden_seconds(phases)
    partners = [p.name for p in phases if p.kind == "main" and hidden_seconds([p, *host])]
    names = ", ".join(dict.fromkeys(p.name for p in host))
    total = sum(p.end - p.start for p in host)
    note = "No host phase was recorded in this step."
    if host:
        note = f"{names} took {total:.2f} s, of which {hidden:.2f} s ran beside "
        note += f"{', '.join(dict.fromkeys(partners)) or 'nothing'}."
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{text}'
        for colour, text in (
            (BLUE, "main thread"),
            (ORANGE, "host, in the background"),
            (GREY, "main thread waits"),
            (SHADE, "host and main work at the same time"),
        )
    )
    return (
        f'<div class="card"><h3>Step {step}, rank {rank}</h3>'
        f'<p class="note">{escape(note)}<br>{keys}</p>'
        f"{image(gantt_svg(phases), 'Phases of one step')}</div>"
    )


def _telling_step(timelines: Timelines) -> tuple[int, int]:
    """The newest step in which host work ran; of its ranks the one where most was hidden."""
    with_host = [at for at, phases in timelines.items() if any(p.kind == "host" for p in phases)]
    newest = max(step for step, _ in with_host or timelines)
    places = [at for at in with_host or timelines if at[0] == newest]
    return max(places, key=lambda at: (hidden_seconds(timelines[at]), -at[1]))


def _examples(examples: list[dict[str, Any]]) -> str:
    """The newest examples; those of one step in the order in which the pipeline gave them."""
    newest = sorted(examples, key=lambda example: -example["step"])[:_EXAMPLES]
    # A field that is long in one example is a text in all of them: the cards look alike.
    texts = {name for example in newest for name, value in example.items() if _is_long(value)}
    return "".join(_example(example, texts) for example in newest)


def _example(example: dict[str, Any], texts: set[str]) -> str:
    """Short fields as chips, texts in full, both in the order of the record."""
    chips = parts = ""
    before, after = example.get("solution"), example.get("revision")
    for name, value in example.items():
        label, text = escape(_words(name)), escape(_value_text(value))
        if name in texts:
            if name == "revision" and isinstance(before, str) and isinstance(after, str):
                parts += changes(before, after)
            parts += f'<div><div class="part">{label}</div><pre>{text}</pre></div>'
        elif name != "step":
            judged = outcome(value) if name in _OUTCOMES else ""
            chips += f'<span class="chip {judged}">{label}: {text}</span>'
    judged = outcome(next((example[n] for n in _OUTCOMES if n in example), None))
    return (
        f'<div class="card example {judged}"><header><span class="step">step {example["step"]}'
        f'</span>{chips}</header><div class="pair">{parts}</div></div>'
    )


def outcome(value: object) -> str:
    """The class of a share of tests passed, or of a reward: all, none, or some of it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return ""
    return "pass" if value >= 1 else "fail" if value <= 0 else "part-pass"


def changes(before: str, after: str) -> str:
    """What lines a revision adds and removes, as a part of an example."""
    lines = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
    if not lines:
        return '<div><div class="part">changes</div><pre>none</pre></div>'
    kinds = {"+": "added", "-": "removed", "@": "place"}
    shown = (f'<span class="{kinds.get(line[:1], "")}">{escape(line)}\n</span>' for line in lines)
    return f'<div><div class="part">changes</div><pre>{"".join(shown)}</pre></div>'


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


def _config(text: str) -> str:
    return (
        f'<div class="card"><details><summary>config.yaml</summary>'
        f"<pre>{escape(text)}</pre></details></div>"
    )
