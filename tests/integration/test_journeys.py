"""The journeys that the pages show, with tiny models: what a user types, from end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from forked_script import Shell, forked_shell
from tiny_run import REPOSITORY, chain_model

from ctrl_megatron.metrics import read_json_lines

pytestmark = pytest.mark.timeout(900)

JOURNEYS = REPOSITORY / "examples/journeys"
CONFIG = """
data: {max_prompt_length: 512, max_response_length: 12, train_batch_size: 4, val_batch_size: 8}
actor_rollout_ref:
  model: {dtype: float32}
  actor: {ppo_mini_batch_size: 4, optim: {lr: 1e-3}, ppo_max_token_len_per_gpu: 1024}
  rollout: {n: 2, revision_max_tokens: 12, threads: 1}
sandbox: {workers: 1}
trainer: {total_training_steps: 2, n_gpus_per_node: 1, peak_tflops_per_device: 0.1}
sft: {train_batch_size: 4, max_length: 1024, total_training_steps: 1}
"""
SEVEN = ("What is three and four?", "Print the days of a week.", "Print five and two.")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "tiny.yaml").write_text(CONFIG)
    with forked_shell(folder) as shell:
        yield shell


@pytest.fixture(scope="module")
def solver(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says one of two numbers, each the answer to some questions."""
    folder = tmp_path_factory.mktemp("solver") / "model"
    return chain_model(folder, smollm2_path, ("It is 8.", "It is 9."), 0.8)


def journey(shell: Shell, name: str, killed_at: str | None = None, **given: object) -> Path:
    """Run the script; where its files are."""
    out = shell.folder / name
    settings = {"CONFIG": "tiny.yaml", "ENGINE": "hf", "RANKS": "1", "OUT": out.name, **given}
    texts = {name: str(value) for name, value in settings.items()}
    said = shell.run(JOURNEYS / f"{name}.sh", texts, killed_at)
    if killed_at is None:
        (out / "said").write_text(said)
    return out


def steps(run: Path) -> list[dict[str, float]]:
    """Metrics by step; what was logged of one in parts is one."""
    found: dict[int, dict[str, float]] = {}
    for record in read_json_lines(run / "metrics.jsonl"):
        found.setdefault(record["step"], {}).update(record["metrics"])
    return [found[step] for step in sorted(found)]


def table(run: Path) -> dict[str, dict[str, float]]:
    """The final table by stage."""
    rows = json.loads((run / "summary.json").read_text())["table"]
    return {row["stage"]: row for row in rows}


@pytest.fixture(scope="module")
def solved(shell: Shell) -> dict[str, str]:
    """Problems with solutions as the journeys take them.

    A model of these tests writes nothing that could be read as a program.
    """
    problems = [
        {
            "id": f"mine/{number}",
            "statement": SEVEN[number % 3],
            "prompter_type": "code_contests",
            "tests": [{"input": {"stdin": ""}, "output": {"stdout": "7\n"}}],
            "reference": "print(7)",
        }
        for number in range(24)
    ]
    solutions = [
        {"id": f"{p['id']}/{n}", "problem_id": p["id"], "solution": f"```python\nprint({n})\n```"}
        for p in problems
        for n in (7, 8)
    ]
    for name, records in (("mine.jsonl", problems), ("solved.jsonl", solutions)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (shell.folder / name).write_text(lines)
    return {"PROBLEMS": "mine.jsonl", "SOLVE": "--solutions solved.jsonl"}


def test_own_problems(shell: Shell, actor_path: Path, solved: dict[str, str]) -> None:
    out = journey(shell, "own_problems", MODEL=actor_path, **solved)
    said = (out / "said").read_text()
    for begins in ("run own_problems/sft: 1 steps", "run own_problems/critic: 2 steps"):
        assert f"{begins} of 4" in said
    assert said.count(" to train") == 2 and "1 hf engine; sandbox isolation: " in said
    assert parquet.read_table(out / "data/train.parquet").num_rows > 4
    assert steps(out / "sft")[0]["sft/loss"] > 0
    trained = steps(out / "critic")
    assert len(trained) == 2 and all("critique/valid_rate" in step for step in trained)
    assert set(table(out / "evaluation")) == {"before", "after SFT", "after RL"}
    assert "the newest checkpoint is own_problems/critic/checkpoints/global_step_2" in said
    assert (out / "critic/report.html").is_file()


@pytest.mark.long
def test_one_node(shell: Shell, actor_path: Path, solved: dict[str, str]) -> None:
    """A run that is stopped after its first step goes on with the same command."""
    config = CONFIG.replace("total_training_steps: 2", "total_training_steps: 8")
    (shell.folder / "one_node.yaml").write_text(config)
    out = journey(shell, "one_node", MODEL=actor_path, CONFIG="one_node.yaml", **solved)
    said, log = (out / "said").read_text(), (out / "rl.log").read_text()
    assert "GPU memory by phase" in said or "GiB" in said
    assert "run one_node/sft: 1 steps" in said and "run one_node/rl: 8 steps" in log
    assert len(steps(out / "rl")) == 8 and log.count("run one_node/rl: 8 steps") == 2
    assert "stopped" in log.partition("run one_node/rl: 8 steps")[2]
    first = json.loads((out / "rl/timeline.jsonl").read_text().splitlines()[0])
    assert first["step"] == 1
    # The files that the page's command for TensorBoard reads.
    assert list((out / "rl/tensorboard").glob("events.out.*"))
    assert (out / "rl/report.html").is_file() and (out / "rl/engine.log").is_file()


@pytest.mark.long
def test_own_reward(shell: Shell, solver: Path) -> None:
    out = journey(shell, "own_reward", MODEL=solver)
    assert "1 hf engine; no sandbox of this run" in (out / "said").read_text()
    trained = steps(out / "solver")
    assert len(trained) == 2 and all("reward/mean" in step for step in trained)
    reward = table(out / "solver")["after RL"]["reward/examples.journeys.own_reward:last_number"]
    # Five of 64 sums are 8, six are 9.
    assert reward in (5 / 64, 6 / 64)


def test_from_verl(shell: Shell, solver: Path) -> None:
    out = journey(shell, "from_verl", MODEL=solver)
    assert "rows: 48 to train, 30 to validate" in (out / "said").read_text()
    trained = steps(out / "solver")
    assert len(trained) == 2 and all("reward/mean" in step for step in trained)
    name = "reward/examples/journeys/verl_form.py:compute_score"
    last = table(out / "solver")["after RL"]
    # The model says 8 or 9 to everything: two sums of 16 are 8, one is 9; no difference is.
    assert last[f"sums_test/{name}"] in (2 / 16, 1 / 16)
    assert last[f"differences_test/{name}"] == 0
    assert last[name] == pytest.approx(last[f"sums_test/{name}"] * 16 / 30)
    assert any(f"val/sums_test/{name}" in step for step in trained)
    page = (out / "solver/report.html").read_text()
    assert "sums_test" in page and "differences_test" in page


def test_own_pipeline(shell: Shell, solver: Path) -> None:
    out = journey(shell, "own_pipeline", MODEL=solver)
    trained = steps(out / "vowels")
    assert all(0 < step["reward/mean"] == step["reward/vowels"] < 1 for step in trained)


def test_resume_elsewhere_then_export_and_load(shell: Shell, solver: Path) -> None:
    out = journey(shell, "resume_elsewhere", MODEL=solver, TENSOR=2)
    assert not (out / "here/solver").exists()
    assert len(steps(out / "there/solver")) == 2
    checkpoint = out / "there/solver/checkpoints/global_step_2"
    exported = journey(shell, "export_and_load", CHECKPOINT=checkpoint.relative_to(shell.folder))
    for name in ("hf/model.safetensors", "checkpoint/policy"):
        assert (exported / name).exists()
