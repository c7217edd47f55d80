"""The study's pieces depend on each other correctly; its tables follow from its transcripts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.transcripts import Turn, turn_record
from ctrl_megatron.types import Verdict
from tools import study


def write(folder: Path, arm: str, seed: int, passed: float) -> None:
    program = {
        rate: Verdict(passed=tuple(n < 4 * rate for n in range(4)), total=4)
        for rate in (0.25, passed)
    }
    turns = [
        Turn(
            critic=arm,
            seed=seed,
            problem_id=f"p{n}",
            attempt=f"p{n}/mutant0",
            difficulty=0,
            sample=0,
            turn=1,
            solution="a",
            critique="Overall judgment: Incorrect",
            judgment=False,
            revision="b",
            before=program[0.25],
            after=program[passed],
        )
        for n in range(4)
    ]
    text = "".join(json.dumps(turn_record(turn)) + "\n" for turn in turns)
    path = folder / f"unseen_mutants.{arm.replace(' ', '')}.seed{seed}.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def test_tables_and_plots_come_from_transcripts_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no transcript yet"):
        study.write_tables(tmp_path, tmp_path)
    write(tmp_path, "oracle", 1, 1.0)
    for seed in (1, 2):
        write(tmp_path, "SFT", seed, 0.5)
        write(tmp_path, "SFT + GRPO", seed, 0.75)
    study.write_tables(tmp_path, tmp_path)
    files = [tmp_path / "tables.md", tmp_path / "unseen_mutants.svg"]
    before = [file.read_bytes() for file in files]
    told = files[0].read_text()
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in told.splitlines() if line}
    assert rows["first solutions"][1] == "0.250 [0.250, 0.250]"
    assert "| oracle | 1 | 1.000 [1.000, 1.000]" in told
    assert "| SFT | 1, 2 | 0.500 [0.500, 0.500]" in told
    assert "| SFT + GRPO | 1, 2 | 0.750 [0.750, 0.750]" in told
    # The last table: a gain for each seed that both have; what was not run is open.
    assert rows["SFT + GRPO"] == ["0.250 [0.250, 0.250]", "0.250 [0.250, 0.250]", "open |"]
    assert rows["SFT + PPO"] == ["open", "open", "open |"]
    study.write_tables(tmp_path, tmp_path)
    assert [file.read_bytes() for file in files] == before


def test_the_kept_tables_are_those_of_the_kept_transcripts(tmp_path: Path) -> None:
    study.write_tables(study.KEPT, tmp_path)
    made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert made.keys() >= {"tables.md", "unseen_mutants.svg"}
    assert made == {name: (study.HOME / name).read_bytes() for name in made}


def test_curves_come_from_the_steps_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "RUNS", tmp_path / "runs")
    write(tmp_path, "SFT", 1, 0.5)
    for seed, arm in ((1, "grpo"), (2, "grpo"), (1, "ppo")):
        run = tmp_path / "runs" / f"{arm}.seed{seed}"
        run.mkdir(parents=True)
        # The second step was made twice: the run was killed before it was saved.
        lines = [
            {
                "step": step,
                "metrics": {"time/step": 10.0, "group/reward_minus_first": gain, "other": 1},
            }
            for step, gain in ((1, 0.1), (2, 0.9), (2, 0.2), (3, 0.3))
        ]
        # The validation after a step is a separate line.
        lines.append({"step": 3, "metrics": {"val/revision_pass_rate": 0.5}})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text)
        study._keep_curve(run.name, study.curve_file(tmp_path, arm, seed))
    kept = [json.loads(line) for line in (tmp_path / "curve.ppo.seed1.jsonl").open()]
    assert kept == [
        {"step": step, "time/step": 10.0, "group/reward_minus_first": gain}
        for step, gain in ((1, 0.1), (2, 0.2), (3, 0.3))
    ]
    study.write_tables(tmp_path, tmp_path)
    drawn = (tmp_path / "curves.svg").read_bytes()
    study.write_tables(tmp_path, tmp_path)
    assert (tmp_path / "curves.svg").read_bytes() == drawn


def test_every_piece_follows_what_it_needs() -> None:
    known = study.pieces()
    assert len({piece.product for piece in known.values()}) == len(known)
    made: set[str] = set()
    for name, piece in known.items():
        assert set(piece.needs) <= made
        made.add(name)
    measured = [name for name in known if name.startswith("measure.")]
    assert len(measured) == 2 * (5 + 4 * 3)
    order = [piece.name for piece in study.in_order("measure.unseen_mutants.SFT_PPO.seed2", known)]
    assert order.index("sft.seed2") < order.index("ppo.seed2") < len(order) - 1


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_commands_name_keys_that_there_are(estimator: str) -> None:
    words = study._rl("x", Path("m"), 1, estimator)
    config = load_config(str(study.CONFIG), [w for w in words if "=" in w], "rl")
    assert config.trainer.save_hf_freq == config.trainer.total_training_steps
    words = study._sft("x", Path("m"), 1, "critic_sft", 3)
    assert load_config(str(study.CONFIG), [w for w in words if "=" in w], "sft").sft.lr == 2e-4
