"""Critiques that carry the program: how much is measured, and what each mode makes of it."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from reward_samples import ScriptedSandbox, function_row

from ctrl_megatron.config import load_config
from ctrl_megatron.rewards import RewardItem, RewardModelForCritic, RewardSum, Scores, make_reward
from ctrl_megatron.rewards.copying import copied_line_share as share_of_lines
from ctrl_megatron.rewards.grading import program_to_judge

CODE = "def add(a, b):\n    total = a + b\n    return total * 1\n"
REVISION = f"```python\n{CODE}```"
JUDGED = "\nOverall judgment: Incorrect"
WHOLE = {
    "fenced": REVISION,
    "tildes": f"~~~\n{CODE}~~~",
    "indented": "Write this:\n\n    " + CODE.replace("\n", "\n    "),
    "on one line": "Write `def add(a, b): total = a + b; return total * 1`.",
    "bullets": "- `def add(a,b):`\n- `total = a+b`\n- `return (total*1)`",
    "numbered": "1. def add(a, b):\n2.     total = a + b\n3.     return total * 1",
    "HTML": "<pre>def add(a, b):<br>total = a + b<br><b>return</b> total * 1</pre>",
    "a quote": "> def add(a, b):\n>     total = a + b\n>     return total * 1",
    "other case": "DEF ADD(A, B): TOTAL = A + B; RETURN TOTAL * 1",
    "other names": "```python\ndef plus(x, y):\n    s = x + y\n    return s * 1\n```",
    "other names and a number": "def plus(x, y): s = x + y; return s * 10.5",
    "other names in prose": "Write `def f(u, v):`, then `w = u + v`, and last `return w * 1`.",
    "invisible characters": "def a\u200bdd(a, b):\n tot\u00adal = a + b\n return total * 1",
    "wide characters": "def add(a, b): total = a + b; return total * 1".translate(
        {ord(letter): ord(letter) + 0xFEE0 for letter in "deftoal"}
    ),
    "other layout": "def add( a , b ) :\n  total=a+b # sum\n  return total*1",
}


def copied_rate(critique: str, revision: str) -> float:
    return share_of_lines(critique, program_to_judge(revision))


@pytest.mark.parametrize("critique", WHOLE.values(), ids=WHOLE)
def test_the_whole_program_in_any_form(critique: str) -> None:
    assert copied_rate(critique + JUDGED, REVISION) == 1.0


@pytest.mark.parametrize(
    ("critique", "rate"),
    [
        ("It subtracts, but the sum is asked for.", 0.0),
        ("Use `total = a + b`.", 1 / 3),
        ("`def add(a, b):` should say `return total * 1`.", 2 / 3),
        ("subtotal = a + bb", 0.0),
        # Two names for one, and one for two.
        ("def plus(x, y): s = x + z; return q * 1", 0.0),
        ("def plus(x, x): x = x + x; return x * 1", 0.0),
    ],
)
def test_a_share_of_the_lines(critique: str, rate: float) -> None:
    assert copied_rate(critique, REVISION) == pytest.approx(rate)


def test_what_does_not_count() -> None:
    documented = REVISION.replace(":\n", ":\n    '''Sum.'''\n    # of both\n")
    assert copied_rate(WHOLE["on one line"], documented) == 1.0
    branches = "```python\nif x > limit:\n    f()\nelse:\n    g()\n```"
    assert copied_rate("Or else: f() and g()", branches) == 0.0
    assert copied_rate("`pass`", "```python\npass\n```") == 1.0
    assert copied_rate("a &lt; b + c", "```python\na < b + c\n```") == 1.0
    assert copied_rate("nothing", "") == copied_rate("", REVISION) == 0.0
    assert copied_rate("def f(: x y", "```python\ndef f(: x y\n```") == 1.0


def test_long_texts_take_no_time() -> None:
    started = time.process_time()
    copied_rate("a = b + c " * 10_000, "```python\n" + "a = b + d\n" * 10_000 + "```")
    assert time.process_time() - started < 5.0


def score(critique: str, *, weights: dict[str, float] | None = None, **options: Any) -> Scores:
    critic = RewardModelForCritic(
        [function_row()],
        None,
        sandbox=ScriptedSandbox(lambda request: [True] * 3),
        show_progress=False,
        **options,
    )
    names = weights or {"critic": 1.0}
    functions = {name: critic if name == "critic" else make_reward(name, **TABLE) for name in names}
    item = RewardItem(text=REVISION, critique=critique, row=function_row(pass_rate=0.0))
    return asyncio.run(RewardSum(functions, names).score([item]))


TABLE = {"wrong_to_right": 2.0}
CARRIES = WHOLE["fenced"] + JUDGED
HELPS = "Use `total = a + b`." + JUDGED


@pytest.mark.parametrize(
    ("copying", "carries"), [("measure", 1.0), ("penalise", 0.0), ("mask", None)]
)
def test_each_mode(copying: str, carries: float | None) -> None:
    for critique, reward, rate in ((CARRIES, carries, 1.0), (HELPS, 1.0, 1 / 3)):
        scores = score(critique, copying=copying)
        (outcome,) = scores.outcomes
        assert outcome is not None
        assert scores.totals == scores.parts["critic"] == [reward]
        assert outcome.copied == pytest.approx(rate)
        assert outcome.pass_rate == 1.0 and outcome.error == ""


def test_the_threshold() -> None:
    for threshold, reward in ((1 / 3, 1.0), (0.3, 0.0), (0.0, 0.0)):
        assert score(HELPS, copying="penalise", copying_threshold=threshold).totals == [reward]
    assert score(CARRIES, copying="penalise", copying_threshold=1.0).totals == [1.0]


@pytest.mark.parametrize(
    ("copying", "total"), [("measure", 3.0), ("penalise", 0.0), ("mask", None)]
)
def test_transition_pays_no_more_for_it(copying: str, total: float | None) -> None:
    weights = {"critic": 1.0, "transition": 1.0}
    assert score(CARRIES, weights=weights, copying=copying).totals == [total]


def test_without_a_judgment_there_is_no_revision_to_look_at() -> None:
    (outcome,) = score(WHOLE["fenced"], copying="mask").outcomes
    assert outcome is not None and outcome.reward == 0.0 and outcome.copied is None


def test_upstreams_interface_follows_the_modes() -> None:
    rewards = {}
    for copying in ("measure", "penalise", "mask"):
        model = RewardModelForCritic(
            [function_row()],
            None,
            sandbox=ScriptedSandbox(lambda request: [True] * 3),
            show_progress=False,
            copying=copying,
        )
        (rewards[copying],) = asyncio.run(
            model.get_reward_all([CARRIES], [REVISION], [function_row()])
        )
    assert (rewards["measure"], rewards["penalise"]) == (1.0, 0.0)
    assert math.isnan(rewards["mask"])


def test_the_keys() -> None:
    def said(*overrides: str) -> str:
        paths = ("data.train_files=a.parquet", "actor_rollout_ref.model.path=model")
        with pytest.raises(ValueError) as error:
            load_config(None, [*paths, *overrides])
        return str(error.value)

    assert "reward.copying" in said("reward.copying=forbid")
    assert "reward.copying_threshold" in said("reward.copying=mask", "reward.copying_threshold=2")
    assert "reward.copying_threshold" in said("reward.copying_threshold=0.3")
    assert "critic" in said("reward.copying=mask", "reward.reward_funcs=[code]")
