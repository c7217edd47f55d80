"""The study's tables and figures, from kept files alone (``study.py --tables``).

Every function maps transcripts or the kept steps of a run to rows of text.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ctrl_megatron.checkpoint.files import write_text_atomically
from ctrl_megatron.data.json_lines import read_json_lines_with_places
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.measures import pass_at_k
from ctrl_megatron.eval.resampling import (
    Cells,
    Estimate,
    Resampling,
    ratio_of_columns,
    sum_into_cells,
)
from ctrl_megatron.eval.results import CriticResult, evaluate_turns
from ctrl_megatron.eval.transcripts import Turn, transcript_part_file, turn_from_json
from ctrl_megatron.metrics.json_lines import read_json_lines
from ctrl_megatron.preparation.mutations import count_occurrences
from ctrl_megatron.prompts import extract_code
from ctrl_megatron.rewards.copying import COPYING_THRESHOLD, copied_line_share
from examples.study_smollm2.plan import (
    ARMS,
    CRITIQUES,
    CURVES,
    JUDGING,
    ORACLE,
    PROXIES,
    ROUNDS,
    SAMPLES,
    SEEDS,
    TESTS,
    TUNED,
    UNSEEN_MUTANTS,
    WRITTEN,
)

Rows = list[list[str]]
Step = Mapping[str, float]
"""The kept metrics of one step, with its number as ``step``."""
Public = Mapping[tuple[str, int, int], bool]
"""(first solution, seed, sample) -> whether the revision of the first round passes the public
test."""
_RATES = ("pass_rate", "pass@1", f"pass@{SAMPLES}", "f1_macro", "valid_critique_rate")
SECONDS, GAIN, EXPLAINED = "time/step", "group/reward_minus_first", "critic/explained_variance"
LENGTH, COPIED = "critique/length", "critique/copied_rate"
KEPT_METRICS = (SECONDS, GAIN, EXPLAINED, LENGTH, COPIED)
"""Metrics of a step that are kept, beside those of the tasks of a mixture."""
TASK = "task/"
_T_90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132}
"""95 % quantile of Student's t by degrees of freedom: the ends of 90 % intervals over seeds."""
_ENDS = 3
"""Steps at either end of a run that tables average."""


# Files


def kept_file(folder: Path, setting: str, arm: str, seed: int) -> Path:
    """The transcript of an arm and seed. ``setting`` is a test set's name, then ``-`` and the name
    of a proxy other than the tuned one, or ``-rounds``.
    """
    plain = transcript_part_file(Path(), arm, seed).name
    return folder / f"{setting}.{plain}.gz"


def public_file(folder: Path, setting: str, arm: str, seed: int) -> Path:
    """The results of the public test, for the revisions of ``kept_file``."""
    transcript = kept_file(folder, setting, arm, seed)
    return transcript.with_name(f"public.{transcript.name}")


def curve_file(folder: Path, run: str, seed: int) -> Path:
    """The kept steps of a run of reinforcement."""
    return folder / f"curve.{run}.seed{seed}.jsonl"


def kept_turns(folder: Path, setting: str) -> list[Turn]:
    """All transcripts of a setting, in the order of their files' names."""
    paths = sorted(folder.glob(f"{setting}.*.jsonl.gz"))
    return [
        turn_from_json(record, place)
        for p in paths
        for place, record in read_json_lines_with_places(p)
    ]


def kept_public(folder: Path, setting: str) -> Mapping[str, Public]:
    """Arm -> the results of the public test."""
    found: dict[str, dict[tuple[str, int, int], bool]] = defaultdict(dict)
    for path in sorted(folder.glob(f"public.{setting}.*.jsonl.gz")):
        for _, line in read_json_lines_with_places(path):
            place = line["attempt"], line["seed"], line["sample"]
            found[line["critic"]][place] = line["passed"]
    return found


def kept_steps(folder: Path, run: str) -> Mapping[int, Sequence[Step]]:
    """Seed -> the kept steps of the runs of one name."""
    files = {seed: curve_file(folder, run, seed) for seed in SEEDS}
    return {seed: read_json_lines(file) for seed, file in files.items() if file.exists()}


# Measured arms


def arms_of(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    """Arm -> its turns, in the order of the tables."""
    found: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        found[turn.critic].append(turn)
    return {name: found[name] for name in (*WRITTEN, *ARMS) if name in found}


def result_of(turns: Sequence[Turn]) -> CriticResult:
    """The rates of one arm."""
    (result,) = evaluate_turns(turns, ks=(1, SAMPLES))
    return result


def gain_of(turns: Mapping[str, Sequence[Turn]], arm: str, seed: int | None = None) -> str:
    """What an arm's revisions pass beyond those of its base, paired by problem, for the seeds of
    both or for one and the first solutions that were judged for both. "" for an arm without a base,
    and "open" where they share nothing.
    """
    if arm not in ARMS or ARMS[arm].base == arm:
        return ""
    both = [turns.get(name, []) for name in (arm, ARMS[arm].base)]
    given = [{_given(turn) for turn in part if turn.after is not None} for part in both]
    shared = {place for place in set.intersection(*given) if seed in (None, place[0])}
    if not shared:
        return "open"
    mine, base = (
        _cells(by_problem((turn for turn in part if _given(turn) in shared), _pass_rate))
        for part in both
    )
    return told(_resampling(mine.shape[1], mine.shape[0]).difference(mine, base, ratio_of_columns))


def _given(turn: Turn) -> tuple[int, str, str]:
    return turn.seed, turn.attempt, turn.solution


def _pass_rate(turn: Turn) -> float | None:
    return None if turn.after is None else turn.after.pass_rate


def _first_rate(turn: Turn) -> float | None:
    return None if turn.before is None else turn.before.pass_rate


def by_problem(
    turns: Iterable[Turn], value: Callable[[Turn], float | None]
) -> dict[tuple[int, str], float]:
    """(seed, problem) -> the mean of ``value`` over its chains; turns whose value is None are left
    out.
    """
    parts: dict[tuple[int, str], list[float]] = defaultdict(list)
    for turn in turns:
        if (found := value(turn)) is not None:
            parts[turn.seed, turn.problem_id].append(found)
    return {place: fmean(values) for place, values in parts.items()}


def mean_over_problems(values: Mapping[tuple[int, str], float]) -> Estimate | None:
    """The mean of values by (seed, problem), with the interval of the crossed bootstrap; None
    without any.
    """
    if not values:
        return None
    cells = _cells(values)
    return _resampling(cells.shape[1], cells.shape[0]).estimate(cells, ratio_of_columns)


def _cells(values: Mapping[tuple[int, str], float]) -> Cells:
    seeds = sorted({seed for seed, _ in values})
    problems = sorted({problem for _, problem in values})
    parts = [(seeds.index(s), problems.index(p), (v, 1.0)) for (s, p), v in values.items()]
    return sum_into_cells(parts, len(seeds), len(problems))


@cache
def _resampling(problems: int, seeds: int) -> Resampling:
    return Resampling(problems, seeds)


def told(rate: Estimate | None) -> str:
    """A number with its interval; "" for None."""
    if rate is None:
        return ""
    around = "" if rate.low is None else f" [{rate.low:.3f}, {rate.high:.3f}]"
    return f"{rate.value:.3f}{around}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with a line break at its end. Columns without any entry are left out."""
    rows = list(rows)
    kept = [n for n in range(len(heads)) if n == 0 or any(row[n] for row in rows)]
    every = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(row[n] for n in kept)} |\n" for row in every)


# Tables of a test set


def test_set_part(
    title: str, arms: Mapping[str, Sequence[Turn]], results: Mapping[str, CriticResult]
) -> str:
    """The tables of a test set of wrong programs: rates, gains by seed, critiques."""
    before = next(iter(results.values())).curves[0]
    rows = [["first solutions", "", *(told(before.get(name)) for name in _RATES), ""]]
    for name, result in results.items():
        rates = [told(result.last_turn_rates.get(rate)) for rate in _RATES]
        rows.append([name, ", ".join(map(str, result.seeds)), *rates, gain_of(arms, name)])
    compared = [name for name, arm in ARMS.items() if name in arms and arm.base != name]
    by_seed = [[name, *(gain_of(arms, name, seed) for seed in SEEDS)] for name in compared]
    parts = [
        f"## {title}\n",
        _counted([turn for turns in arms.values() for turn in turns]),
        table(("arm", "seeds", *_RATES, "pass_rate over its base"), rows),
    ]
    if by_seed:
        parts += ["Gains by seed:\n", table(("arm", *(f"seed {s}" for s in SEEDS)), by_seed)]
    if firsts := firsts_table(arms):
        parts += ["Gains by the tests that the first solution passes:\n", firsts]
    parts += [
        "Critiques: their length, the share of them that contain most of the revised program "
        f"(more than {COPYING_THRESHOLD:.0%} of its lines) or all of it, and what is left where "
        "the first solution takes the place of the revision of such a critique:\n",
        critiques_table(arms),
    ]
    if edits := edits_table(arms):
        parts += [
            "Edits: the shares of critiques that ask for an edit which can be made, for one that "
            "overlaps the fault, and for the oracle's repair; and the share of these edits that "
            "the proxy makes, and nothing else:\n",
            edits,
        ]
    return "\n".join(parts)


_CLASSES: Mapping[str, Callable[[float], bool]] = {
    "none": lambda rate: rate == 0,
    "up to a quarter": lambda rate: 0 < rate <= 0.25,
    "more": lambda rate: rate > 0.25,
}
"""Classes of first solutions, by the share of their tests that pass: critics are reinforced on the
first two."""


def firsts_table(arms: Mapping[str, Sequence[Turn]]) -> str:
    """What trained arms gain over their bases, for every class of first solutions; "" where one
    class has all of them.
    """
    rows: Rows = []
    for name, holds in _CLASSES.items():
        part = {
            arm: [t for t in turns if (rate := _first_rate(t)) is not None and holds(rate)]
            for arm, turns in arms.items()
        }
        for arm in (a for a in arms if part[a] and a in ARMS and ARMS[a].base != a):
            rates = (
                told(mean_over_problems(by_problem(part.get(of, ()), rate)))
                for of, rate in (
                    (arm, _first_rate),
                    (ARMS[arm].base, _pass_rate),
                    (arm, _pass_rate),
                )
            )
            number = len({turn.attempt for turn in part[arm]})
            rows.append([arm, name, str(number), *rates, gain_of(part, arm)])
    if len({row[1] for row in rows}) < 2:
        return ""
    heads = ("arm", "passed", "programs", "first solutions", "its base", "pass_rate")
    return table((*heads, "over its base"), rows)


def _counted(turns: Sequence[Turn]) -> str:
    attempts = {turn.attempt for turn in turns}
    problems = {turn.problem_id for turn in turns}
    return (
        f"{len(attempts)} first solutions of {len(problems)} problems; every problem counts the "
        f"same. pass@{SAMPLES} is shown if every problem has {SAMPLES} chains. A trained arm is "
        "compared with its base, for the seeds of both: SFT, or the SFT that it was reinforced "
        "from.\n"
    )


def _copied_of(turn: Turn) -> float:
    """Share of the revised program's lines that the critique contains."""
    return 0.0 if turn.critique is None else _copied(turn.critique, turn.revision)


@cache
def _copied(critique: str, revision: str) -> float:
    return copied_line_share(critique, extract_code(revision))


def without_copies(turns: Iterable[Turn]) -> list[Turn]:
    """The turns, with the first solution in place of the revision where the critique contains most
    of the revised program.
    """
    return [
        replace(turn, revision=turn.solution, after=turn.before)
        if _copied_of(turn) > COPYING_THRESHOLD
        else turn
        for turn in turns
    ]


def critiques_table(arms: Mapping[str, Sequence[Turn]]) -> str:
    """Lengths of critiques, shares that contain the program, and what is left without those."""
    left = {name: without_copies(turns) for name, turns in arms.items()}
    rows: Rows = []
    for name, turns in arms.items():
        tokens = mean_over_problems(by_problem(turns, lambda t: t.critique_tokens or None))
        length = f"{tokens.value:.1f} [{tokens.low:.1f}, {tokens.high:.1f}]" if tokens else ""
        shares = [
            told(mean_over_problems(by_problem(turns, lambda t, s=share: _copied_of(t) > s)))
            for share in (COPYING_THRESHOLD, 1 - 1e-9)
        ]
        rest = told(mean_over_problems(by_problem(left[name], _pass_rate)))
        rows.append([name, length, *shares, rest, gain_of(left, name)])
    heads = ("arm", "tokens", "most of the program", "all of it", "pass_rate without these")
    return table((*heads, "over its base without these"), rows)


_QUOTED = r"`([^\n]+?)`"
_EDIT = re.compile(
    rf"Replace {_QUOTED} with {_QUOTED}\.|Change {_QUOTED} to {_QUOTED}\.|"
    rf"Use {_QUOTED} instead of {_QUOTED}\."
)


def asked_edit(critique: str | None) -> tuple[str, str] | None:
    """(what a critique asks to replace, what to put there), in the wordings of SFT's examples."""
    found = _EDIT.search(critique or "")
    if found is None:
        return None
    first, second, third, fourth, right, wrong = found.groups()
    return (wrong, right) if wrong else (first or third, second or fourth)


def edited(turn: Turn) -> str | None:
    """The program after the edit that the critique asks for; None where it asks for none, or for
    one that changes nothing or has no single place.
    """
    edit, code = asked_edit(turn.critique), extract_code(turn.solution)
    if edit is None or edit[0] == edit[1] or count_occurrences(code, edit[0]) != 1:
        return None
    return code.replace(*edit)


def edits_table(arms: Mapping[str, Sequence[Turn]]) -> str:
    """What critiques ask for, against the oracle's edit, and whether the proxy does it; "" where
    the oracle was not measured.
    """
    known = {
        t.attempt: (asked_edit(t.critique), edited(t)) for t in arms.get(ORACLE, ()) if edited(t)
    }
    measures: tuple[Callable[[Turn], float | None], ...] = (
        lambda t: edited(t) is not None,
        lambda t: _at_the_fault(t, known[t.attempt][0]),
        lambda t: edited(t) == known[t.attempt][1],
        lambda t: None if edited(t) is None else extract_code(t.revision) == edited(t),
    )
    rows: Rows = []
    for name in [name for name in arms if known and name in (ORACLE, *ARMS)]:
        turns = [turn for turn in arms[name] if turn.attempt in known]
        shares = (mean_over_problems(by_problem(turns, measure)) for measure in measures)
        rows.append([name, *map(told, shares)])
    heads = ("arm", "asks for an edit", "at the fault", "the oracle's repair")
    return table((*heads, "of edits, done by the proxy"), rows) if rows else ""


def _at_the_fault(turn: Turn, fault: tuple[str, str] | None) -> bool:
    """Whether the critique asks for an edit that overlaps the faulty expression."""
    edit, code = asked_edit(turn.critique), extract_code(turn.solution)
    if edit is None or fault is None or edited(turn) is None:
        return False
    (start, end), (first, last) = (
        (code.index(text), code.index(text) + len(text)) for text in (edit[0], fault[0])
    )
    return start < last and first < end


# Tables across test sets


def proxies_part(folder: Path) -> str:
    """Critics and oracles with all proxies: trained with one, measured with all. "" before some
    test set has two.
    """
    heads = ("arm", "trained with", *(f"revised by {proxy.name}" for proxy in PROXIES))
    parts = []
    for test in TESTS:
        found = {
            p.name: arms_of(kept_turns(folder, setting_of(test.name, p.name))) for p in PROXIES
        }
        others = {n for name, arms in found.items() if name != test.proxy.name for n in arms}
        rows: Rows = []
        for name in [name for name in (ORACLE, *ARMS) if name in others]:
            trained = ARMS[name].proxy.name if name in ARMS and ARMS[name].reinforced else ""
            rows.append([name, trained, *(_by_proxy(arms, name) for arms in found.values())])
        if rows:
            parts.append(f"{test.title}:\n\n{table(heads, rows)}")
    if not parts:
        return ""
    text = "pass_rate after revision by each proxy, and the gain over the arm's base with it:\n\n"
    return f"## Proxies\n\n{text}" + "\n".join(parts)


def _by_proxy(arms: Mapping[str, Sequence[Turn]], name: str) -> str:
    if name not in arms:
        return "open"
    rate, gain = told(mean_over_problems(by_problem(arms[name], _pass_rate))), gain_of(arms, name)
    return f"{rate} ({gain})" if gain else rate


def setting_of(test: str, proxy: str) -> str:
    """The name of a test set as revised by a proxy."""
    return test if proxy == TUNED.name else f"{test}-{proxy}"


ROUNDS_SETTING = f"{UNSEEN_MUTANTS.name}-rounds"


def rounds_part(folder: Path) -> str:
    """pass@1 by round against as many independent critiques; "" without such transcripts."""
    arms, public = arms_of(kept_turns(folder, ROUNDS_SETTING)), kept_public(folder, ROUNDS_SETTING)
    rows = [
        [name, str(n), *cells]
        for name, turns in arms.items()
        for n, cells in enumerate(rounds_rows(turns, public.get(name)), start=1)
    ]
    if not rows:
        return ""
    text = (
        "pass@1 on unseen mutants after n rounds, each of which criticises and revises the last "
        "revision, and after n independent critiques of the first solution: one of them at "
        "random, one that passes the public test (the problem's first one, which also counts "
        "afterwards), and any (pass@n, an upper bound that knows all tests). Tokens are those "
        "written for one program.\n"
    )
    heads = (
        *("arm", "n", "last of n rounds", "tokens", "one at random", "chosen by the public test"),
        *("pass@n", "tokens of n critiques"),
    )
    return f"## Rounds\n\n{text}\n{table(heads, rows)}"


def rounds_rows(turns: Sequence[Turn], public: Public | None) -> Rows:
    """For n = 1 to ROUNDS: the share that the last of n rounds solves and its tokens, the shares
    that one of n critiques at random, one chosen by ``public`` and any of them solves, and their
    tokens. Without ``public`` that column is empty.
    """
    chains: dict[tuple[int, str, str], dict[int, list[Turn]]] = defaultdict(dict)
    for turn in sorted(turns, key=lambda t: t.turn):
        place = turn.seed, turn.problem_id, turn.attempt
        chains[place].setdefault(turn.sample, []).append(turn)
    rows: Rows = []
    for n in range(1, ROUNDS + 1):
        columns: list[dict[tuple[int, str], list[float]]] = [defaultdict(list) for _ in range(6)]
        for (seed, problem, attempt), samples in chains.items():
            first = [chain[0] for chain in samples.values()]
            solved = [_solved(turn) for turn in first]
            passed = None
            if public is not None:
                passed = [public[attempt, seed, turn.sample] for turn in first]
            values = (
                fmean(_solved(chain[n - 1]) for chain in samples.values()),
                fmean(sum(map(_tokens, chain[:n])) for chain in samples.values()),
                fmean(solved),
                None if passed is None else chosen_solves(solved, passed, n),
                pass_at_k(len(solved), sum(solved), n),
                n * fmean(map(_tokens, first)),
            )
            for column, value in zip(columns, values, strict=True):
                if value is not None:
                    column[seed, problem].append(value)
        means = [
            mean_over_problems({at: fmean(values) for at, values in column.items()})
            for column in columns
        ]
        rows.append(
            [
                (f"{mean.value:.0f}" if mean else "") if place in (1, 5) else told(mean)
                for place, mean in enumerate(means)
            ]
        )
    return rows


def chosen_solves(solved: Sequence[bool], passed: Sequence[bool], n: int) -> float:
    """Probability that a sample is right which is chosen from ``n`` random ones: one of those that
    pass the public test, and any of them where none does.
    """
    found = []
    for drawn in combinations(range(len(solved)), n):
        kept = [place for place in drawn if passed[place]] or drawn
        found.append(fmean(solved[place] for place in kept))
    return fmean(found)


def _solved(turn: Turn) -> bool:
    return turn.after is not None and turn.after.accepted


def _tokens(turn: Turn) -> int:
    return turn.critique_tokens + turn.revision_tokens


def judging_part(folder: Path) -> str:
    """How well critics tell right programs from wrong ones; "" without transcripts."""
    turns = kept_turns(folder, setting_of(JUDGING.name, JUDGING.proxy.name))
    rows: Rows = []
    for name, mine in arms_of(turns).items():
        rates = result_of(mine).last_turn_rates
        shown = ("f1_macro", "judgment_accuracy", "judged_correct_rate", "valid_critique_rate")
        brier, error = calibration(mine)
        rows.append([name, *(told(rates.get(rate)) for rate in shown), told(brier), error])
    if not rows:
        return ""
    wrong = {t.attempt: t.before is not None and not t.before.accepted for t in turns}
    text = (
        f"{len(wrong)} programs, {sum(wrong.values())} of them wrong. The share of a program's "
        f"{SAMPLES} critiques that say incorrect is a critic's probability that it is wrong: Brier "
        "score is its mean squared error (0.25 for a coin), and the calibration error is its mean "
        "distance from the share of wrong programs among those with the same probability.\n"
    )
    heads = ("critic", "F1 (mean of both)", "right judgments", "says correct", "valid critiques")
    return f"## Judging\n\n{text}\n{table((*heads, 'Brier score', 'calibration error'), rows)}"


def calibration(turns: Iterable[Turn]) -> tuple[Estimate | None, str]:
    """(Brier score, expected calibration error) of the share of a program's judgments that say
    incorrect. Critiques without a judgment do not count.
    """
    said: dict[tuple[int, str, str], list[bool]] = defaultdict(list)
    wrong: dict[tuple[int, str, str], bool] = {}
    for turn in turns:
        if turn.judgment is not None and turn.before is not None:
            place = turn.seed, turn.problem_id, turn.attempt
            said[place].append(not turn.judgment)
            wrong[place] = not turn.before.accepted
    errors: dict[tuple[int, str], list[float]] = defaultdict(list)
    bins: dict[float, list[bool]] = defaultdict(list)
    for place, votes in said.items():
        errors[place[:2]].append((fmean(votes) - wrong[place]) ** 2)
        bins[fmean(votes)].append(wrong[place])
    if not said:
        return None, ""
    error = sum(len(b) * abs(p - fmean(b)) for p, b in bins.items()) / len(said)
    brier = {at: fmean(values) for at, values in errors.items()}
    return mean_over_problems(brier), f"{error:.3f}"


# Steps of reinforcement


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean over seeds and its 90 % interval by Student's t; no interval for one seed."""
    middle = fmean(values)
    if len(values) < 2:
        return Estimate(middle, None, None)
    half = _T_90[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return Estimate(middle, middle - half, middle + half)


def training_part(folder: Path) -> str:
    """The first and last steps of every kept run; "" without any."""
    rows: Rows = []
    for name, arm in ARMS.items():
        if runs := kept_steps(folder, arm.run):
            first, last = (
                [_ends(runs.values(), metric, place) for metric in KEPT_METRICS]
                for place in (slice(None, _ENDS), slice(-_ENDS, None))
            )
            pairs = [f"{a} to {b}" if a and b else "" for a, b in zip(first, last, strict=True)]
            pairs[0] = _ends(runs.values(), SECONDS, slice(None), digits=0)
            rows.append([name, ", ".join(map(str, runs)), *pairs])
    if not rows:
        return ""
    text = (
        f"Means of the first {_ENDS} and the last {_ENDS} steps, with 90 % intervals over seeds "
        "(Student's t). Explained variance is that of the value model before its update.\n"
    )
    heads = ("arm", "seeds", "seconds a step", "reward beyond the first solutions'")
    heads += ("explained variance", "tokens of a critique", "share of the program in it")
    return f"## Training\n\n{text}\n{table(heads, rows)}"


def _ends(runs: Iterable[Sequence[Step]], metric: str, place: slice, *, digits: int = 3) -> str:
    values = [[step[metric] for step in run[place] if metric in step] for run in runs]
    known = [fmean(part) for part in values if part]
    if not known:
        return ""
    mean = over_seeds(known)
    around = "" if mean.low is None else f" [{mean.low:.{digits}f}, {mean.high:.{digits}f}]"
    return f"{mean.value:.{digits}f}{around}"


def tasks_part(folder: Path) -> str:
    """The rewards of a mixture's tasks; "" before such a run is kept."""
    rows: Rows = []
    for name, arm in ARMS.items():
        runs = kept_steps(folder, arm.run)
        found = {
            key.split("/")[1] for run in runs.values() for s in run for key in s if TASK in key
        }
        for task in sorted(found):
            rows.append(
                [
                    *(name, task, ", ".join(map(str, runs))),
                    _ends(runs.values(), f"{TASK}{task}/share", slice(None)),
                    *(
                        _ends(runs.values(), f"{TASK}{task}/{of}", place)
                        for of in ("reward", "length")
                        for place in (slice(None, 2 * _ENDS), slice(-2 * _ENDS, None))
                    ),
                ]
            )
    if not rows:
        return ""
    at = f"first {2 * _ENDS} steps", f"last {2 * _ENDS} steps"
    heads = [f"{of}, {place}" for of in ("reward", "tokens") for place in at]
    heads = ["arm", "task", "seeds", "share", *heads]
    return f"## Tasks of a mixture\n\n{table(heads, rows)}"


Curves = dict[str, list[tuple[int, float]]]
Bands = dict[str, list[tuple[float, float] | None]]


def kept_curves(folder: Path, metric: str, over: str) -> tuple[Curves, Bands]:
    """Means over seeds of ``metric`` by arm, and their 90 % intervals, at every step that all kept
    seeds have. ``over`` is the horizontal axis: "critiques", "seconds" or "step".
    """
    curves: Curves = {}
    bands: Bands = {}
    for name in CURVES:
        runs = kept_steps(folder, ARMS[name].run)
        known = [
            {step["step"]: (at, step[metric]) for at, step in _placed(run, over) if metric in step}
            for run in runs.values()
        ]
        steps = sorted(set.intersection(*map(set, known))) if known else []
        if steps:
            seeds = ", ".join(map(str, runs))
            label = f"{name}, seed{'s' * (len(runs) > 1)} {seeds}"
            means = [over_seeds([run[step][1] for run in known]) for step in steps]
            places = [round(fmean(run[step][0] for run in known)) for step in steps]
            curves[label] = [(at, mean.value) for at, mean in zip(places, means, strict=True)]
            bands[label] = [
                None if m.low is None or m.high is None else (m.low, m.high) for m in means
            ]
    return curves, bands


def _placed(run: Sequence[Step], over: str) -> Iterable[tuple[float, Step]]:
    if over == "seconds":
        return zip(accumulate(step[SECONDS] for step in run), run, strict=True)
    factor = CRITIQUES if over == "critiques" else 1
    return ((step["step"] * factor, step) for step in run)


# Figures


def plot(title: str, results: Sequence[CriticResult], path: Path) -> None:
    """Draw the share of tests that revisions pass, one bar per arm with its 90 % interval, from the
    highest to the lowest. A vertical line marks the pass rate before any critique.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = title
    from matplotlib import pyplot

    ordered = sorted(results, key=lambda result: result.last_turn_rates["pass_rate"].value)
    figure, axes = pyplot.subplots(figsize=(7, 0.38 * len(ordered) + 1.6))
    for place, result in enumerate(ordered):
        rate = result.last_turn_rates["pass_rate"]
        low = rate.value if rate.low is None else rate.low
        high = rate.value if rate.high is None else rate.high
        color = "#1f5fa8" if result.critic in ARMS else "#a8b4c2"
        axes.barh(place, rate.value, height=0.62, color=color)
        axes.plot([low, high], [place, place], color="#222222", linewidth=1.2)
        axes.annotate(
            f"{rate.value:.0%}", (high, place), (5, 0), textcoords="offset points", va="center"
        )
    before = ordered[0].curves[0]["pass_rate"].value
    axes.axvline(before, color="#b3261e", linestyle="--", linewidth=1.2)
    axes.annotate(
        f"before critique: {before:.0%}",
        (before, len(ordered) - 0.4),
        (4, 0),
        textcoords="offset points",
        color="#b3261e",
        va="bottom",
    )
    axes.set_ylim(-0.6, len(ordered) + 0.2)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_yticks(range(len(ordered)), [result.critic for result in ordered])
    axes.set_xlabel("share of tests passed after revision, with 90 % intervals")
    axes.set_title(f"What the critique is worth: {title.lower()}")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_curves(folder: Path, out: Path) -> None:
    from ctrl_megatron.metrics.report.figures import curve_svg

    drawn = (
        ("curves", GAIN, "critiques", "critiques; reward beyond the first solutions'"),
        ("curves_seconds", GAIN, "seconds", "seconds; reward beyond the first solutions'"),
        ("explained_variance", EXPLAINED, "step", "step; explained variance"),
    )
    for name, metric, over, label in drawn:
        curves, bands = kept_curves(folder, metric, over)
        if curves:
            write_text_atomically(
                out / f"{name}.svg", curve_svg(curves, bands=bands, x_label=label)
            )


def write_tables(folder: Path, out: Path) -> None:
    """``tables.md`` and the figures in ``out``, from the files in ``folder``. UserError without any
    transcript.
    """
    parts = []
    for test in TESTS:
        setting = setting_of(test.name, test.proxy.name)
        arms = arms_of([] if test.judged else kept_turns(folder, setting))
        if arms:
            results = {name: result_of(turns) for name, turns in arms.items()}
            parts.append(test_set_part(test.title, arms, results))
            plot(test.title, list(results.values()), out / f"{test.name}.svg")
    if not parts:
        raise UserError(
            f"{folder} holds no transcript yet", remedy="run examples/study_smollm2/study.py first"
        )
    makers: tuple[Callable[[Path], Any], ...] = (
        *(proxies_part, rounds_part, judging_part, training_part, tasks_part),
    )
    parts += [part for make in makers if (part := make(folder))]
    _draw_curves(folder, out)
    write_text_atomically(out / "tables.md", "# Tables of the study\n\n" + "\n".join(parts))
