"""What the teacher of distillation sees, and the settings that fit together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack

from ctrl_megatron.config import load_config
from ctrl_megatron.data.prompt_table import PromptTable
from ctrl_megatron.data.rows import Row
from ctrl_megatron.errors import UserError
from ctrl_megatron.rewards.items import RewardItem
from ctrl_megatron.rewards.leaks import LeakReward, find_leak
from ctrl_megatron.rewards.plan import plan_rewards
from ctrl_megatron.steps.batch import pad_rows
from ctrl_megatron.steps.ctrl import ctrl_pipeline
from ctrl_megatron.steps.teaching import hint_of_row, read_as_teacher
from ctrl_megatron.types import Verdict

KEYS = "algorithm.distillation."
PATHS = ("data.train_files=x.parquet", "actor_rollout_ref.model.path=/model")
REFERENCE = "def total(numbers):\n    return sum(numbers) + offset(3)\n"
ROW = Row(
    id="total/0",
    problem="Write total(numbers), which adds up numbers.",
    solution="```python\ndef total(numbers):\n    return max(numbers) + offset(3)\n```",
    prompter_type="mbppplus",
    selected_uts=("assert total([1, 2]) == 31415", "assert total([]) == 0"),
    problem_id="total",
    reference=REFERENCE,
    pass_rate=0.5,
)
FAILED = Verdict(passed=(False, True), total=2, detail=("AssertionError", ""))


def config_of(*overrides: str) -> Any:
    return load_config(None, [*PATHS, *overrides], "rl")


def test_a_hint_says_what_its_kind_names() -> None:
    feedback = hint_of_row("feedback", ROW, FAILED)
    assert feedback.startswith("The answer is incorrect. It fails 1 of 2 tests.")
    assert "total([1, 2]) == 31415" in feedback
    program = hint_of_row("reference", ROW, None)
    assert program == f"This program passes every test:\n```python\n{REFERENCE.strip()}\n```"
    assert hint_of_row("both", ROW, FAILED) == f"{feedback}\n{program}"
    changes = hint_of_row("diff", ROW, None).splitlines()
    assert "-    return max(numbers) + offset(3)" in changes
    assert "+    return sum(numbers) + offset(3)" in changes


@pytest.mark.parametrize(
    ("kind", "row", "verdict"),
    [
        *(("feedback", ROW, None), ("both", ROW, None)),
        *((kind, replace(ROW, reference=" "), FAILED) for kind in ("reference", "diff", "both")),
        ("both", replace(ROW, task="solving"), FAILED),
    ],
)
def test_a_hint_with_an_unknown_part_is_none(kind: str, row: Row, verdict: Verdict | None) -> None:
    assert hint_of_row(kind, row, verdict) == ""


class Codec:
    """A token for each word."""

    def encode_chat(self, messages: Any) -> list[int]:
        return [1] * len(messages[0]["content"].split())


class Teacher:
    """Remembers the rows that it reads."""

    shape = SimpleNamespace(max_position_embeddings=256, attention=None)
    rows: Any = None

    def teacher_pass(self, rows: Any, keys: Any, temperature: float, **_: Any) -> Any:
        self.rows = rows
        answered = rows["response_mask"]
        return {
            "teacher_entropy": answered.float() * 0.5,
            "teacher_log_probs": -answered.float(),
        }


def read(*overrides: str, scores: tuple[float, ...] = (0, 0, 1, 0)) -> tuple[Any, Any, Any]:
    """(what the teacher read, fields, metrics) of four responses of two groups."""
    config = config_of(f"{KEYS}teacher=policy", f"{KEYS}estimator=token", *overrides)
    teacher = Teacher()
    worker: Any = SimpleNamespace(
        **{"config": config, "policy": teacher, "actor": teacher, "reference": None},
        **{"has_actor": True, "temperature": 1.0, "codec": Codec()},
        train=PromptTable(rows=(ROW,), prompts=((),), dropped=0),
        global_means=lambda values: {n: float(v.mean()) for n, v in values.items() if len(v)},
    )
    batch = pad_rows([[5, 6]] * 4, [[7, 8, 9], [7], [8, 9], [9, 9, 9]], pad_token_id=0)
    batch["problem_id"] = NonTensorStack(*["total/0"] * 4)
    batch["uid"] = NonTensorStack("a", "a", "b", "b")
    batch["hint"] = NonTensorStack("one two", "one two", "", "one " * 300)
    batch["token_level_scores"] = torch.tensor(scores)[:, None] * torch.tensor([[1.0, 0, 0]])
    output = read_as_teacher.function(worker, batch)
    return teacher.rows, output.fields, output.metrics


def test_a_teacher_reads_the_responses_behind_its_own_prompts() -> None:
    rows, fields, metrics = read()
    # One row has no hint, and the prompt of another is too long.
    assert fields["distilled"].tolist() == [True, True, False, False]
    assert metrics["distillation/left_out_rate"] == 0.5
    assert metrics["distillation/row_rate"] == 0.5
    start = rows["input_ids"].shape[1] - 3
    assert start > 30 and rows["attention_mask"][:, :start].all()
    assert rows["input_ids"][:, start:].tolist() == [[7, 8, 9], [7, 0, 0]]
    assert rows["response_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert fields["teacher_log_probs"].tolist() == [[-1] * 3, [-1, 0, 0], [0] * 3, [0] * 3]
    assert metrics["distillation/teacher_probability"] == pytest.approx(0.367879, abs=1e-6)
    longer = read(f"{KEYS}max_prompt_length=20")
    assert not longer[1]["distilled"].any() and len(longer[0]["input_ids"]) == 0


def test_groups_whose_rewards_differ_may_go_without_a_teacher() -> None:
    _, fields, _ = read(f"{KEYS}on=groups_without_spread", scores=(1, 0, 0, 0))
    assert not fields["distilled"].any()
    _, fields, _ = read(f"{KEYS}on=groups_without_spread", scores=(1, 1, 0, 0))
    assert fields["distilled"].tolist() == [True, True, False, False]


def test_without_a_coefficient_nothing_is_added_to_a_step() -> None:
    def nodes(*overrides: str) -> list[str]:
        return list(ctrl_pipeline(config_of(*overrides)).nodes)

    plain = nodes()
    assert nodes(f"{KEYS}teacher=policy", f"{KEYS}coef=0") == plain
    assert {*nodes(f"{KEYS}teacher=policy")} - {*plain} == {"hints", "teacher"}
    named = f"{KEYS}teacher=reference", f"{KEYS}hint=none"
    assert {*nodes(*named)} - {*plain} == {"teacher"}
    assert config_of(*named).needs_reference and not config_of(*named).has_kl_to_reference
    off = config_of(*named, f"{KEYS}coef=0")
    assert not off.needs_reference and "leak" not in plan_rewards(off).functions
    assert plan_rewards(config_of(f"{KEYS}teacher=policy")).weights["leak"] == 0


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("teacher=policy", "hint=none"), "would teach the actor what it says"),
        (("teacher=policy", "estimator=token", "divergence=jsd"), "estimates reverse_kl only"),
        (("teacher=reference", "hint=feedback", "dag"), "is about the first solution"),
        (("teacher=policy", "on=groups_without_spread", "filter"), "which algorithm.filter_groups"),
        (("teacher=reference", "estimator=full", "apart"), "hidden states on the actor's ranks"),
        (("hint=diff",), 'hint="diff" is not read with algorithm.distillation.teacher'),
        (("teacher=policy", "top_k=3", "estimator=full"), "top_k=3 .*is not read with"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: tuple[str, ...], complaint: str) -> None:
    others = {
        "dag": "dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline",
        "filter": "algorithm.filter_groups.enable=true",
        "apart": "placement.reference=[1]",
    }
    with pytest.raises(UserError, match=complaint):
        config_of(*(others.get(one, KEYS + one) for one in overrides))


def test_a_test_that_the_statement_shows_is_no_leak_but_no_example_either() -> None:
    shown = replace(ROW, problem=f"{ROW.problem} For example: assert total([]) == 0")
    said = "It fails total([]) == 0.\nOverall judgment: Incorrect"
    item = RewardItem(text="", critique=said, judgment=False, row=shown)
    assert asyncio.run(LeakReward()([item])) == [0]
    assert find_leak(said, shown.attempt()) == "quotes a test"


@pytest.mark.parametrize(
    ("critique", "leaks"),
    [
        ("It returns the largest number, not the sum.", 0),
        ("`max(numbers) + offset(3)` is wrong: use `return sum(numbers) + offset(3)`.", 0),
        ("Replace `return max(numbers) + offset(3)` by `return sum(numbers) + offset(3)`.", 0),
        ("Write `return sum(numbers) + offset(3)`.", 1),
        ("For [1, 2] it must give 31415.", 1),
        ("total([1, 2]) == 31415 fails", 1),
        ("The offset 3 is right.", 0),
    ],
)
def test_a_leak_is_what_the_prompt_does_not_say(critique: str, leaks: int) -> None:
    item = RewardItem(text="", critique=critique, judgment=False, row=ROW)
    solving = RewardItem(text=REFERENCE, critique="", judgment=None, row=ROW)
    assert asyncio.run(LeakReward()([item, solving])) == [leaks, 0]
