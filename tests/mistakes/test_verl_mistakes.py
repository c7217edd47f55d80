"""Files and rewards in verl's form that cannot be used: exit code 2, one line that names file and
row, and nothing is started or written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from mistaken_world import ROWS, make_world

from ctrl_megatron.commands.train_rl import main

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
"""
RUN = """
actor_rollout_ref:
  model: {path: model, dtype: float32}
  rollout: {name: hf, n: 2}
  actor: {ppo_mini_batch_size: 4}
dag: {custom_pipeline_fn: "ctrl_megatron.pipeline:grpo_pipeline"}
reward: {reward_funcs: ["my_reward.py:compute_score"]}
data: {train_files: [train.parquet], train_batch_size: 4, max_prompt_length: 4000}
trainer: {default_local_dir: runs, experiment_name: mine, total_training_steps: 1}
"""


def row(number: int, **changes: Any) -> dict[str, Any]:
    plain = {
        "data_source": "mine/sums",
        "prompt": [{"role": "user", "content": f"What is {number} and {number}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"index": number},
    }
    return {name: value for name, value in (plain | changes).items() if value is not ...}


def write(folder: Path, *wrong: dict[str, Any]) -> None:
    """Right rows, of which the third and those after it are ``wrong``."""
    rows = [row(number) for number in range(ROWS)]
    rows[2 : 2 + len(wrong)] = wrong
    columns = {
        name: [r.get(name) for r in rows] for name in dict.fromkeys(n for r in rows for n in r)
    }
    parquet.write_table(pa.table(columns), folder / "train.parquet")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_world(tmp_path)
    (folder / "run.yaml").write_text(RUN)
    (folder / "my_reward.py").write_text(REWARD)
    write(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


class Started(Exception):
    """The run would begin."""


def refusal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """The command's refusal, which must be one line."""

    def starts(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr("ctrl_megatron.run.train.session", starts)
    code = main(["--config", "run.yaml", *arguments])
    out, errors = capfd.readouterr()
    assert code == 2 and out == "" and errors.count("\n") == 1, errors
    assert not Path("runs").exists()
    return errors


def test_what_is_right_would_start(
    world: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Started):
        refusal(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "row 3: column 'reward_model'"),
        ({"reward_model": None}, "row 3: column 'reward_model' must be an object"),
        ({"data_source": None}, "row 3: column 'data_source' must be text"),
        ({"data_source": ""}, "row 3: column 'data_source' must be text"),
        ({"prompt": []}, "row 3: column 'prompt' must be a non-empty list of messages"),
        ({"prompt": [{"role": "human", "content": "?"}]}, "row 3: column 'prompt' has the role"),
        ({"prompt": [{"role": "user", "content": ""}]}, "row 3: column 'prompt' has a message"),
        (
            {"reward_model": {"style": "rule", "ground_truth": '{"inputs": [], "outputs": []}'}},
            "row 3: column 'reward_model': ground_truth",
        ),
    ],
)
def test_a_wrong_row(
    change: dict[str, Any],
    said: str,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write(world, row(2, **change))
    text = refusal(monkeypatch, capfd)
    assert "train.parquet" in text and said in text


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_a_file_without_a_column(
    column: str, world: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    table = parquet.read_table(world / "train.parquet").drop_columns([column])
    parquet.write_table(table, world / "train.parquet")
    text = refusal(monkeypatch, capfd)
    assert "train.parquet" in text and "missing; it has" in text
    assert (column if column == "prompt" else "data_source, prompt and reward_model") in text


def test_rows_of_ours_have_no_ground_truth(
    world: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (world / "other").mkdir()
    make_world(world / "other")
    text = refusal(monkeypatch, capfd, "data.train_files=other/train.parquet")
    assert "other/train.parquet: row 1: column 'data_source' is missing" in text
    assert "my_reward.py:compute_score" in text


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("import nowhere", "No module named 'nowhere'"),
        ("def compute_score(:", "my_reward.py line 1"),
        ("def score(): pass", "has no attribute 'compute_score'"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_be_loaded(
    reward: str,
    said: str,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (world / "my_reward.py").write_text(reward)
    text = refusal(monkeypatch, capfd)
    assert "my_reward.py" in text and said in text


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("reward.reward_funcs=[none.py:compute_score]", "none.py"),
        ("reward.reward_funcs=[my_reward.py]", "my_reward.py"),
        ("reward.reward_funcs=['my_reward.py:']", "'FILE.py:function'"),
        ("custom_reward_function.path=my_reward.py", "reward.reward_funcs=[FILE.py:FUNCTION]"),
        ("+trainer.seed=1", "without a +"),
        (
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
            "use_kl_loss=true",
        ),
        ("data.val_files=[train.parquet, ./train.parquet]", "must differ"),
    ],
)
def test_a_wrong_argument(
    argument: str,
    said: str,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert said in refusal(monkeypatch, capfd, argument)
