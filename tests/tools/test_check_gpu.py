"""The check for GPUs on a machine without one: what runs here, and how items report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from preloaded import ForkedProgram

from ctrl_megatron.commands import check_gpu
from ctrl_megatron.commands.check_gpu import GpuChecks, ItemFailed, ItemSkipped


def checks(folder: Path, *, gpus: int = 0, run: list[dict[str, Any]] | None = None) -> GpuChecks:
    engine = "vllm" if gpus else "hf"
    made = GpuChecks(work=folder, gpus=gpus, engine=engine, given=None, shape=None, timeout=300)
    if run is not None:
        made.begun, made.steps = True, run
    return made


def test_local_layers_give_the_log_probs_and_gradients_of_transformers(tmp_path: Path) -> None:
    """The real item, and the report around it."""
    command, log = ["tools/check_gpu.py", "--only", "logits", "--keep"], tmp_path / "log"
    code = ForkedProgram([*command, str(tmp_path / "work")], log, below=()).wait(timeout=PATIENCE)
    text = log.read_text()
    assert code == 0, text
    assert "Transformer Engine left out: it needs a GPU" in text
    assert "local (float32) against transformers in float32" in text
    assert "nothing failed" in text


def test_the_model_speaks_every_byte(tmp_path: Path) -> None:
    from ctrl_megatron.data.tokens import TextCodec

    check_gpu.write_random_model(tmp_path, large=False)
    codec = TextCodec(tmp_path)
    text = "def f(x):\n\treturn 'ü€'"
    assert codec.decode(codec.tokenizer.encode(text)) == text
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == len(codec.tokenizer)
    assert len(codec.encode_chat([{"role": "user", "content": "?"}])) > 10


def test_the_run_is_a_configuration_that_is_accepted(tmp_path: Path) -> None:
    from ctrl_megatron.config import load_config

    for gpus in (0, 1, 8):
        made = checks(tmp_path, gpus=gpus)
        made.__dict__["model"] = tmp_path
        command = made.grpo_command("run", 4, "trainer.save_freq=1")
        assert str(max(1, gpus)) in command
        config = load_config(str(tmp_path / "run.yaml"), ["trainer.save_freq=1"], "rl")
        assert config.reward.reward_funcs == ("ctrl_megatron.commands.check_gpu:checksum_reward",)


@pytest.mark.parametrize("name", check_gpu.VARIANTS)
def test_every_kind_of_run_is_accepted_and_waits_for_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from ctrl_megatron.config import load_config

    needed, _ = check_gpu.VARIANTS[name]
    if needed:
        with pytest.raises(ItemSkipped, match=f"it needs {needed} GPU"):
            checks(tmp_path, gpus=needed - 1).check_grpo_variant(name)
    commands: list[list[str]] = []
    monkeypatch.setattr(check_gpu, "write_random_model", lambda directory, **_: None)
    monkeypatch.setattr(GpuChecks, "output_of", lambda self, command, log: commands.append(command))
    step = {"actor/grad_norm": 1.0, "rollout/kl": 1e-3, "time/step": 2.0}
    metrics = {n: step | {"sync/gigabytes_per_second": 1.0} for n in range(3)}
    monkeypatch.setattr(GpuChecks, "read_run_metrics", lambda self, name: metrics)
    made = checks(tmp_path, gpus=max(1, needed))
    assert "KL per token by step 0.001, 0.001, 0.001" in made.check_grpo_variant(name)
    ((*_, ranks, _, file), overrides) = commands[0][:7], commands[0][7:]
    load_config(file, overrides, "rl")
    assert int(ranks) == (1 if name == "nccl" else max(1, needed))


def test_an_engine_with_the_weights_before_an_update_does_not_agree(tmp_path: Path) -> None:
    made, transport = checks(tmp_path), "wrong_senders:StaleSender"
    command = made.grpo_command(
        *("run", 2, "trainer.verify_weight_sync=false"),
        f"actor_rollout_ref.rollout.weight_transport={transport}",
    )
    path, log = os.pathsep.join([str(Path(__file__).parent), *sys.path]), tmp_path / "log"
    run = ForkedProgram(command[1:], log, below=(1, 1), environ={"PYTHONPATH": path})
    assert run.wait(timeout=PATIENCE) == 0, log.read_text()
    first, second = made.read_run_metrics("run").values()
    assert "KL per token" in checks(tmp_path, run=[first]).engine_agrees()
    with pytest.raises(ItemFailed, match=r"KL per token by step .*; 0\.005 allowed"):
        checks(tmp_path, run=[first, second]).engine_agrees()


def test_the_engine_must_agree_and_memory_must_not_grow(tmp_path: Path) -> None:
    def step(kl: float, asleep: float, norm: float = 1.0) -> dict[str, float]:
        memory = {"memory/generate_device_gib": 40.0, "memory/update_device_gib": asleep}
        return {"rollout/kl": kl, "actor/grad_norm": norm, **memory}

    good = checks(tmp_path, gpus=1, run=[step(0.001, 9.0 if n else 1.0) for n in range(4)])
    assert "KL per token by step 0.001, 0.001" in good.engine_agrees()
    assert "+0.000 GiB" in good.memory_does_not_grow()  # the first step still builds things
    with pytest.raises(ItemFailed, match="left the weights as they were"):
        checks(tmp_path, run=[step(0.0, 9.0), step(0.0, 9.0, norm=0.0)]).engine_agrees()
    with pytest.raises(ItemFailed, match="nan; 0"):
        checks(tmp_path, run=[step(0.0, 9.0), step(float("nan"), 9.0)]).engine_agrees()
    leaking = checks(tmp_path, gpus=1, run=[step(0.02, 9.0 + n) for n in range(4)])
    with pytest.raises(ItemFailed, match=r"0\.02, 0\.02; 0\.005 allowed"):
        leaking.engine_agrees()
    with pytest.raises(ItemFailed, match=r"update holds 2\.00 GiB more in step 4 than in step 2"):
        leaking.memory_does_not_grow()
    with pytest.raises(ItemFailed, match="no metrics memory/"):
        checks(tmp_path, gpus=1, run=[{}]).memory_does_not_grow()
    with pytest.raises(ItemSkipped, match="no GPU"):
        checks(tmp_path, run=[{}]).memory_does_not_grow()
    with pytest.raises(ItemSkipped, match="the training run failed"):
        checks(tmp_path, gpus=1, run=[]).memory_does_not_grow()


def test_errors_are_compared_with_what_rounding_costs_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {"mean": 0.05, "most": 0.3, "cosine": 0.96, "tensor": "q"}
    made = checks(tmp_path, gpus=0)
    made.__dict__["model"] = tmp_path

    def says(**ours: Any) -> None:
        found = json.dumps({"ours": theirs | ours, "theirs": theirs})
        done = subprocess.CompletedProcess([], 0, stdout=f"...\n{found}\n", stderr="")
        monkeypatch.setattr(GpuChecks, "run_python", lambda self, *words: done)

    says(mean=0.07, cosine=0.95)
    assert "0.07 in the mean (float32 in transformers: 0.05)" in made.logits_and_gradients()
    nothing = float("nan")
    for wrong in ({"mean": 0.08}, {"cosine": 0.93}, {"mean": nothing}, {"cosine": nothing}):
        says(**wrong)
        with pytest.raises(ItemFailed, match="least cosine of a gradient"):
            made.logits_and_gradients()


PLAN = """1 GPUs of 80.0 GiB on 1 hosts; 73.6 GiB of each may be used, 8% stay free

phase             GiB   rank  largest
start: engine    66.7      0  engine's key-value cache 44.4 GiB
generate         40.4      0  engine's key-value cache 44.4 GiB, engine's weights 16.9 GiB
update           79.9!     0  actor's moments 9.3 GiB
"""


def test_measured_memory_is_compared_with_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"memory/rollout_actor_device_gib": 41.0, "memory/actor_update_device_gib": 79.5}
    made = checks(tmp_path, gpus=1, run=[step, step])
    done = subprocess.CompletedProcess([], 0, stdout=PLAN, stderr="")
    nvidia_smi = subprocess.CompletedProcess([], 0, stdout="81559\n")
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(GpuChecks, "run_python", lambda self, *words: done)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: nvidia_smi)
    assert made.planned_gib_by_phase() == {"start: engine": 66.7, "generate": 40.4, "update": 79.9}
    assert "rollout_actor             41.00 GiB, planned  40.40 GiB" in made.memory_by_phase()
    step["memory/actor_update_device_gib"] = 78.0
    with pytest.raises(ItemFailed, match=r"1 phases differ by more than 1\.0 GiB"):
        made.memory_by_phase()


def test_a_gradient_that_is_no_number_is_the_worst() -> None:
    import torch

    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    found = check_gpu.log_prob_and_gradient_errors(
        torch.zeros(3), ["a", "b", "c"], [(good, good), (bad, good), (-good, good)]
    )
    assert found["tensor"] == "b" and found["cosine"] != found["cosine"]


def test_an_item_that_fails_does_not_keep_the_next_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise ItemFailed("too slow\nby far")

    def breaks() -> str:
        raise ZeroDivisionError

    def is_left_out() -> str:
        raise ItemSkipped("no GPU")

    items = {"one": fails, "two": breaks, "three": is_left_out, "four": lambda: "good"}
    monkeypatch.setattr(GpuChecks, "items", lambda self: items)
    assert check_gpu.main(["--keep", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line[:4] in ("FAIL", "skip", "pass")] == [
        ["FAIL", "one"],
        ["FAIL", "two"],
        ["skip", "three"],
        ["pass", "four"],
    ]
    assert "      by far" in lines and "2 failed" in lines
    assert check_gpu.main(["--keep", str(tmp_path), "--only", "our", "hre"]) == 0
