"""The HTML page about one or several evaluations: the values that its template shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctrl_megatron.eval.rates import RATES
from ctrl_megatron.eval.resampling import Estimate
from ctrl_megatron.eval.results import CriticResult
from ctrl_megatron.eval.scores import SCORES
from ctrl_megatron.eval.tables import (
    MAIN_RATES,
    NUMBERS,
    rate_difference_text,
    rate_in_words,
    rate_meanings,
    rate_text,
)
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.report.document import (
    Drawing,
    Example,
    PagePart,
    Table,
    changed_lines,
    outcome_class,
    render_template,
)
from ctrl_megatron.metrics.report.figures import curve_svg, interval_svg, unit_square_svg
from ctrl_megatron.prompts import extract_code

_TEMPLATES = Path(__file__).parent / "templates"
_CURVES = (*MAIN_RATES, "judgment_accuracy", "f1_macro", "critique_tokens")
_EXAMPLES_OF_A_KIND = 2
_LONGEST_EXAMPLE, _TILES = 2000, 6


def render_evaluations(
    title: str,
    results: Sequence[CriticResult],
    turns: Sequence[Turn],
    *,
    facts: Sequence[Mapping[str, str]],
    left_out: Sequence[str],
    note: str,
    tables: Sequence[Table],
    settings: Mapping[str, Any],
) -> str:
    """The page. ``facts`` are those of each evaluation; the drawings follow the first table."""
    return render_template(
        "evaluation.html.jinja",
        _TEMPLATES,
        title=title,
        facts=facts,
        left_out=left_out,
        tiles=_tiles(results),
        note=note,
        tables=tables,
        drawings=list(_drawings(results)),
        examples=list(_examples(results, turns)),
        meanings=rate_meanings(results),
        settings=json.dumps(settings, indent=1),
    )


def _tiles(results: Sequence[CriticResult]) -> list[tuple[str, str, str]]:
    """(label, value, note) of every tile: pass@1 before, and after each critic's last turn."""
    before = results[0].curves[0]["pass@1"]
    shown = [("First solutions", rate_text(before.value, "pass@1"), "pass@1, by problem")]
    for result in results[:_TILES]:
        after, gain = result.last_turn_rates["pass@1"], result.gains.get("pass@1")
        than = (
            f"{rate_difference_text(gain, 'pass@1')} than {results[0].critic}" if gain else "pass@1"
        )
        shown.append((result.critic, rate_text(after.value, "pass@1"), than))
    return shown


def _drawings(results: Sequence[CriticResult]) -> Iterator[Drawing]:
    solved = {
        r.critic: {
            "before": _point(r.curves[0]["pass@1"]),
            "after": _point(r.last_turn_rates["pass@1"]),
        }
        for r in results
    }
    yield _drawing("Solved", "pass@1 of first solutions and after revision", interval_svg(solved))
    turned = {
        r.critic: {
            "up": _point(r.last_turn_rates["delta_up"]),
            "down": _point(r.last_turn_rates["delta_down"]),
        }
        for r in results
    }
    yield _drawing("Turned", "wrong to right, right to wrong", interval_svg(turned))
    f1 = {
        r.critic: {
            name.removeprefix("f1_"): _point(r.last_turn_rates[name])
            for name in ("f1_correct", "f1_incorrect", "f1_macro")
            if name in r.last_turn_rates
        }
        for r in results
    }
    if any(f1.values()):
        yield _drawing("F1 of judgments", "right programs, wrong ones, mean", interval_svg(f1))
    yield from _score_drawings(results)
    levels = sorted({level for r in results for level in r.by_difficulty})
    if len(levels) > 1:
        by_level = {
            f"level {level}": {
                r.critic: _point(after)
                for r in results
                if level in r.by_difficulty and (after := r.by_difficulty[level].after) is not None
            }
            for level in levels
        }
        yield _drawing("By difficulty", "pass@1 after revision", interval_svg(by_level))
    if max(len(r.curves) for r in results) > 2:
        yield from _rounds_drawings(results)
        for name in _CURVES:
            points = {
                r.critic: [(t, rates[name]) for t, rates in enumerate(r.curves) if name in rates]
                for r in results
            }
            known = {critic: found for critic, found in points.items() if len(found) > 1}
            # A flat line at one height says no more than the table.
            if len({rate.value for found in known.values() for _, rate in found}) > 1:
                svg = curve_svg(
                    {c: [(t, rate.value) for t, rate in found] for c, found in known.items()},
                    bands={c: [_band(rate) for _, rate in found] for c, found in known.items()},
                    percent=name not in NUMBERS,
                    x_label="turn",
                )
                yield _drawing(f"{rate_in_words(name)} by turn", RATES[name], svg)


def _rounds_drawings(results: Sequence[CriticResult]) -> Iterator[Drawing]:
    """For every critic: what is right after each turn, with and without stops, and what single
    rounds of as many tokens solve."""
    labels = {
        "pass@1": "all turns",
        "stopped_pass@1": "stopped at correct",
        "majority_of_n": "most of n single rounds",
        "any_of_n": "any of n single rounds",
    }
    for result in results:
        found = {
            label: [(t, r[name]) for t, r in enumerate(result.curves) if name in r]
            for name, label in labels.items()
        }
        known = {label: points for label, points in found.items() if len(points) > 1}
        svg = curve_svg(
            {label: [(t, rate.value) for t, rate in points] for label, points in known.items()},
            bands={label: [_band(rate) for _, rate in points] for label, points in known.items()},
            percent=True,
            x_label="turn",
        )
        yield _drawing(f"Rounds: {result.critic}", "right programs, at equal tokens", svg)


def _score_drawings(results: Sequence[CriticResult]) -> Iterator[Drawing]:
    """Pictures of how well scores tell right programs from wrong ones; none where all of the
    programs are right or all are wrong."""
    kind = SCORES[results[0].confidence]
    if roc := {r.critic: r.roc for r in results if r.roc}:
        axes = {"x_label": "wrong programs above it", "y_label": "right programs above it"}
        yield _drawing("ROC", f"thresholds of the score: {kind}", unit_square_svg(roc, **axes))
        points = {r.critic: [(s, right) for s, right, _ in r.reliability] for r in results if r.roc}
        axes = {"x_label": "score", "y_label": "share of right programs"}
        note = "the diagonal is a calibrated critic"
        yield _drawing("Reliability", note, unit_square_svg(points, **axes))
    numbers = sorted({n for r in results for n in r.best_of})
    if len(numbers) > 1:
        curves: dict[str, list[tuple[int, Estimate]]] = {}
        for n in numbers:
            known = [r for r in results if n in r.best_of]
            for r in known:
                curves.setdefault(r.critic, []).append((n, r.best_of[n]["critic"]))
            for selector in ("random", "majority", "oracle"):
                curves.setdefault(selector, []).append((n, known[0].best_of[n][selector]))
        svg = curve_svg(
            {label: [(n, rate.value) for n, rate in found] for label, found in curves.items()},
            bands={label: [_band(rate) for _, rate in found] for label, found in curves.items()},
            percent=True,
            x_label="n",
        )
        yield _drawing("Best of n", "pass@1 of the chosen first solution", svg)


def _point(rate: Estimate) -> tuple[float, tuple[float, float] | None]:
    return rate.value, _band(rate)


def _band(rate: Estimate) -> tuple[float, float] | None:
    return None if rate.low is None or rate.high is None else (rate.low, rate.high)


def _drawing(title: str, note: str, svg: str) -> Drawing:
    return Drawing(title=title, note=note, svg=svg, alt=title)


def _examples(results: Sequence[CriticResult], turns: Iterable[Turn]) -> Iterator[Example]:
    """First critiques of the last critic whose revisions turned right, turned wrong or stayed
    wrong.
    """
    mine = [turn for turn in turns if turn.critic == results[-1].critic and turn.turn == 1]
    kinds = {
        "turned right": (False, True),
        "turned wrong": (True, False),
        "stayed wrong": (False, False),
    }
    for kind, wanted in kinds.items():
        found = [
            turn
            for turn in mine
            if turn.before and turn.after and (turn.before.accepted, turn.after.accepted) == wanted
        ]
        for turn in found[:_EXAMPLES_OF_A_KIND]:
            yield _example(kind, turn)


def _example(kind: str, turn: Turn) -> Example:
    assert turn.before is not None and turn.after is not None
    judgment = {True: "correct", False: "incorrect", None: "nothing"}[turn.judgment]
    before, after = (format_number(p.pass_rate, percent=True) for p in (turn.before, turn.after))
    parts: list[PagePart] = [
        ("first solution", _cut(turn.solution)),
        ("critique", _cut(turn.critique or "")),
        # The comparison shows the programs only, not the texts around them.
        changed_lines(extract_code(turn.solution), extract_code(turn.revision)),
        ("revision", _cut(turn.revision)),
    ]
    return Example(
        place=f"{turn.critic}, {turn.attempt}",
        colour=outcome_class(turn.after.pass_rate),
        chips=[
            (kind, outcome_class(float(turn.after.accepted))),
            (f"judged {judgment}", outcome_class(float(turn.judgment is turn.before.accepted))),
            (f"tests {before} to {after}", ""),
        ],
        parts=parts,
    )


def _cut(text: str) -> str:
    rest = len(text) - _LONGEST_EXAMPLE
    return text if rest <= 0 else f"{text[:_LONGEST_EXAMPLE]}\n... {rest} more characters"
