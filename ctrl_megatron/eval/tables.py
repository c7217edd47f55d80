"""The tables of an evaluation's report, which its Markdown and its HTML page share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ctrl_megatron.eval.labelled import OTHER_RULES
from ctrl_megatron.eval.pairwise import PAIR_RATES
from ctrl_megatron.eval.rates import JUDGED, RATES, SCORED
from ctrl_megatron.eval.resampling import Estimate
from ctrl_megatron.eval.results import CriticResult
from ctrl_megatron.eval.rounds import ROUNDS
from ctrl_megatron.eval.scores import SCORES, SELECTORS
from ctrl_megatron.metrics.display import format_number
from ctrl_megatron.metrics.report.document import Table

NUMBERS = ("critique_tokens", "revision_tokens", "tokens")
"""Rates that are numbers of tokens and not shares."""
MAIN_RATES = (
    *("pass@1", "delta", "delta_up", "delta_down", "pass_rate", "stopped_pass@1"),
    *("time_limit_rate", "similarity"),
)
"""Rates of the main table."""
_CHANGES = ("delta", "over_first_turn", "gain_after_true_judgment", "gain_after_false_judgment")
"""Rates that are differences and have a sign."""
_JUDGMENT_RATES = (
    *("valid_critique_rate", "judgment_accuracy", "judged_correct_rate", *JUDGED, *SCORED),
    *_CHANGES[2:],
)


def report_tables(
    results: Sequence[CriticResult], labelled: Sequence[CriticResult] = ()
) -> list[Table]:
    """All tables of the report. A column without values is left out. ``labelled`` are results on
    answers whose verdict a file names."""
    listed = [
        _rates_table(
            "Solved after revision",
            " ".join(
                ["After the last turn; up and down count from the first solutions.", *_few(results)]
            ),
            results,
            [*MAIN_RATES[:1], *_more_ks(results), *MAIN_RATES[1:]],
        ),
    ]
    if any(name in result.last_turn_rates for result in results for name in _JUDGMENT_RATES):
        kind = SCORES[results[0].confidence]
        note = (
            "Critiques of the first turn, in which all critics criticise the same programs. "
            f"Scores for auc, ece and brier: {kind}."
        )
        listed.append(
            _rates_table("Judgments", f"{note}{_one_class(results)}", results, _JUDGMENT_RATES)
        )
    if any(len(result.curves) > 2 for result in results):
        listed.append(_rounds_table(results))
    if len(results) > 1:
        listed.append(_gains_table(results))
    if numbers := sorted({n for result in results for n in result.best_of}):
        listed.append(_best_of_table(results, numbers))
    levels = sorted({level for result in results for level in result.by_difficulty})
    if len(levels) > 1:
        rows = [
            [
                str(level),
                result.critic,
                str(at.problems),
                *(rate_and_interval_text(one, "pass@1") for one in (at.before, at.after)),
            ]
            for level in levels
            for result in results
            if (at := result.by_difficulty.get(level)) is not None
        ]
        head = ["difficulty", "critic", "problems", "pass@1 before", "pass@1 after"]
        listed.append(Table("By difficulty", "", head, rows))
    if any(result.pairs for result in results):
        rows = [
            [
                r.critic,
                source,
                *(rate_and_interval_text(rates.get(name), name) for name in PAIR_RATES),
            ]
            for r in results
            for source, rates in r.pairs.items()
        ]
        note = (
            "; ".join(f"{rate_in_words(name)}: {text}" for name, text in PAIR_RATES.items()) + "."
        )
        listed.append(
            Table("Pairs", note, ["critic", "source", *map(rate_in_words, PAIR_RATES)], rows)
        )
    if labelled:
        listed.append(_labelled_table(labelled))
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
    listed.append(Table("What was counted", "", head, rows))
    return listed


def _few(results: Sequence[CriticResult]) -> Iterable[str]:
    """A sentence for every pass@K that leaves problems out or is missing because of that."""
    for result in results:
        for name, (count, places) in result.too_few.items():
            least, of = name.partition("@")[2], f"{count} of {places} problems (times seeds)"
            if name in result.last_turn_rates:
                what = f"leaves out {of} with fewer than {least} judged chains"
            else:
                what = f"is missing, because {of} have fewer than {least} chains"
            yield f"{result.critic}: {name} {what}."


def _one_class(results: Sequence[CriticResult]) -> str:
    """The reason for a missing F1; empty where it exists."""
    if any("f1_macro" in result.last_turn_rates for result in results):
        return ""
    return " There is no F1: all of the programs are right, or all are wrong."


def _labelled_table(results: Sequence[CriticResult]) -> Table:
    names = ("judgment_accuracy", "judged_correct_rate", "f1_macro", *SCORED)
    note = "Nothing is run or revised. " + "; ".join(
        f"{rate_in_words(name)}: {text}" for name, text in OTHER_RULES.items()
    )
    rows = [
        [
            *(
                r.critic,
                str(r.attempts),
                rate_and_interval_text(r.curves[0].get("pass@1"), "pass@1"),
            ),
            *(rate_and_interval_text(r.last_turn_rates.get(name), name) for name in names),
            *(rate_and_interval_text(r.other_rules.get(name), name) for name in OTHER_RULES),
        ]
        for r in results
    ]
    head = ["critic", "answers", "right", *map(rate_in_words, (*names, *OTHER_RULES))]
    return Table("Labelled answers", f"{note}.", head, rows)


def _rounds_table(results: Sequence[CriticResult]) -> Table:
    names = ("pass@1", "over_first_turn", "undone", "stopped_pass@1", *ROUNDS[1:3])
    compared = ("tokens", "majority_of_n", "any_of_n")
    rows = [
        [
            *(result.critic, str(turn)),
            *(rate_and_interval_text(rates.get(name), name) for name in names),
            rate_and_interval_text(rates.get("tokens"), "tokens"),
            str(result.single_rounds[turn - 1] or "-"),
            *(rate_and_interval_text(rates.get(name), name) for name in compared[1:]),
        ]
        for result in results
        if len(result.curves) > 2
        for turn, rates in enumerate(result.curves)
        if turn
    ]
    note = (
        "After each turn, which criticises and revises what the turn before revised. Beside it, n "
        "single rounds from the first solution, which cost no more tokens; without an n some first "
        "solution has fewer chains (--samples)."
    )
    head = ["critic", "turn", *map(rate_in_words, names), "tokens", "n"]
    return Table("Rounds", note, [*head, *map(rate_in_words, compared[1:])], rows)


def _best_of_table(results: Sequence[CriticResult], numbers: Sequence[int]) -> Table:
    note = (
        "pass@1 of the chosen one of n first solutions of a problem, before any revision. "
        + "; ".join(f"{selector}: {text}" for selector, text in SELECTORS.items())
        + "."
    )
    rows = [
        [
            str(n),
            result.critic,
            *(rate_and_interval_text(result.best_of[n].get(name), name) for name in SELECTORS),
        ]
        for n in numbers
        for result in results
        if n in result.best_of
    ]
    return Table("Best of n", note, ["n", "critic", *SELECTORS], rows)


def _gains_table(results: Sequence[CriticResult]) -> Table:
    """A row for every critic but the first, also without a common program to compare."""
    first, *others = results
    names = [name for name in RATES if any(name in result.gains for result in others)]
    rows = [
        [
            result.critic,
            "not the same" if result.compared is None else "{} of {}".format(*result.compared),
            *(rate_difference_text(result.gains.get(name), name) for name in names),
        ]
        for result in others
    ]
    note = (
        f"Differences to {first.critic} in percentage points, paired by problem, over the first "
        "solutions (times seeds) that both were judged on; pass@1 of these before: "
        f"{rate_and_interval_text(first.curves[0].get('pass@1'), 'pass@1')}."
    )
    return Table("Gains", note, ["critic", "first solutions", *map(rate_in_words, names)], rows)


def _rates_table(
    title: str,
    note: str,
    results: Sequence[CriticResult],
    names: Sequence[str],
) -> Table:
    known = [name for name in names if any(name in result.last_turn_rates for result in results)]
    head = ["critic", "pass@1 before", *map(rate_in_words, known)]
    rows = [
        [
            result.critic,
            rate_and_interval_text(result.curves[0].get("pass@1"), "pass@1"),
            *(rate_and_interval_text(result.last_turn_rates.get(name), name) for name in known),
        ]
        for result in results
    ]
    return Table(title, note, head, rows)


def _more_ks(results: Sequence[CriticResult]) -> list[str]:
    names = {
        n for r in results for n in r.last_turn_rates if n.startswith("pass@") and n != "pass@1"
    }
    return sorted(names, key=lambda name: int(name.partition("@")[2]))


def rate_and_interval_text(rate: Estimate | None, name: str) -> str:
    """The rate ``name`` with its interval as text; with a sign where it is a difference."""
    if rate is None or name in _CHANGES:
        return rate_difference_text(rate, name)
    return rate_text(rate.value, name) + _interval(rate, name)


def rate_difference_text(rate: Estimate | None, name: str) -> str:
    if rate is None:
        return "-"
    sign = "+" if rate.value >= 0 else ""
    return sign + rate_text(rate.value, name) + _interval(rate, name)


def _interval(rate: Estimate, name: str) -> str:
    if rate.low is None or rate.high is None:
        return ""
    return f" [{rate_text(rate.low, name)}, {rate_text(rate.high, name)}]"


def rate_text(value: float, name: str) -> str:
    """The value of the rate ``name`` as text: a share in percent, or a number of tokens."""
    return f"{value:.1f}" if name in NUMBERS else format_number(value, percent=True)


def rate_in_words(name: str) -> str:
    return name.replace("_", " ")


def rate_meanings(results: Sequence[CriticResult]) -> list[tuple[str, str]]:
    """(rate in words, its meaning) for every rate of ``results``."""
    shown = {name for result in results for name in result.last_turn_rates}
    if any(name.startswith("pass@") and name != "pass@1" for name in shown):
        shown.add("pass@K")
    return [(rate_in_words(name), text) for name, text in RATES.items() if name in shown]
