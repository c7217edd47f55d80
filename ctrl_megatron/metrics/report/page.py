"""The report as one HTML text."""

from __future__ import annotations

import base64
from html import escape
from typing import Any

from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.report.charts import charts, is_share, tiles, title_of
from ctrl_megatron.metrics.report.figures import BLUE, GREY, ORANGE, SHADE, curve_svg, gantt_svg
from ctrl_megatron.metrics.report.run_files import RunFiles, Series, Timelines
from ctrl_megatron.metrics.report.style import CSS
from ctrl_megatron.metrics.timeline import hidden_seconds

_EXAMPLES, _CHIP_LENGTH = 6, 40


def render(run: RunFiles) -> str:
    """The whole page."""
    body = [
        f"<h1>{escape(run.name)}</h1>",
        '<p class="note">What the run measured.</p>',
        _tiles(run.series),
        "<h2>Stages</h2>",
        _summary_table(run),
        "<h2>Training curves</h2>",
        '<p class="note">Numbers are last values; long curves are drawn pale under their mean '
        "over the last 15 steps.</p>",
        _charts(run.series),
        "<h2>One step in time</h2>",
        _timeline(run.timelines),
        "<h2>Examples</h2>",
        _examples(run.examples),
        "<h2>Configuration</h2>",
        _config(run.config),
        "<footer>Made from metrics.jsonl, timeline.jsonl, examples.jsonl, summary.json and "
        "config.yaml in this directory.</footer>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(run.name)}</title><style>{CSS}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n' + (
        "\n".join(body) + "\n</main></body></html>\n"
    )


def _missing(file: str) -> str:
    return f'<div class="card"><div class="missing">{file}: not recorded</div></div>'


def _image(svg: str, text: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}">'


def _tiles(series: Series | None) -> str:
    if not series:
        return ""
    # Validation alone (before the first step, or of a step that was resumed from) is not a step.
    trained = {name: points for name, points in series.items() if not name.startswith("val/")}
    steps = {step for points in (trained or series).values() for step, _ in points}
    shown = [("Steps", f"{len(steps)}", f"last is {max(steps)}")]
    for name in tiles(series):
        first, last = (
            format_number(series[name][i][1], percent=is_share(name, series)) for i in (0, -1)
        )
        shown.append((title_of(name), last, f"first step {first}"))
    cells = (
        f'<div class="card tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{value}</div><div class="from">{escape(note)}</div></div>'
        for label, value, note in shown
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _summary_table(run: RunFiles) -> str:
    if not run.summary:
        return _missing("summary.json")
    columns = list(dict.fromkeys(key for row in run.summary for key in row))
    head = "".join(f"<th>{escape(_words(column))}</th>" for column in columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_cell(c, row.get(c))}</td>' for c in columns)}</tr>"
        for row in run.summary
    )
    return f'<div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _cell(column: str, value: object) -> str:
    if isinstance(value, float) and column.endswith("_rate"):
        return format_number(value, percent=True)
    return escape(_value_text(value))


def _charts(series: Series | None) -> str:
    if not series:
        return _missing("metrics.jsonl")
    cards = []
    for chart in charts(series):
        curves = {name.partition("/")[2] or name: series[name] for name in chart.metrics}
        drawing = _image(curve_svg(curves, percent=chart.percent), f"{chart.title} by step")
        cards.append(
            f'<div class="card"><h3>{escape(chart.title)}</h3>'
            f'<p class="note">{escape(chart.note)}</p>{drawing}</div>'
        )
    return f'<div class="charts">{"".join(cards)}</div>{_all_metrics(series)}'


def _all_metrics(series: Series) -> str:
    rows = []
    for name, points in sorted(series.items()):
        values = [value for _, value in points]
        numbers = (values[0], values[-1], min(values), max(values))
        cells = "".join(f"<td>{format_number(value)}</td>" for value in numbers)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    head = "".join(f"<th>{word}</th>" for word in ("metric", "first", "last", "least", "most"))
    return (
        '<div class="card all"><details><summary>All metrics</summary>'
        f"<table><tr>{head}</tr>{''.join(rows)}</table></details></div>"
    )


def _timeline(timelines: Timelines | None) -> str:
    timelines = {place: phases for place, phases in (timelines or {}).items() if phases}
    if not timelines:
        return _missing("timeline.jsonl")
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
        f"{_image(gantt_svg(phases), 'Phases of one step')}</div>"
    )


def _telling_step(timelines: Timelines) -> tuple[int, int]:
    """The newest step in which host work ran; of its ranks the one where most was hidden."""
    with_host = [at for at, phases in timelines.items() if any(p.kind == "host" for p in phases)]
    newest = max(step for step, _ in with_host or timelines)
    places = [at for at in with_host or timelines if at[0] == newest]
    return max(places, key=lambda at: (hidden_seconds(timelines[at]), -at[1]))


def _examples(examples: list[dict[str, Any]] | None) -> str:
    """The newest examples; those of one step in the order in which the pipeline gave them."""
    if not examples:
        return _missing("examples.jsonl")
    newest = sorted(examples, key=lambda example: -example["step"])[:_EXAMPLES]
    # A field that is long in one example is a text in all of them: the cards look alike.
    texts = {name for example in newest for name, value in example.items() if _is_long(value)}
    return "".join(_example(example, texts) for example in newest)


def _example(example: dict[str, Any], texts: set[str]) -> str:
    """Short fields as chips, texts in full, both in the order of the record."""
    fields = [(name, _value_text(value)) for name, value in example.items() if name != "step"]
    chips = "".join(
        f'<span class="chip">{escape(_words(name))}: {escape(text)}</span>'
        for name, text in fields
        if name not in texts
    )
    parts = "".join(
        f'<div><div class="part">{escape(_words(name))}</div><pre>{escape(text)}</pre></div>'
        for name, text in fields
        if name in texts
    )
    return (
        f'<div class="card example"><header><span class="step">step {example["step"]}</span>'
        f'{chips}</header><div class="pair">{parts}</div></div>'
    )


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


def _config(text: str | None) -> str:
    if text is None:
        return _missing("config.yaml")
    return (
        f'<div class="card"><details><summary>config.yaml</summary>'
        f"<pre>{escape(text)}</pre></details></div>"
    )
