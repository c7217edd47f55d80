"""The report of one or several evaluations, rebuilt from their transcripts: Markdown, JSON and one
HTML page that opens offline. No model is needed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ctrl_megatron.checkpoint.files import write_whole
from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.eval.resampling import Estimate
from ctrl_megatron.eval.results import (
    JUDGED,
    PAIR_RATES,
    RATES,
    CriticResult,
    ProblemResult,
    evaluate_turns,
)
from ctrl_megatron.eval.transcripts import Evaluation, Turn, read_evaluation, read_settings
from ctrl_megatron.eval.validation_rates import summarise
from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.report.document import date_of, write_page
from ctrl_megatron.prompts import extract_code

LEVEL = 0.9
"""Of every interval."""
_NUMBERS = ("critique_tokens", "revision_tokens")
"""Rates that are no shares."""
_MAIN = ("pass@1", "delta_up", "delta_down", "pass_rate", "stopped_pass@1", "time_limit_rate")
_MAIN += ("similarity",)
_SAID = ("valid_critique_rate", "judgment_accuracy", "judged_correct_rate", *JUDGED)
_CURVES = (*_MAIN, "judgment_accuracy", "f1_macro", "critique_tokens")
_EXAMPLES_OF_A_KIND = 2
_LONGEST_EXAMPLE, _TILES = 2000, 6

Table = tuple[str, str, list[str], list[list[str]]]
"""Title, what it says, head, rows."""


def kept_ks(folder: Path) -> list[int]:
    """The numbers of samples that pass@k was made with: those of the report that is there, else one
    and as many as were drawn. UserError where the directory holds no evaluation.
    """
    samples = read_settings(folder)["settings"].get("samples", 1)
    there = folder / "results.json"
    found = read_json(there).get("pass_at", []) if there.is_file() else []
    return sorted({1, *(found or [samples])})


def write_evaluation_report(folder: Path, *, ks: Sequence[int] = (1,)) -> list[CriticResult]:
    """Write ``report.html``, ``report.md``, ``results.json``, ``problems.jsonl`` and
    ``summary.json`` (the rows of a run's final table) from the transcripts in ``folder``.
    """
    evaluation = read_evaluation(folder)
    results = evaluate_turns(evaluation.turns, evaluation.pairs, ks=ks, level=LEVEL)
    _write(
        evaluation.name,
        [evaluation],
        results,
        evaluation.turns,
        ks,
        {kind: folder / f"report.{kind}" for kind in ("html", "md")}
        | {"json": folder / "results.json"},
    )
    lines = (json.dumps(dataclasses.asdict(p)) for p in _problems(results))
    write_whole(folder / "problems.jsonl", "".join(f"{line}\n" for line in lines))
    table = [
        {"stage": critic, **summarise([t for t in evaluation.turns if _is_first(t, critic)])}
        for critic in dict.fromkeys(turn.critic for turn in evaluation.turns)
    ]
    write_whole(folder / "summary.json", json.dumps({"table": table}, indent=1))
    return results


def write_evaluations_report(
    folders: Sequence[Path], target: Path, *, ks: Sequence[int] = (1,)
) -> list[CriticResult]:
    """Write one report about several evaluations to ``target`` (HTML), and beside it the same as
    ``.md`` and ``.json``. UserError where two directories have one name.
    """
    evaluations = [read_evaluation(folder) for folder in folders]
    if len({evaluation.name for evaluation in evaluations}) < len(evaluations):
        raise UserError("two of the evaluations have one name: name each directory once")
    turns = [
        dataclasses.replace(turn, critic=f"{evaluation.name}: {turn.critic}")
        for evaluation in evaluations
        for turn in evaluation.turns
    ]
    pairs = [
        dataclasses.replace(pair, critic=f"{evaluation.name}: {pair.critic}")
        for evaluation in evaluations
        for pair in evaluation.pairs
    ]
    results = evaluate_turns(turns, pairs, ks=ks, level=LEVEL)
    title = " and ".join(evaluation.name for evaluation in evaluations)
    targets = {kind: target.with_suffix(f".{kind}") for kind in ("md", "json")}
    _write(title, evaluations, results, turns, ks, {**targets, "html": target})
    return results


def _is_first(turn: Turn, critic: str) -> bool:
    return turn.critic == critic and turn.turn == 1


def _problems(results: Iterable[CriticResult]) -> Iterable[ProblemResult]:
    return (problem for result in results for problem in result.per_problem)


def _write(
    title: str,
    evaluations: Sequence[Evaluation],
    results: Sequence[CriticResult],
    turns: Sequence[Turn],
    ks: Sequence[int],
    targets: Mapping[str, Path],
) -> None:
    settings = {e.name: {k: e.settings[k] for k in ("settings", "critics")} for e in evaluations}
    content = {
        "interval": LEVEL,
        "pass_at": list(ks),
        "left_out": _left_out(evaluations),
        "evaluations": settings,
        "critics": [
            {**dataclasses.asdict(dataclasses.replace(r, per_problem=())), "last": _plain(r.last)}
            for r in results
        ],
    }
    for critic in content["critics"]:
        del critic["per_problem"]
    write_whole(targets["json"], json.dumps(content, indent=1) + "\n")
    write_whole(targets["md"], _markdown(title, evaluations, results, settings))
    write_page(targets["html"], _html(title, evaluations, results, turns, settings))


def _left_out(evaluations: Sequence[Evaluation]) -> list[str]:
    several = len(evaluations) > 1
    return [f"{e.name}: {text}" if several else text for e in evaluations for text in e.left_out]


def _facts(evaluation: Evaluation) -> dict[str, str]:
    """What was evaluated, and when."""
    settings, critics = evaluation.settings["settings"], evaluation.settings["critics"]
    proxy = settings.get("proxy") or {}
    return {
        "data": ", ".join(one["path"] for one in settings.get("rows") or ()),
        "critics": ", ".join(f"{n} ({one.get('path', '')})" for n, one in critics.items()),
        "proxy": proxy.get("path", ""),
        "written": date_of(evaluation.written),
    }


def _plain(rates: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: dataclasses.asdict(rate) for name, rate in rates.items()}


# Tables, the same in both pages


def tables(results: Sequence[CriticResult]) -> list[Table]:
    """Every table of the report; columns without any value are left out."""
    found = [
        _rates_table(
            "Solved after revision",
            " ".join(
                ["After the last turn; up and down count from the first solutions.", *_few(results)]
            ),
            results,
            [*_MAIN[:1], *_more_ks(results), *_MAIN[1:]],
        ),
    ]
    if any(name in result.last for result in results for name in _SAID):
        note = "Of the first turn's critiques, which all critics give of the same programs."
        found.append(_rates_table("Judgments", f"{note}{_one_class(results)}", results, _SAID))
    if len(results) > 1:
        found.append(_gains_table(results))
    levels = sorted({level for result in results for level in result.by_difficulty})
    if len(levels) > 1:
        rows = [
            [
                str(level),
                result.critic,
                str(at.problems),
                *(_cell(one, "pass@1") for one in (at.before, at.after)),
            ]
            for level in levels
            for result in results
            if (at := result.by_difficulty.get(level)) is not None
        ]
        head = ["difficulty", "critic", "problems", "pass@1 before", "pass@1 after"]
        found.append(("By difficulty", "", head, rows))
    if any(result.pairs for result in results):
        rows = [
            [r.critic, source, *(_cell(rates.get(name), name) for name in PAIR_RATES)]
            for r in results
            for source, rates in r.pairs.items()
        ]
        note = "; ".join(f"{_words(name)}: {text}" for name, text in PAIR_RATES.items()) + "."
        found.append(("Pairs", note, ["critic", "source", *map(_words, PAIR_RATES)], rows))
    rows = [
        [
            r.critic,
            *(str(n) for n in (r.problems, r.attempts, len(r.seeds), r.chains, len(r.curves) - 1)),
            *(str(n) for n in (r.unjudged, r.overlong)),
        ]
        for r in results
    ]
    head = ["critic", "problems", "first solutions", "seeds", "chains", "turns"]
    head += ["chains left out (sandbox failed)", "turns left out (prompt too long)"]
    found.append(("What was counted", "", head, rows))
    return found


def _few(results: Sequence[CriticResult]) -> Iterable[str]:
    """A sentence for every pass@K that is not of all problems, or is not there for that."""
    for result in results:
        for name, (count, places) in result.too_few.items():
            least, of = name.partition("@")[2], f"{count} of {places} problems (times seeds)"
            if name in result.last:
                told = f"leaves out {of} with fewer than {least} judged chains"
            else:
                told = f"is not given, for {of} have fewer than {least} chains"
            yield f"{result.critic}: {name} {told}."


def _one_class(results: Sequence[CriticResult]) -> str:
    """Why there is no F1, where there is none."""
    if any("f1_macro" in result.last for result in results):
        return ""
    return " There is no F1: all of the programs are right, or all are wrong."


def _gains_table(results: Sequence[CriticResult]) -> Table:
    """A row for every critic but the first, also where there is nothing to compare."""
    first, *others = results
    names = [name for name in RATES if any(name in result.gains for result in others)]
    rows = [
        [
            result.critic,
            "not the same" if result.compared is None else "{} of {}".format(*result.compared),
            *(_signed(result.gains.get(name), name) for name in names),
        ]
        for result in others
    ]
    note = (
        f"Differences to {first.critic} in percentage points, paired by problem, over the first "
        "solutions (times seeds) that both were judged on; pass@1 of these before: "
        f"{_cell(first.curves[0].get('pass@1'), 'pass@1')}."
    )
    return "Gains", note, ["critic", "first solutions", *map(_words, names)], rows


def _rates_table(
    title: str,
    note: str,
    results: Sequence[CriticResult],
    names: Sequence[str],
) -> Table:
    known = [name for name in names if any(name in result.last for result in results)]
    head = ["critic", "pass@1 before", *map(_words, known)]
    rows = [
        [
            result.critic,
            _cell(result.curves[0].get("pass@1"), "pass@1"),
            *(_cell(result.last.get(name), name) for name in known),
        ]
        for result in results
    ]
    return title, note, head, rows


def _more_ks(results: Sequence[CriticResult]) -> list[str]:
    names = {n for r in results for n in r.last if n.startswith("pass@") and n != "pass@1"}
    return sorted(names, key=lambda name: int(name.partition("@")[2]))


def _cell(rate: Estimate | None, name: str) -> str:
    if rate is None:
        return "-"
    return _number(rate.value, name) + _interval(rate, name)


def _signed(rate: Estimate | None, name: str) -> str:
    if rate is None:
        return "-"
    sign = "+" if rate.value >= 0 else ""
    return sign + _number(rate.value, name) + _interval(rate, name)


def _interval(rate: Estimate, name: str) -> str:
    if rate.low is None or rate.high is None:
        return ""
    return f" [{_number(rate.low, name)}, {_number(rate.high, name)}]"


def _number(value: float, name: str) -> str:
    return f"{value:.1f}" if name in _NUMBERS else format_number(value, percent=True)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _meanings(results: Sequence[CriticResult]) -> list[tuple[str, str]]:
    shown = {name for result in results for name in result.last}
    if any(name.startswith("pass@") and name != "pass@1" for name in shown):
        shown.add("pass@K")
    return [(_words(name), text) for name, text in RATES.items() if name in shown]


_NOTE = (
    f"Brackets hold {LEVEL:.0%} of bootstrap values, drawn over problems and over seeds where "
    "there are several. Every problem counts the same."
)


def _markdown(
    title: str,
    evaluations: Sequence[Evaluation],
    results: Sequence[CriticResult],
    settings: Mapping[str, Any],
) -> str:
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {text}" for e in evaluations for name, text in _facts(e).items() if text]
    lines += [f"- left out: {text}" for text in _left_out(evaluations)]
    lines += ["", _NOTE, ""]
    for name, note, head, rows in tables(results):
        lines += [f"## {name}", "", *([note, ""] if note else [])]
        lines += [_row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
    lines += ["## What the numbers say", ""]
    lines += [f"- {name}: {text}" for name, text in _meanings(results)]
    lines += ["", "## Settings", "", "```json", json.dumps(settings, indent=1), "```", ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# The page


def _html(
    title: str,
    evaluations: Sequence[Evaluation],
    results: Sequence[CriticResult],
    turns: Sequence[Turn],
    settings: Mapping[str, Any],
) -> str:
    # They import matplotlib.
    from ctrl_megatron.metrics.report.page import facts, html_table, left_out, tile_row, whole_page

    body = [f"<h1>{escape(title)}</h1>", *(facts(_facts(one)) for one in evaluations)]
    body += [left_out(_left_out(evaluations)), tile_row(_tiles(results))]
    body += [f'<p class="note">{escape(_NOTE)}</p>']
    drawn = False
    for name, note, head, rows in tables(results):
        body.append(f"<h2>{escape(name)}</h2>")
        if note:
            body.append(f'<p class="note">{escape(note)}</p>')
        body.append(f'<div class="card scroll">{html_table(head, rows)}</div>')
        if not drawn:
            body.append(f'<div class="charts">{"".join(_drawings(results))}</div>')
            drawn = True
    meanings = html_table(("number", "says"), [list(pair) for pair in _meanings(results)])
    examples = list(_examples(results, turns))
    body += [
        *(["<h2>Examples</h2>", *examples] if examples else []),
        f'<h2>What the numbers say</h2><div class="card scroll">{meanings}</div>',
        '<h2>Settings</h2><div class="card"><details><summary>evaluation.json</summary>'
        f"<pre>{escape(json.dumps(settings, indent=1))}</pre></details></div>",
        "<footer>Made from transcripts; ctrl-report makes it anew.</footer>",
    ]
    return whole_page(title, body)


def _tiles(results: Sequence[CriticResult]) -> list[tuple[str, str, str]]:
    """What the first solutions solve, and what is solved after each critic's last turn."""
    before = results[0].curves[0]["pass@1"]
    shown = [("First solutions", _number(before.value, "pass@1"), "pass@1, by problem")]
    for result in results[:_TILES]:
        after, gain = result.last["pass@1"], result.gains.get("pass@1")
        than = f"{_signed(gain, 'pass@1')} than {results[0].critic}" if gain else "pass@1"
        shown.append((result.critic, _number(after.value, "pass@1"), than))
    return shown


def _drawings(results: Sequence[CriticResult]) -> Iterable[str]:
    from ctrl_megatron.metrics.report.figures import curve_svg, interval_svg

    solved = {
        r.critic: {
            "before": _point(r.curves[0]["pass@1"]),
            "after": _point(r.last["pass@1"]),
        }
        for r in results
    }
    yield _card("Solved", "pass@1 of first solutions and after revision", interval_svg(solved))
    turned = {
        r.critic: {
            "up": _point(r.last["delta_up"]),
            "down": _point(r.last["delta_down"]),
        }
        for r in results
    }
    yield _card("Turned", "wrong to right, right to wrong", interval_svg(turned))
    f1 = {
        r.critic: {
            name.removeprefix("f1_"): _point(r.last[name])
            for name in ("f1_correct", "f1_incorrect", "f1_macro")
            if name in r.last
        }
        for r in results
    }
    if any(f1.values()):
        yield _card("F1 of judgments", "right programs, wrong ones, mean", interval_svg(f1))
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
        yield _card("By difficulty", "pass@1 after revision", interval_svg(by_level))
    if max(len(r.curves) for r in results) > 2:
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
                    percent=name not in _NUMBERS,
                    x_label="turn",
                )
                yield _card(f"{_words(name)} by turn", RATES[name], svg)


def _point(rate: Estimate) -> tuple[float, tuple[float, float] | None]:
    return rate.value, _band(rate)


def _band(rate: Estimate) -> tuple[float, float] | None:
    return None if rate.low is None or rate.high is None else (rate.low, rate.high)


def _card(title: str, note: str, svg: str) -> str:
    from ctrl_megatron.metrics.report.page import image

    return (
        f'<div class="card"><h3>{escape(title)}</h3><p class="note">{escape(note)}</p>'
        f"{image(svg, title)}</div>"
    )


def _examples(results: Sequence[CriticResult], turns: Sequence[Turn]) -> Iterable[str]:
    """Of the last critic: what its first critiques turned right, turned wrong and left wrong."""
    mine = [turn for turn in turns if _is_first(turn, results[-1].critic)]
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


def _example(kind: str, turn: Turn) -> str:
    from ctrl_megatron.metrics.report.page import changes, outcome

    assert turn.before is not None and turn.after is not None
    said = {True: "correct", False: "incorrect", None: "nothing"}[turn.judgment]
    rates = [format_number(p.pass_rate, percent=True) for p in (turn.before, turn.after)]
    chips = "".join(
        f'<span class="chip {colour}">{escape(text)}</span>'
        for text, colour in (
            (kind, outcome(float(turn.after.accepted))),
            (f"judged {said}", outcome(float(turn.judgment is turn.before.accepted))),
            (f"tests {rates[0]} to {rates[1]}", ""),
        )
    )
    parts = [
        f'<div><div class="part">{name}</div><pre>{escape(_cut(text or ""))}</pre></div>'
        for name, text in (
            ("first solution", turn.solution),
            ("critique", turn.critique),
            ("revision", turn.revision),
        )
    ]
    # Of the programs: what is said around them is no change.
    parts.insert(2, changes(extract_code(turn.solution), extract_code(turn.revision)))
    place = escape(f"{turn.critic}, {turn.attempt}")
    return (
        f'<div class="card example {outcome(turn.after.pass_rate)}"><header>'
        f'<span class="step">{place}</span>{chips}</header>'
        f'<div class="pair">{"".join(parts)}</div></div>'
    )


def _cut(text: str) -> str:
    rest = len(text) - _LONGEST_EXAMPLE
    return text if rest <= 0 else f"{text[:_LONGEST_EXAMPLE]}\n... {rest} more characters"
