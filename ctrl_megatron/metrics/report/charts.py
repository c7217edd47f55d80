"""The choice of tiles and curves from the metrics that a run recorded, for any pipeline."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from ctrl_megatron.metrics.names import METRICS, describe_metric, rate_name_of_all_sets
from ctrl_megatron.metrics.report.run_files import Series

_TITLES = {name: metric.title for name, metric in METRICS.items() if metric.title}
"""Metric -> title, for the metrics that every trainer measures, in the order of display."""
_TRAINER = (
    *("actor", "critic", "advantage", "rollout", "sampling", "sync", "perf", "time", "memory"),
    *("sandbox", "checkpoint", "reward_share"),
)
"""Groups of metrics that the trainer writes, of which only those in ``_TITLES`` are drawn. Other
groups belong to the pipeline, and all their metrics are drawn.
"""
_SPEED = (
    *("time/step", "perf/tokens_per_second", "perf/overlap_seconds"),
    "sync/gigabytes_per_second",
)
_TILES_OF_PIPELINE, _CURVES_PER_CHART = 5, 4
_FURTHER = re.compile(r"\Aagent\d+/")
"""The prefix of a further policy's metric names."""
_HISTOGRAM = [name for name in METRICS if name.startswith("reward_share/")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Metrics drawn on the same axes."""

    title: str
    note: str
    metrics: tuple[str, ...]
    percent: bool = False
    stacked: bool = False
    """True for shares of a whole, which are drawn on top of each other."""


def build_charts(series: Series) -> list[Chart]:
    """The charts: the reward, the pipeline's metrics, the trainer's metrics, and the times."""
    own, of_files = _of_pipeline(series), dict[str, list[str]]()
    for name in own:
        if (rate := rate_name_of_all_sets(name)) in series:
            of_files.setdefault(rate, []).append(name)
    own = [name for name in own if rate_name_of_all_sets(name) not in series]
    named = [name for name in _TITLES if name in series]
    shares: dict[str, list[str]] = {}
    for name in own:
        if name not in named and name not in of_files and shows_percent(name, series):
            shares.setdefault(_group(name), []).append(name)
    shown = [_titled(name, series) for name in named if name in own]
    for names in shares.values():
        parts = range(0, len(names), _CURVES_PER_CHART)
        shown += [_chart(names[start : start + _CURVES_PER_CHART], series) for start in parts]
    drawn = {*named, *(name for names in shares.values() for name in names)}
    for name in own:
        if name not in drawn:
            # All validation files, then each of them.
            curves = [name, *of_files.get(name, ())]
            parts = range(0, len(curves), _CURVES_PER_CHART)
            shown += [_rates(name, curves[start:][:_CURVES_PER_CHART], series) for start in parts]
    shown += [_titled(name, series) for name in named if name not in own]
    shown += _histogram(series)
    device = [name for name in series if re.fullmatch(r"memory/\w+_device_gib", name)]
    if device:
        device.sort(key=lambda name: -series[name][-1][1])
        note = "GiB of a GPU in use by all processes, in the phases with the largest use"
        shown.append(
            Chart(title="GPU memory", note=note, metrics=tuple(device[:_CURVES_PER_CHART]))
        )
    seconds = [name for name in series if _group(name) == "time"]
    # The whole step is the longest.
    seconds.sort(key=lambda name: -series[name][-1][1])
    return [*shown, _chart(seconds[:_CURVES_PER_CHART], series)] if seconds else shown


def headline_metrics(series: Series) -> list[str]:
    """The metrics of the tiles: those that are declared as headlines, or else the pipeline's
    metrics.
    """
    declared = [name for name, metric in METRICS.items() if metric.headline and name in series]
    own = [name for name in _of_pipeline(series) if _group(name) != "val"]
    # Shares are understood without knowledge of the metric; details of rewards come last.
    own.sort(key=lambda name: (not shows_percent(name, series), _group(name) == "reward"))
    own = [name for name in own if name not in _TITLES][:_TILES_OF_PIPELINE]
    shown = ("reward/mean", *(declared or own), *(_SPEED[:1] if declared else _SPEED))
    return [name for name in shown if name in series]


def chart_title(name: str) -> str:
    if name in _TITLES:
        return _TITLES[name]
    words = name.replace("_", " ").replace("/", ": ")
    return words[:1].upper() + words[1:]


def shows_percent(name: str, series: Series) -> bool:
    """True where the values are shares, which are shown in percent; nan is allowed."""
    named = re.search(r"rate|frac|share|accuracy|mfu", name)
    return named is not None and not any(value < 0 or value > 1 for _, value in series[name])


def _chart(names: list[str], series: Series) -> Chart:
    shares = ", shares" if _group(names[0]) != "time" else ""
    title = chart_title(names[0]) if len(names) == 1 else chart_title(_group(names[0])) + shares
    declared = describe_metric(names[0]) if len(names) == 1 else None
    note = ", ".join(names) if declared is None else declared.meaning
    percent = all(shows_percent(name, series) for name in names)
    return Chart(title=title, note=note, metrics=tuple(names), percent=percent)


def _titled(name: str, series: Series) -> Chart:
    """The chart of a metric, with those of further policies."""
    others = (one for one in series if one != name and _FURTHER.sub("", one, count=1) == name)
    return _rates(name, [*(one for one in (name,) if one in series), *others], series)


def _rates(name: str, curves: list[str], series: Series) -> Chart:
    return dataclasses.replace(_chart([name], series), metrics=tuple(curves))


def _histogram(series: Series) -> list[Chart]:
    """The chart of the shares of samples by reward, without rewards that do not occur."""
    parts = [name for name in _HISTOGRAM if any(share for _, share in series.get(name, ()))]
    note = "shares of the judged samples by reward"
    title = "Reward histogram"
    stack = Chart(title=title, note=note, metrics=tuple(parts), percent=True, stacked=True)
    return [stack] if parts else []


def _of_pipeline(series: Series) -> list[str]:
    own = [name for name in series if _group(name) not in _TRAINER and not _beside(name, series)]
    return sorted(own, key=lambda name: _group(name) == "val")


def _beside(name: str, series: Series) -> bool:
    """Whether it is a metric of a further policy that the trainer writes, or is drawn beside the
    first one's."""
    first = _FURTHER.sub("", name, count=1) if _FURTHER.match(name) else name
    return first != name and (_group(first) in _TRAINER or (first in _TITLES and first in series))


def _group(name: str) -> str:
    return name.partition("/")[0]
