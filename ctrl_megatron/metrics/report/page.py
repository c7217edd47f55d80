"""The report as one HTML text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from ctrl_megatron.metrics.report.examples import examples_section
from ctrl_megatron.metrics.report.figures import (
    BLUE,
    GREY,
    ORANGE,
    SHADE,
    Line,
    curve_svg,
    format_number,
    gantt_svg,
)
from ctrl_megatron.metrics.report.run_files import RunFiles, Series, StepTimeline
from ctrl_megatron.metrics.report.style import CSS
from ctrl_megatron.metrics.timeline import hidden_seconds, intersection

_CHARTS: tuple[tuple[str, str, tuple[tuple[str, str, str], ...], bool], ...] = (
    ("Reward", "mean over critiques", (("reward/mean", "reward", BLUE),), False),
    (
        "Valid critiques",
        "share that states a judgment",
        (("critique/valid_rate", "valid", BLUE),),
        True,
    ),
    (
        "Pass rate around the revision",
        "mean over tests and critiques",
        (
            ("pass_rate/before", "first solution", GREY),
            ("pass_rate/after", "after revision", BLUE),
        ),
        True,
    ),
    ("KL of the update", "old policy to new policy", (("actor/ppo_kl", "KL", BLUE),), False),
    (
        "Clipped tokens",
        "share whose ratio left the clip range",
        (("actor/pg_clipfrac", "clipped", BLUE),),
        False,
    ),
    ("Entropy", "nats per critique token", (("actor/entropy", "entropy", BLUE),), False),
    ("Gradient norm", "before clipping", (("actor/grad_norm", "norm", BLUE),), False),
    ("Throughput", "tokens per second", (("perf/tokens_per_second", "tokens/s", BLUE),), False),
    (
        "Engine against trainer",
        "mean absolute difference of token probabilities",
        (("rollout/probs_diff_mean", "difference", BLUE),),
        False,
    ),
)
_TILES = (
    ("Reward", "reward/mean", False),
    ("Valid critiques", "critique/valid_rate", True),
    ("Passed after revision", "pass_rate/after", True),
    ("Tokens per second", "perf/tokens_per_second", False),
    ("Overlapped seconds", "perf/overlap_seconds", False),
    ("Weight sync, GB/s", "sync/gigabytes_per_second", False),
)


def render(run: RunFiles) -> str:
    """The whole page."""
    body = [
        f"<h1>{escape(run.name)}</h1>",
        '<p class="note">Critique, revision, verdict: what the run measured.</p>',
        _tiles(run.series),
        "<h2>Before and after</h2>",
        _summary_table(run),
        "<h2>Training curves</h2>",
        '<p class="note">Numbers are last values; long curves are drawn pale under their mean '
        "over the last 15 steps.</p>",
        f'<div class="charts">{"".join(_charts(run.series))}</div>',
        "<h2>One step in time</h2>",
        _timeline(run.timelines),
        "<h2>Critique, revision, verdict</h2>",
        examples_section(run.examples),
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


def missing(what: str) -> str:
    """The note that stands where something was not recorded."""
    return f'<div class="missing">{escape(what)}: not recorded</div>'


def _image(svg: str, text: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}">'


def _tiles(series: Series | None) -> str:
    tiles = []
    if series:
        steps = {step for points in series.values() for step, _ in points}
        tiles.append(("Steps", f"{len(steps)}", f"last is {max(steps)}"))
    for label, name, percent in _TILES:
        points = (series or {}).get(name)
        if not points:
            tiles.append((label, "&ndash;", "not recorded"))
            continue
        first, last = (format_number(points[i][1], percent=percent) for i in (0, -1))
        tiles.append((label, last, f"first step {first}"))
    cells = (
        f'<div class="card tile"><div class="label">{escape(label)}</div>'
        f'<div class="value">{value}</div><div class="from">{escape(note)}</div></div>'
        for label, value, note in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _summary_table(run: RunFiles) -> str:
    if not run.summary:
        return f'<div class="card">{missing("summary.json")}</div>'
    columns = list(dict.fromkeys(key for row in run.summary for key in row))
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_cell(c, row.get(c))}</td>' for c in columns)}</tr>"
        for row in run.summary
    )
    return f'<div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _cell(column: str, value: object) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, float):
        return format_number(value, percent=column.endswith("_rate"))
    return escape(str(value))


def _charts(series: Series | None) -> Sequence[str]:
    cards = []
    for title, subtitle, curves, percent in _CHARTS:
        lines = [
            Line(label=label, points=points, colour=colour)
            for name, label, colour in curves
            if (points := (series or {}).get(name))
        ]
        names = ", ".join(name for name, _, _ in curves)
        drawing = (
            _image(curve_svg(lines, percent=percent), f"{title} by step")
            if lines
            else missing(names)
        )
        cards.append(
            f'<div class="card"><h3>{escape(title)}</h3>'
            f'<p class="note">{escape(subtitle)}</p>{drawing}</div>'
        )
    return cards


def _timeline(timelines: list[StepTimeline] | None) -> str:
    if not timelines or not any(t.phases for t in timelines):
        return f'<div class="card">{missing("timeline.jsonl")}</div>'
    chosen = _telling_step([t for t in timelines if t.phases])
    host = [p for p in chosen.phases if p.kind == "host"]
    hidden = hidden_seconds(chosen.phases)
    partners = [
        p.name
        for p in chosen.phases
        if p.kind == "main" and intersection([p.interval], [h.interval for h in host])
    ]
    names = ", ".join(dict.fromkeys(p.name for p in host))
    total = sum(p.end - p.start for p in host)
    said = "No host phase was recorded in this step."
    if host:
        said = f"{names} took {total:.2f} s, of which {hidden:.2f} s ran beside "
        said += f"{', '.join(dict.fromkeys(partners)) or 'nothing'}."
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
        f'<div class="card"><h3>Step {chosen.step}, rank {chosen.rank}</h3>'
        f'<p class="note">{escape(said)}<br>{keys}</p>'
        f"{_image(gantt_svg(chosen.phases), 'Phases of one step')}</div>"
    )


def _telling_step(timelines: list[StepTimeline]) -> StepTimeline:
    """The newest step in which host work ran; among its ranks the one where most was hidden."""
    with_host = [t for t in timelines if any(p.kind == "host" for p in t.phases)]
    candidates = with_host or timelines
    newest = max(t.step for t in candidates)
    return max(
        (t for t in candidates if t.step == newest),
        key=lambda t: (hidden_seconds(t.phases), -t.rank),
    )


def _config(text: str | None) -> str:
    if text is None:
        return f'<div class="card">{missing("config.yaml")}</div>'
    return (
        f'<div class="card"><details><summary>config.yaml</summary>'
        f"<pre>{escape(text)}</pre></details></div>"
    )
