"""The one sum of rewards, what the configuration makes of it, and the sum's last digit."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_samples import CORRECT, INCORRECT, ScriptedSandbox, block, function_row

from ctrl_megatron.config import Config, load_config
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards import (
    RewardItem,
    RewardModelForCritic,
    RewardOutcome,
    RewardSum,
    make_reward,
    weighted_sum,
)
from ctrl_megatron.rewards.build import build_reward_sum
from ctrl_megatron.rewards.plan import plan_rewards, weights_at
from ctrl_megatron.rewards.reward_sum import combine_rewards
from ctrl_megatron.run.checks.rewards import (
    check_rewards,
    check_rows_rewardable,
    inert_reward_warnings,
)

ROW = function_row(pass_rate=0.5)
maybe = st.none() | st.floats(-10, 10, width=32)


@given(st.lists(st.tuples(maybe, maybe), max_size=8), st.floats(-3, 3), st.floats(-3, 3))
def test_a_sum_against_a_plain_loop(
    rows: list[tuple[float | None, float | None]], left: float, right: float
) -> None:
    parts = {"a": [a for a, _ in rows], "b": [b for _, b in rows]}
    expected: list[float | None] = []
    for a, b in rows:
        unknown = (a is None and left != 0) or (b is None and right != 0)
        expected.append(None if unknown else left * (a or 0.0) + right * (b or 0.0))
    got = weighted_sum(parts, {"a": left, "b": right})
    assert [g is None for g in got] == [e is None for e in expected]
    for g, e in zip(got, expected, strict=True):
        assert e is None or g == pytest.approx(e, rel=1e-5, abs=1e-5)


@given(st.data())
def test_a_sum_is_that_of_float32_tensors_to_the_last_bit(data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    # torch changes the order of additions beyond four terms.
    names = "abcd"[: data.draw(st.integers(1, 4))]
    number = st.floats(-1e3, 1e3)
    rows = data.draw(st.integers(1, 20))
    parts: dict[str, Any] = {
        name: data.draw(st.lists(number, min_size=rows, max_size=rows)) for name in names
    }
    weights = {name: data.draw(st.floats(-3, 3)) for name in names}
    terms = [weights[name] * torch.tensor(parts[name]) for name in names]
    expected = torch.stack(terms).sum(dim=0)
    assert torch.equal(torch.tensor(weighted_sum(parts, weights)), expected)


async def slow(items: Sequence[RewardItem]) -> list[float | None]:
    await asyncio.sleep(60)
    return []


async def failing(items: Sequence[RewardItem]) -> list[float | None]:
    raise KeyError("broken")


async def short(items: Sequence[RewardItem]) -> list[float | None]:
    return []


def of_length(items: Sequence[RewardItem], *, scale: float = 1.0) -> list[float]:
    return [scale * len(item.text) for item in items]


async def of_outcome(items: Sequence[RewardItem]) -> list[float | None]:
    return [None if i.outcome is None else i.outcome.reward for i in items]


def item(text: str, critique: str = CORRECT, **fields: Any) -> RewardItem:
    return RewardItem(**{"text": text, "critique": critique, "row": ROW, **fields})


def test_the_critic_runs_first_and_the_others_see_its_outcomes() -> None:
    judge = ScriptedSandbox(lambda request: [True, True, "good" in request.completion])
    critic = RewardModelForCritic([ROW], None, sandbox=judge, show_progress=False)
    functions = {
        "transition": make_reward("transition", wrong_to_right=4.0, wrong_to_wrong=-4.0),
        "critic": critic,
        "judge": make_reward("judge"),
        "seen": of_outcome,
    }
    total = RewardSum(functions, {"critic": 2.0, "judge": 0.5, "transition": 1.0, "seen": 0.0})
    known = RewardOutcome(reward=0.25, judgment=True)
    items = [
        item(block("good")),
        item(block("bad"), INCORRECT),
        item("x", "no judgment"),
        item("y", outcome=known),
    ]
    scores = asyncio.run(total.score(items))
    assert scores.parts == {
        "transition": [4.0, -4.0, 0.0, None],
        "critic": [1.0, 2 / 3, 0.0, 0.25],
        "judge": [0.0, 1.0, 0.0, 0.0],
        "seen": [1.0, 2 / 3, 0.0, 0.25],
    }
    assert list(scores.parts) == list(functions)
    assert scores.outcomes[3] is known and len(judge.requests) == 2
    assert scores.totals == [6.0, pytest.approx(4 / 3 + 0.5 - 4), 0.0, None]
    assert pickle.loads(pickle.dumps(scores)) == scores


def test_a_judgment_is_parsed_once_and_travels() -> None:
    assert item("", INCORRECT).judgment is False
    assert item("", "none").judgment is None
    assert RewardItem(text="").judgment is None
    assert item("", CORRECT, judgment=False).judgment is False


def test_without_a_critic_there_are_no_outcomes() -> None:
    judge = ScriptedSandbox(lambda request: [True, True, False])
    total = RewardSum({"code": make_reward("code", provider=judge)})
    scores = asyncio.run(total.score([RewardItem(text=block("x = 1"), row=ROW)]))
    assert (scores.parts, scores.outcomes) == ({"code": [2 / 3]}, [None])
    assert total.critic is None
    assert asyncio.run(total.score([])).parts == {"code": []}


def test_the_sum_of_nothing_is_0() -> None:
    """A model's reward is added to it elsewhere."""
    scores = asyncio.run(RewardSum({}).score([item(""), item("x")]))
    assert (scores.parts, scores.totals) == ({}, [0.0, 0.0])


def test_wrong_sums_are_refused() -> None:
    functions = {"code_format": make_reward("code_format")}
    with pytest.raises(ValueError, match=r"differ in code$"):
        RewardSum(functions, {"code_format": 1.0, "code": 1.0})
    with pytest.raises(ValueError, match="finite"):
        RewardSum(functions, {"code_format": math.nan})
    with pytest.raises(ValueError, match=r"'short' returned 0 rewards for 1"):
        asyncio.run(RewardSum({"short": short}).score([item("")]))
    with pytest.raises(KeyError, match="broken"):
        asyncio.run(RewardSum({"slow": slow, "failing": failing}).score([item("")]))


def test_a_sum_beyond_every_reward_is_refused_by_its_key() -> None:
    async def large(items: Sequence[RewardItem]) -> list[float | None]:
        return [1e8] * len(items)

    for weights in ({"a": 1e30}, {"a": 20.0}, {"a": 9.0, "b": 9.0}):
        total = RewardSum(dict.fromkeys(weights, large), weights)
        with pytest.raises(UserError, match=r"^reward\.reward_weights: .*at most 1e\+09"):
            asyncio.run(total.score([RewardItem(text="")]))


@pytest.mark.parametrize("value", [1e38, -1e38, math.nan, math.inf])
def test_no_form_of_a_function_may_return_what_no_update_could_bear(value: float) -> None:
    class Mine(RewardModelForCritic):
        async def judge(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
            return [RewardOutcome(reward=value) for _ in items]

    async def plain(items: Sequence[RewardItem]) -> list[float | None]:
        return [value] * len(items)

    mine = Mine([ROW], None)
    for functions in ({"critic": mine}, {"judging": mine}, {"plain": plain}):
        name = next(iter(functions))
        total = RewardSum(functions, {name: 0.0})  # also where it has no weight
        with pytest.raises(
            UserError, match=rf"^reward '{name}' returned .*(at most 1e\+09|finite)"
        ):
            asyncio.run(total.score([RewardItem(text="")]))


def test_the_judge_is_closed_with_the_sum() -> None:
    class Judge(ScriptedSandbox):
        closed = 0

        async def close(self) -> None:
            self.closed += 1

    judge = Judge(lambda request: [])
    asyncio.run(RewardSum({"f": of_outcome}, judge=judge).close())
    asyncio.run(RewardSum({"f": of_outcome}).close())
    assert judge.closed == 1


def config(*overrides: str) -> Config:
    return load_config(None, list(overrides), "none")


def build(*overrides: str, rows: Sequence[Row] = (ROW,)) -> RewardSum:
    chosen = config(*overrides)
    return build_reward_sum(
        chosen,
        plan_rewards(chosen),
        sandbox_endpoint="http://127.0.0.1:9",
        rows=rows,
        tokenizer=None,
    )


TERMS = (
    *("reward.overlong_buffer.enable=true", "reward.overlong_buffer.penalty_factor=0.5"),
    *("reward.judge.weight=0.2", "reward.transition.right_to_wrong=-1.0"),
)


@pytest.mark.parametrize(
    ("overrides", "always", "weights"),
    [
        ((), (), {"critic": 1.0}),
        (
            ("reward.reward_funcs=[code,critic]", "reward.reward_weights=[3,2]", *TERMS),
            (),
            {"critic": 2.0, "code": 3.0, "overlong": 0.5, "judge": 0.2, "transition": 1.0},
        ),
        (("reward.reward_funcs=[code]",), (), {"code": 1.0}),
        (("reward.reward_funcs=[code]",), ("critic",), {"critic": 0.0, "code": 1.0}),
        (
            ("reward.reward_funcs=[code]", TERMS[-1]),
            (),
            {"critic": 0.0, "code": 1.0, "transition": 1.0},
        ),
        (("reward.reward_funcs=[delta]",), (), {"critic": 0.0, "delta": 1.0}),
        (
            ("reward.judge.gate=-1", "reward.schedule=[{from_step: 3, weights: {judge: 1}}]"),
            (),
            {"critic": 1.0, "judge": 0.0, "judge_gate": 0.0},
        ),
    ],
)
def test_functions_of_a_configuration(
    overrides: tuple[str, ...], always: tuple[str, ...], weights: dict[str, float]
) -> None:
    found = plan_rewards(config(*overrides), always)
    assert list(found.weights.items()) == list(weights.items())


def test_weights_change_with_the_stages_of_the_schedule() -> None:
    stages = config(
        "reward.schedule=[{from_step: 5, weights: {judge: 0.2, critic: 1}}, "
        "{from_step: 1, weights: {critic: 0, judge: 1}}]"
    ).reward.stages
    base = {"critic": 1.0, "judge": 0.0, "code": 0.5}
    assert weights_at(base, stages, 1) == {"critic": 0.0, "judge": 1.0, "code": 0.5}
    assert weights_at(base, stages, 4) == weights_at(base, stages, 1)
    assert weights_at(base, stages, 5) == {"critic": 1.0, "judge": 0.2, "code": 0.5}
    assert weights_at(base, (), 9) == base


def test_a_closed_gate_replaces_the_sum() -> None:
    parts = {
        "critic": [1.0, 1.0, None, None],
        "judge": [1.0, 0.0, 0.0, 1.0],
        "judge_gate": [0.0, 1.0, 1.0, 0.0],
    }
    weights = {"critic": 1.0, "judge": 0.25, "judge_gate": 0.0}
    assert combine_rewards(parts, weights, -1.0) == [1.25, -1.0, -1.0, None]
    assert combine_rewards(parts, weights) == [1.25, 1.0, None, None]


def test_a_plan_has_what_each_function_reads_and_its_options() -> None:
    plan = plan_rewards(
        config(
            "reward.reward_funcs=[critic,binary_code,code_format]",
            "reward.reward_options.binary_code.require_format=true",
            "reward.run_timeout=3",
            "data.max_response_length=100",
            "reward.overlong_buffer.len=10",
            *TERMS,
        )
    )
    options = {name: dict(planned.options) for name, planned in plan.functions.items()}
    assert options["critic"]["run_timeout"] == 3 and options["critic"]["copying"] == "measure"
    assert options["binary_code"]["run_timeout"] == 3 and options["binary_code"]["require_format"]
    assert options["code_format"] == {}
    assert options["judge"] == {"right": 1.0, "wrong": 0.0, "unreadable": 0.0, "correct_if": 1.0}
    assert options["overlong"] == {"max_length": 100, "cache_length": 10}
    assert options["transition"]["right_to_wrong"] == -1.0
    reads = {name: planned.reads for name, planned in plan.functions.items()}
    assert "selected_uts" in reads["binary_code"] and reads["judge"] == ("pass_rate",)
    runs = {name for name, planned in plan.functions.items() if planned.runs_programs}
    assert runs == {"critic", "binary_code"}
    check_rows_rewardable(plan, [ROW])
    with pytest.raises(UserError, match=r"'pass_rate' is missing or null, which the reward judge "):
        check_rows_rewardable(plan, [function_row(pass_rate=None)])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("reward.reward_funcs=[delta]",), "delta differs from critic by a constant"),
        (("reward.reward_funcs=[critic,delta]",), "trains as one with critic alone"),
        (("reward.reward_funcs=[delta]", "algorithm.adv_estimator=gae"), ""),
        (("reward.reward_funcs=[delta]", "reward.judge.gate=-1"), ""),
        (("reward.transition.wrong_to_right=1", "reward.reward_weights=[0]"), ""),
        (("reward.reward_funcs=[delta]", "reward.judge.weight=1"), ""),
        (
            (
                "reward.transition={wrong_to_right: 1, right_to_wrong: -1}",
                "reward.reward_weights=[0]",
            ),
            "reward.transition has one value",
        ),
        (
            (
                "reward.transition.wrong_to_right=1",
                *("reward.reward_weights=[0]", "algorithm.norm_adv_by_std_in_grpo=false"),
            ),
            "",
        ),
        ((), ""),
    ],
)
def test_rewards_that_train_as_critic_alone_are_told(overrides: tuple[str, ...], told: str) -> None:
    found = inert_reward_warnings(config(*overrides))
    assert [told in line for line in found] == ([True] if told else [])


def test_the_critic_limits_copying_as_the_configuration_says() -> None:
    built = build("reward.copying=penalise", "reward.copying_threshold=0.9")
    assert built.critic is not None
    assert (built.critic.copying, built.critic.copying_threshold) == ("penalise", 0.9)


def test_a_sum_from_the_configuration_shares_judge_and_cache() -> None:
    built = build("reward.reward_funcs=[critic,code,binary_code]", *TERMS)
    assert list(built.functions) == list(built.weights)
    judge = ScriptedSandbox(lambda request: [True] * 3)
    vars(built.judge).update(submit=judge.submit, identity=judge.identity)
    items = [item(block("x = 1"), INCORRECT, length=1)]
    parts = asyncio.run(built.score(items)).parts
    assert parts == {
        "critic": [1.0],
        "code": [1.0],
        "binary_code": [1.0],
        "overlong": [0.0],
        "judge": [1.0],
        "transition": [0.0],
    }
    assert len(judge.requests) == 1


def test_a_function_of_the_users_by_import_path() -> None:
    path = f"{__name__}:of_length"
    chosen = (
        f"reward.reward_funcs=['{path}']",
        f"reward.reward_options={{'{path}': {{scale: 2.0}}}}",
    )
    check_rewards(config(*chosen))
    built = build(*chosen, rows=[])
    assert asyncio.run(built.score([RewardItem(text="abc")])).parts == {path: [6.0]}


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("reward.reward_funcs=[critic,cod]",), "did you mean 'code'"),
        (("reward.reward_funcs=[overlong]",), "argument: 'max_length'"),
        (("reward.reward_funcs=['nowhere:f']",), "nowhere:f"),
        (
            ("reward.reward_funcs=[code_format]", "reward.reward_options.code_format.colour=red"),
            "colour",
        ),
        (("reward.reward_funcs=[critic,judge]", TERMS[2]), "'judge'"),
    ],
)
def test_mistakes_show_without_services(overrides: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_rewards(config(*overrides))


def test_different_rows_with_one_id_are_refused_at_once() -> None:
    rows = [ROW, function_row(solution="another")]
    with pytest.raises(ValueError, match=r"rows\.parquet: row 0.*'add/0'.*solution, pass_rate"):
        build(rows=rows)


TASKS = (
    "reward.reward_funcs=[critic,code,judge]",
    "reward.reward_weights=[1,2,0.5]",
    "reward.reward_tasks.critic=[critique]",
    "reward.reward_tasks.code=[solving]",
    "reward.reward_tasks.judge=[judging]",
)


def task_rows() -> list[Row]:
    return [
        function_row(pass_rate=0.5),
        function_row(id="solve", task="solving"),
        function_row(id="judge", task="judging", pass_rate=0.5),
    ]


def test_every_row_is_rewarded_by_the_functions_of_its_task() -> None:
    rows, judge = task_rows(), ScriptedSandbox(lambda request: ["good" in request.completion] * 3)
    plan = plan_rewards(config(*TASKS))
    check_rows_rewardable(plan, rows)
    tasks = {name: planned.tasks or () for name, planned in plan.functions.items()}
    functions = {
        "critic": RewardModelForCritic(rows[:1], None, sandbox=judge, show_progress=False),
        "code": make_reward("code", provider=judge),
        "judge": make_reward("judge"),
    }
    items = [
        RewardItem(text=block("good"), row=rows[0], critique=INCORRECT),
        RewardItem(text=block("good"), row=rows[1]),
        RewardItem(text=block("bad"), row=rows[1]),
        RewardItem(text="wrong", row=rows[2], judgment=False),
        RewardItem(text="right", row=rows[2], judgment=True),
    ]
    scores = asyncio.run(RewardSum(functions, plan.weights, judge=judge, tasks=tasks).score(items))
    assert scores.parts == {
        "critic": [1.0, None, None, None, None],
        "code": [None, 1.0, 0.0, None, None],
        "judge": [None, None, None, 1.0, 0.0],
    }
    assert scores.totals == [1.0, 2.0, 0.0, 0.5, 0.0]
    assert [outcome is None for outcome in scores.outcomes] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.reward_tasks.code=[guessing]", "the task 'guessing', and the rows have critique"),
        ("reward.reward_tasks.critic=[critique,solving]", "the task 'solving', and critic rewards"),
        ("reward.reward_tasks.judge=[solving]", "rewards the task 'judging'"),
        ("reward.reward_weights=[1,0,1]", "rewards the task 'solving'"),
    ],
)
def test_tasks_that_do_not_fit_the_rows_are_refused(override: str, message: str) -> None:
    rows = [*task_rows(), function_row(id="solve2", task="solving", pass_rate=0.5)]
    plan = plan_rewards(config(*TASKS, override))
    with pytest.raises(UserError, match=message):
        check_rows_rewardable(plan, [row for row in rows if row.id != "solve"])
