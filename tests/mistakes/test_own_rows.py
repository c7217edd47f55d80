"""Rows of a file of the user's: an id, a prompt, and what their own reward reads by name."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from forked_command import run
from mistaken_world import make_world

from ctrl_megatron.data.rows import read_rows
from ctrl_megatron.errors import UserError
from ctrl_megatron.metrics import read_json_lines

REWARD = """
import re

def last_number(items):
    rewards = []
    for item in items:
        numbers = re.findall(r"[0-9]+", item.text)
        right = item.row["answer"].rpartition("#### ")[2]
        rewards.append(float(bool(numbers) and numbers[-1] == right))
    return rewards

last_number.reads = ("answer",)
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A file as GSM8K has it, and the reward."""
    folder = make_world(tmp_path)
    count = range(8)
    columns = {
        "id": [f"gsm/{n}" for n in count],
        "prompt": [f"What is {n} and {n}?" for n in count],
        "answer": [f"Twice {n}.\n#### {2 * n}" for n in count],
    }
    parquet.write_table(pa.table(columns), folder / "train.parquet")
    (folder / "my_reward.py").write_text(REWARD)
    return folder


def test_a_text_is_a_message_and_columns_are_found_by_name(world: Path) -> None:
    row = read_rows(world / "train.parquet")[3]
    assert row.prompt == ({"role": "user", "content": "What is 3 and 3?"},)
    assert row["answer"] == "Twice 3.\n#### 6" and row["id"] == "gsm/3"
    with pytest.raises(UserError, match=r"train\.parquet: row 4: column 'question' is missing"):
        row["question"]
    with pytest.raises(UserError, match="row 4: column 'problem' is missing or null"):
        row.attempt()


def test_prompts_and_answers_train_with_a_reward_of_ten_lines(world: Path) -> None:
    settings = [
        "dag.custom_pipeline_fn=ctrl_megatron.pipeline:grpo_pipeline",
        "reward.reward_funcs=[my_reward:last_number]",
        "data.max_response_length=8",
    ]
    code, output = run(
        "ctrl_megatron.commands.train_rl", ["--config", "run.yaml", *settings], world
    )
    assert code == 0, output[-6000:]
    (record,) = read_json_lines(world / "runs/mine/metrics.jsonl")
    assert 0 <= record["metrics"]["reward/mean"] <= 1
