"""The report of one or several evaluations, made from their transcripts without a model: Markdown,
JSON and one HTML page that opens without network.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.errors import UserError, read_json
from ctrl_megatron.eval.resampling import Estimate
from ctrl_megatron.eval.results import CriticResult, ProblemResult, evaluate_turns
from ctrl_megatron.eval.scores import Confidence
from ctrl_megatron.eval.tables import rate_meanings, report_tables
from ctrl_megatron.eval.transcripts import Evaluation, Turn, read_evaluation, read_settings
from ctrl_megatron.eval.validation_rates import validation_rates
from ctrl_megatron.metrics.report.document import Table, format_utc, write_page

LEVEL = 0.9
"""Confidence level of every interval."""
_NOTE = (
    f"Brackets hold {LEVEL:.0%} of bootstrap values, drawn over problems and over seeds where "
    "there are several. Every problem counts the same."
)


def ks_of_existing_report(folder: Path) -> list[int]:
    """The values k of pass@k in the existing report; without a report 1 and the number of samples.
    Raises UserError where the directory has no evaluation.
    """
    samples = read_settings(folder)["settings"].get("samples", 1)
    there = folder / "results.json"
    found = read_json(there).get("pass_at", []) if there.is_file() else []
    return sorted({1, *(found or [samples])})


def confidence_of_existing_report(folder: Path) -> Confidence:
    """The kind of scores in the existing report; without a report ``votes``."""
    there = folder / "results.json"
    return read_json(there).get("confidence", "votes") if there.is_file() else "votes"


def write_evaluation_report(
    folder: Path, *, ks: Sequence[int] = (1,), confidence: Confidence = "votes"
) -> list[CriticResult]:
    """Write ``report.html``, ``report.md``, ``results.json``, ``problems.jsonl`` and
    ``summary.json`` (the rows of a run's final table) from the transcripts in ``folder``.
    """
    evaluation = read_evaluation(folder)
    results = evaluate_turns(
        evaluation.turns, evaluation.pairs, ks=ks, level=LEVEL, confidence=confidence
    )
    labelled = evaluate_turns(evaluation.labelled, level=LEVEL, confidence=confidence)
    _write(
        evaluation.name,
        [evaluation],
        results,
        labelled,
        evaluation.turns,
        ks,
        {kind: folder / f"report.{kind}" for kind in ("html", "md")}
        | {"json": folder / "results.json"},
    )
    lines = (json.dumps(dataclasses.asdict(p)) for p in _problems(results))
    write_text_atomically(folder / "problems.jsonl", "".join(f"{line}\n" for line in lines))
    firsts = [turn for turn in evaluation.turns if turn.turn == 1]
    table = [
        {"stage": critic, **validation_rates([t for t in firsts if t.critic == critic])}
        for critic in dict.fromkeys(turn.critic for turn in evaluation.turns)
    ]
    write_text_atomically(folder / "summary.json", json.dumps({"table": table}, indent=1))
    return results


def write_evaluations_report(
    folders: Sequence[Path],
    target: Path,
    *,
    ks: Sequence[int] = (1,),
    confidence: Confidence = "votes",
) -> list[CriticResult]:
    """Write one report about several evaluations to ``target`` (HTML), and the same as ``.md`` and
    ``.json`` beside it. Raises UserError where two directories have one name.
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
    results = evaluate_turns(turns, pairs, ks=ks, level=LEVEL, confidence=confidence)
    answers = [
        dataclasses.replace(turn, critic=f"{evaluation.name}: {turn.critic}")
        for evaluation in evaluations
        for turn in evaluation.labelled
    ]
    labelled = evaluate_turns(answers, level=LEVEL, confidence=confidence)
    title = " and ".join(evaluation.name for evaluation in evaluations)
    targets = {kind: target.with_suffix(f".{kind}") for kind in ("md", "json")}
    _write(title, evaluations, results, labelled, turns, ks, {**targets, "html": target})
    return results


def _problems(results: Iterable[CriticResult]) -> Iterable[ProblemResult]:
    return (problem for result in results for problem in result.per_problem)


def _write(
    title: str,
    evaluations: Sequence[Evaluation],
    results: Sequence[CriticResult],
    labelled: Sequence[CriticResult],
    turns: Sequence[Turn],
    ks: Sequence[int],
    targets: Mapping[str, Path],
) -> None:
    from ctrl_megatron.eval.page import render_evaluations  # imports matplotlib

    settings = {e.name: {k: e.settings[k] for k in ("settings", "critics")} for e in evaluations}
    content = {
        "interval": LEVEL,
        "pass_at": list(ks),
        "confidence": results[0].confidence,
        "left_out": _left_out(evaluations),
        "evaluations": settings,
        "critics": [
            {
                **dataclasses.asdict(dataclasses.replace(r, per_problem=())),
                "last": _plain(r.last_turn_rates),
            }
            for r in results
        ],
        "labelled": {r.critic: _plain({**r.last_turn_rates, **r.other_rules}) for r in labelled},
    }
    for critic in content["critics"]:
        del critic["per_problem"]
    write_text_atomically(targets["json"], json.dumps(content, indent=1) + "\n")
    shown = report_tables(results, labelled)
    write_text_atomically(targets["md"], _markdown(title, evaluations, results, shown, settings))
    page = render_evaluations(
        title,
        results,
        turns,
        facts=[_facts(one) for one in evaluations],
        left_out=_left_out(evaluations),
        note=_NOTE,
        tables=shown,
        settings=settings,
    )
    write_page(targets["html"], page)


def _left_out(evaluations: Sequence[Evaluation]) -> list[str]:
    several = len(evaluations) > 1
    return [f"{e.name}: {text}" if several else text for e in evaluations for text in e.left_out]


def _facts(evaluation: Evaluation) -> dict[str, str]:
    """Data, models and date of an evaluation."""
    settings, critics = evaluation.settings["settings"], evaluation.settings["critics"]
    proxy = settings.get("proxy") or {}
    return {
        "data": ", ".join(one["path"] for one in settings.get("rows") or ()),
        "critics": ", ".join(f"{n} ({one.get('path', '')})" for n, one in critics.items()),
        "proxy": proxy.get("path", ""),
        "written": format_utc(evaluation.written),
    }


def _plain(rates: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: dataclasses.asdict(rate) for name, rate in rates.items()}


def _markdown(
    title: str,
    evaluations: Sequence[Evaluation],
    results: Sequence[CriticResult],
    shown: Sequence[Table],
    settings: Mapping[str, Any],
) -> str:
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {text}" for e in evaluations for name, text in _facts(e).items() if text]
    lines += [f"- left out: {text}" for text in _left_out(evaluations)]
    lines += ["", _NOTE, ""]
    for name, note, head, rows in shown:
        lines += [f"## {name}", "", *([note, ""] if note else [])]
        lines += [_row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
    lines += ["## What the numbers say", ""]
    lines += [f"- {name}: {text}" for name, text in rate_meanings(results)]
    lines += ["", "## Settings", "", "```json", json.dumps(settings, indent=1), "```", ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
