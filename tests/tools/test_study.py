"""The study's pieces depend on each other correctly, and their commands are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.errors import UserError
from ctrl_megatron.eval.transcripts import transcript_part_file
from ctrl_megatron.types import Problem
from examples.study_smollm2 import plan as study_plan
from examples.study_smollm2 import study
from examples.study_smollm2.plan import ARMS, PROXIES, SEEDS, TESTS, WRITTEN


def test_every_piece_follows_what_it_needs() -> None:
    known = study.pieces()
    assert len({piece.product for piece in known.values()}) == len(known)
    made: set[str] = set()
    for name, piece in known.items():
        assert set(piece.needs) <= made
        made.add(name)
    order = [piece.name for piece in study.in_order("measure.unseen_mutants.SFT_PPO.seed2", known)]
    assert order.index("sft.seed2") < order.index("ppo.seed2") < len(order) - 1
    order = [p.name for p in study.in_order("public.unseen_mutants-rounds.SFT.seed1", known)]
    assert order[-2:] == [order[-1].replace("public", "measure"), order[-1]]


def test_every_piece_makes_its_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def record(*given: object) -> None:
        done.extend(str(one) for one in given)

    makers = "_run", "_measure", "_judge_public", "_feedback", "_keep_curve"
    for name in (*makers, "_task_rows", "_teacher_rows"):
        monkeypatch.setattr(study, name, record)
    for name, piece in study.pieces().items():
        done.clear()
        piece.work()
        if name.startswith(("measure.", "public.", "curve.", "feedback.")):
            assert str(piece.product) in done
        elif "seed" in name:
            assert f"trainer.experiment_name={name}" in done[0]


def test_every_arm_is_measured_with_every_seed_test_and_proxy() -> None:
    measured = [name for name in study.pieces() if name.startswith("measure.")]
    untrained = sum(len(test.untrained) + len(test.others) for test in TESTS)
    trained = sum(len(arm.tests) + len(arm.proxies) + arm.rounds for arm in ARMS.values())
    assert len(measured) == untrained + trained * len(SEEDS)


def test_arms_are_told_apart_by_their_files_and_runs() -> None:
    names = [*WRITTEN, *ARMS]
    assert len({transcript_part_file(Path(), name, 1) for name in names}) == len(names)
    assert len({arm.run for arm in ARMS.values()}) == len(ARMS)
    seen = list(ARMS)
    for name, arm in ARMS.items():
        assert seen.index(arm.base) <= seen.index(name)
        assert arm.start is None or arm.start in {a.run for a in ARMS.values()}
    assert set(study_plan.CURVES) <= set(ARMS)


@pytest.mark.parametrize("name", list(ARMS))
def test_commands_name_keys_that_there_are(name: str) -> None:
    arm = ARMS[name]
    if arm.reinforced:
        words = study._rl(arm, 2)
        config = load_config(str(study.CONFIG), [w for w in words if "=" in w], "rl")
        assert config.trainer.save_hf_freq == config.trainer.total_training_steps == arm.steps
        assert config.actor_rollout_ref.proxy.model.path == str(arm.proxy.path)
        rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        assert rows == study_plan.CRITIQUES
    else:
        words = study._sft(arm.run, study_plan.MODEL, 1, arm.files, arm.steps)
        config = load_config(str(study.CONFIG), [w for w in words if "=" in w], "sft")
        assert config.sft.lr == 2e-4
    assert {proxy.name for proxy in PROXIES} >= {proxy.name for proxy in arm.proxies}


def test_the_first_test_of_any_problem_is_the_public_one() -> None:
    fields = {"id": "p", "statement": "s"}
    asserts = Problem(**fields, prompter_type="mbppplus", selected_uts=("assert a", "assert b"))
    assert study.with_first_test(asserts).selected_uts == ("assert a",)
    cases = [{"input": {"stdin": str(n)}, "output": {"stdout": "1"}} for n in range(2)]
    text = Problem(**fields, prompter_type="code_contests", selected_uts=json.dumps(cases))
    first = study.with_first_test(text).selected_uts
    assert isinstance(first, str) and json.loads(first) == cases[:1]


def test_a_run_keeps_its_last_attempt_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "RUNS", tmp_path)
    # The second step was made twice: the run was killed before it was saved. The explained variance
    # of the first step has no value, and the validation after a step is a separate line.
    lines = [
        {"step": step, "metrics": {"time/step": 10.0, "group/reward_minus_first": gain, "other": 1}}
        for step, gain in ((1, 0.1), (2, 0.9), (2, 0.2), (3, 0.3))
    ]
    lines[-1]["metrics"] |= {"critic/explained_variance": 0.5, "task/solving/share": 0.1}  # type: ignore[operator]
    lines.append({"step": 3, "metrics": {"val/revision_pass_rate": 0.5}})
    (tmp_path / "ppo.seed1").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "ppo.seed1/metrics.jsonl").write_text(text)
    study._keep_curve("ppo.seed1", tmp_path / "kept.jsonl")
    last = {"critic/explained_variance": 0.5, "task/solving/share": 0.1}
    assert [json.loads(line) for line in (tmp_path / "kept.jsonl").open()] == [
        {"step": step, "time/step": 10.0, "group/reward_minus_first": gain} | more
        for step, gain, more in ((1, 0.1, {}), (2, 0.2, {}), (3, 0.3, last))
    ]


def test_a_piece_without_the_users_file_says_so_and_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    given, product = tmp_path / "given", tmp_path / "made"

    def make(name: str, *files: Path) -> study.Piece:
        work = lambda: made.append(name)  # noqa: E731
        return study.Piece(name=name, product=product / name, needs=(), work=work, given=files)

    order = [make("reads", given), make("wanted")]
    study._make(order, required=False)
    assert str(given) in capsys.readouterr().out and not made
    with pytest.raises(UserError, match=f"wanted reads {given}"):
        study._make(order, required=True)
    given.touch()
    study._make(order, required=True)
    assert made == ["reads", "wanted"]
    # A finished piece needs its file no more.
    made.clear()
    given.unlink()
    product.mkdir()
    (product / "reads").touch()
    study._make(order, required=True)
    assert made == ["wanted"]
