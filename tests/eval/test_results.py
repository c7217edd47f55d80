"""The tables of an evaluation against numbers worked out by hand and counted naively."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from evaluated import TWO_TURNS, chain, pair, program

from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.pairwise import PAIR_RATES
from ctrl_megatron.eval.rates import RATES
from ctrl_megatron.eval.resampling import Estimate
from ctrl_megatron.eval.results import CriticResult, evaluate_turns
from ctrl_megatron.eval.tables import report_tables
from ctrl_megatron.eval.transcripts import Turn
from ctrl_megatron.eval.validation_rates import validation_rates


def one(turns: list[Turn], **options: object) -> CriticResult:
    (result,) = evaluate_turns(turns, **options)  # type: ignore[arg-type]
    return result


def values(rates: dict[str, Estimate]) -> dict[str, float]:
    return {name: rate.value for name, rate in rates.items()}


def test_a_table_worked_out_by_hand() -> None:
    result = one(TWO_TURNS, ks=(1, 2, 3))
    assert (result.problems, result.attempts, result.chains) == (3, 3, 6)
    assert values(result.curves[0]) == {
        "pass@1": pytest.approx(1 / 3),
        "pass_rate": pytest.approx(0.5),
        "time_limit_rate": 0.0,
    }
    first = values(result.curves[1])
    assert first["pass@1"] == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert first["delta_up"] == pytest.approx((1 / 2) / 3)
    assert first["delta_down"] == pytest.approx((1 / 2) / 3)
    assert first["pass@2"] == pytest.approx(2 / 3)
    assert first["pass_rate"] == pytest.approx((0.75 + 0.5 + 0.125) / 3)
    assert first["valid_critique_rate"] == pytest.approx((1 + 1 + 1 / 2) / 3)
    assert first["judgment_accuracy"] == pytest.approx((1 + 1 + 1 / 2) / 3)
    # Right programs: 2, both called correct; wrong ones: 4, of which 3 are called incorrect.
    assert first["f1_correct"] == 1.0
    assert first["precision_incorrect"] == 1.0 and first["recall_incorrect"] == 0.75
    assert first["f1_macro"] == pytest.approx((1 + 6 / 7) / 2)
    second = values(result.curves[2])
    assert second["pass@1"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert second["delta_up"] == pytest.approx(1 / 3)
    assert second["delta_down"] == pytest.approx((1 / 2) / 3)
    # Both chains of p2 stop before anything is revised, and are right there.
    assert second["stopped_pass@1"] == pytest.approx((1 + 1 + 0) / 3)
    assert second["critique_tokens"] == 10.0 and second["revision_tokens"] == 20.0
    assert not any("pass@3" in rates for rates in result.curves)  # two samples
    assert values(result.last_turn_rates)["f1_macro"] == first["f1_macro"]
    assert values(result.last_turn_rates)["pass@1"] == second["pass@1"]
    levels = result.by_difficulty
    assert {level: found.problems for level, found in levels.items()} == {1: 2, 2: 1}
    assert levels[1].before is not None and levels[1].after is not None
    assert (levels[1].before.value, levels[1].after.value) == (0.0, 0.5)
    assert levels[2].after == Estimate(0.5, None, None)  # of one problem
    per_problem = {p.problem_id: p for p in result.per_problem}
    assert (per_problem["p1"].chains, per_problem["p1"].solved) == (2, 2)
    assert per_problem["p3"].pass_rate == pytest.approx(3 / 8)


def test_one_greedy_turn_says_what_validation_says() -> None:
    turns = [t for t in TWO_TURNS if t.turn == 1 and t.sample == 0]
    found = values(one(turns).last_turn_rates)

    told = validation_rates(turns)
    names = {
        **{"solved_after": "pass@1", "revision_pass_rate": "pass_rate", "to_right": "delta_up"},
        **{"to_wrong": "delta_down", "valid_critique_rate": "valid_critique_rate"},
        "judgment_accuracy": "judgment_accuracy",
    }
    assert {old: found[new] for old, new in names.items()} == {
        old: pytest.approx(told[old]) for old in names
    }


def random_turns(critic: str, seed: int, shift: float = 0.0) -> list[Turn]:
    """12 problems with two samples and three seeds; the first solutions do not depend on the
    critic.
    """
    generator, first = np.random.default_rng(seed), np.random.default_rng(99)
    start = first.integers(0, 5, size=12).tolist()
    return [
        turn
        for run in range(3)
        for problem in range(12)
        for sample in range(2)
        for turn in chain(
            f"p{problem}",
            "".join(generator.choice(list("CI-"), size=1)),
            (start[problem], 4 if generator.random() < 0.4 + shift else 1),
            critic=critic,
            sample=sample,
            seed=run,
        )
    ]


def test_up_minus_down_is_the_change_and_intervals_hold_their_value() -> None:
    result = one(random_turns("a", 0))
    last = result.last_turn_rates
    change = last["pass@1"].value - result.curves[0]["pass@1"].value
    assert change == pytest.approx(last["delta_up"].value - last["delta_down"].value)
    for name, rate in last.items():
        assert rate.low is not None and rate.high is not None, name
        assert rate.low <= rate.value <= rate.high, name
        known = name if not name.startswith("pass@") else "pass@1"
        assert known in RATES


def test_gains_are_over_the_first_critic_on_the_same_attempts() -> None:
    weak, strong = random_turns("weak", 1), random_turns("strong", 2, shift=0.4)
    first, second = evaluate_turns([*weak, *strong])
    gain = second.gains["pass@1"]
    assert first.gains == {}
    assert gain.value == pytest.approx(
        second.last_turn_rates["pass@1"].value - first.last_turn_rates["pass@1"].value
    )
    assert gain.low is not None and gain.high is not None and 0 < gain.low < gain.value < gain.high
    same, copied = evaluate_turns(
        [*weak, *(dataclasses.replace(turn, critic="copy") for turn in weak)]
    )
    assert same.last_turn_rates == copied.last_turn_rates
    assert set(copied.gains.values()) == {Estimate(0.0, 0.0, 0.0)}
    assert first.compared is None and second.compared == (12 * 3, 12 * 3)
    others = [turn for turn in strong if turn.problem_id != "p3"]
    assert evaluate_turns([*weak, *others])[1].gains == {}
    # Rows of another file may have the same ids.
    other = [
        dataclasses.replace(turn, solution=turn.solution + " " * (turn.problem_id == "p3"))
        for turn in strong
    ]
    for turns in (others, other):
        result = evaluate_turns([*weak, *turns])[1]
        assert (result.gains, result.compared) == ({}, None)
        (told,) = [rows for title, _, _, rows in report_tables([first, result]) if title == "Gains"]
        assert told == [["strong", "not the same"]]


def test_a_lost_verdict_takes_its_first_solution_alone_out_of_the_gains() -> None:
    weak, strong = random_turns("weak", 1), random_turns("strong", 2, shift=0.4)

    def lost(turn: Turn) -> bool:
        return (turn.problem_id, turn.seed) == ("p3", 1)

    # Both samples of one problem and seed on one side, one sample of another on the other side.
    some = [dataclasses.replace(turn, after=None) if lost(turn) else turn for turn in strong]
    place = next(i for i, t in enumerate(weak) if (t.problem_id, t.seed) == ("p5", 0))
    weak[place] = dataclasses.replace(weak[place], after=None)
    result = evaluate_turns([*weak, *some], ks=(1, 2))[1]
    assert result.compared == (35, 36) and result.unjudged == 2
    both = [[t for t in turns if not lost(t)] for turns in (weak, strong)]
    without = evaluate_turns([*both[0], *both[1]])[1]
    assert result.gains == without.gains and without.compared == (35, 35)
    (told,) = [rows for title, _, _, rows in report_tables([without, result]) if title == "Gains"]
    assert told[0][1] == "35 of 36"
    # pass@2 is that of the places which have two chains.
    assert result.too_few == {"pass@2": (1, 36)}
    assert (
        result.last_turn_rates["pass@2"]
        == evaluate_turns(both[1], ks=(1, 2))[0].last_turn_rates["pass@2"]
    )
    note = report_tables([result])[0][1]
    assert "strong: pass@2 leaves out 1 of 36 problems (times seeds) with fewer than 2" in note
    nothing = evaluate_turns([*weak, *some], ks=(1, 4))[1]
    assert nothing.too_few == {"pass@4": (36, 36)} and "pass@4" not in nothing.last_turn_rates


@pytest.mark.parametrize("samples", [(3, 1), (2, 2), (1, 3)])
def test_pass_at_k_is_shown_if_every_problem_has_k_chains(samples: tuple[int, int]) -> None:
    """A pass@k over only those problems that have k chains could not be compared with pass@1. It
    does not matter if a problem's chains are samples or begin with several first solutions.
    """
    turns = [
        turn
        for problem, count in zip(("p1", "p2"), samples, strict=True)
        for n in range(count)
        for turn in chain(problem, "I", (0, 4), attempt=f"{problem}/{n}")
    ]
    (result,) = evaluate_turns(turns, ks=(1, 2, 3))
    shown = [k for k in (2, 3) if f"pass@{k}" in result.last_turn_rates]
    assert shown == [k for k in (2, 3) if min(samples) >= k]
    assert set(result.too_few) == {f"pass@{k}" for k in (2, 3)} - {f"pass@{k}" for k in shown}
    title, note, head, _ = report_tables([result])[0]
    assert title == "Solved after revision" and [f"pass@{k}" in head for k in (2, 3)] == [
        k in shown for k in (2, 3)
    ]
    assert ("pass@3 is missing, because" in note) == (3 not in shown)


def test_chains_that_could_not_be_judged_are_left_out_and_counted() -> None:
    lost = dataclasses.replace(chain("p4", "I", (0, 4))[0], after=None)
    known = chain("p1", "I", (2, 4))
    result = one([*known, lost])
    assert (result.chains, result.unjudged) == (1, 1)
    assert values(result.last_turn_rates) == values(one(known).last_turn_rates)
    with pytest.raises(UserError, match="no whole chain of ours"):
        one([lost])


def test_a_turn_without_a_critique_keeps_the_solution_and_is_counted() -> None:
    long = dataclasses.replace(
        chain("p1", "-", (2, 2))[0], critique=None, critique_tokens=0, revision_tokens=0
    )
    result = one([long, *chain("p2", "C", (4, 4))])
    assert result.overlong == 1
    assert (
        values(result.last_turn_rates)["valid_critique_rate"] == 1.0
    )  # of the critiques that there are
    assert values(result.last_turn_rates)["pass@1"] == 0.5


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([*TWO_TURNS, TWO_TURNS[0]], "two transcripts of ours"),
        (TWO_TURNS[:-1], r"has turns \[1\], others 2"),
        (TWO_TURNS[1:], r"has turns \[2\], others 2"),
    ],
)
def test_transcripts_that_are_not_whole_are_refused(turns: list[Turn], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluate_turns(turns)


def test_time_limits_are_counted() -> None:
    slow = dataclasses.replace(chain("p1", "I", (2, 0))[0], after=program(0, timed_out=True))
    result = one([slow, *chain("p2", "I", (0, 4))])
    assert result.curves[0]["time_limit_rate"].value == 0.0
    assert result.curves[1]["time_limit_rate"].value == 0.5


def test_pairs_worked_out_by_hand() -> None:
    pairs = [
        pair("A>B", ("first", "second"), "CC", "CI"),  # right both ways; 2 of 2 against 1 of 2
        pair("B>A", ("second", "second"), "II", "I-"),  # contradicts itself; a tie
        pair("B>A", ("second", None), "C", "CC"),  # one answer decides; a tie of shares
        pair("A>B", ("second", "first"), "I", "C"),  # wrong
    ]
    assert [p.decision for p in pairs] == ["A>B", None, "B>A", "B>A"]
    (result,) = evaluate_turns(TWO_TURNS, pairs)
    assert [*result.pairs] == ["all"]  # of one source
    assert values(result.pairs["all"]) == {
        "choice_accuracy": 0.5,
        "choice_consistency": 0.5,
        # Seven answers to eight questions, two of them for what stood first.
        "choice_answered_rate": 7 / 8,
        "choice_first_rate": pytest.approx(2 / 7),
        "critique_accuracy": 0.25,
    }
    assert result.pairs["all"].keys() == PAIR_RATES.keys()
    (silent,) = evaluate_turns(TWO_TURNS, [pair("A>B", (None, None), "C", "I")])
    rates = values(silent.pairs["all"])
    assert rates["choice_answered_rate"] == 0.0 and "choice_first_rate" not in rates
    mixed = [
        dataclasses.replace(p, source=f"{'mmlu-pro-' * (n % 2)}{n % 2}")
        for n, p in enumerate(pairs)
    ]
    (result,) = evaluate_turns(TWO_TURNS, mixed)
    assert [(s, rates["choice_accuracy"].value) for s, rates in result.pairs.items()] == [
        *(("all", 0.5), ("0", 1.0), ("mmlu-pro", 0.0))
    ]
