"""ctrl-plan, and a run's check of its GPU."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from ctrl_megatron.commands.plan import main
from ctrl_megatron.config import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
LARGE = ["--config", str(EXAMPLES / "ctrl_70b.yaml")]
SHAPE = ["--model-config", str(EXAMPLES / "shapes/qwen2.5-72b.json")]


def test_a_run_on_4096_gpus_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    world = ["--nodes", "512", "--gpus-per-node", "8", "--gpu-memory", "80"]
    assert main([*LARGE, *SHAPE, *world]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4096 GPUs of 80.0 GiB on 512 hosts")
    rows = [line.split("  ")[0] for line in out.splitlines()]
    for phase in ("generate", "log-probs", "update", "sync", "save", "save-on-stop", "resume"):
        assert phase in rows
    assert "fullest: sync proxy, rank 0 (pipeline stage 0)" in out
    assert "\nhost " in out and "\ncheckpoint: " in out


def test_a_push_is_printed_with_its_links_phases_and_floor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*LARGE, *SHAPE, "--push"]) == 0
    out = capsys.readouterr().out
    assert "145.4 GB into each of 8 engines of 8 workers" in out
    # 64 ranks: each has an eighth of what its own worker needs.
    assert re.search(r"inside a rank +145\.4 ", out)
    assert re.search(r"between hosts +1018\.0 +17\.54 +15\.98\n", out)
    seconds, floor = (float(x) for x in re.findall(r"(?:^|floor: )(\d\.\d+) s[ ,]", out, re.M))
    assert floor == pytest.approx(0.351, abs=0.001) and floor < seconds < 1
    assert main([*LARGE, *SHAPE, "--push", "--network-speed", "5"]) == 0
    assert "floor: 3.508 s" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["64", "512"])
@pytest.mark.parametrize("model", ["qwen3-235b-a22b", "deepseek-v3"])
def test_the_largest_models_fit_and_are_planned_in_a_minute(
    model: str, nodes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V3's engine needs 141 GiB and weights in 8 bits on a host of 8 GPUs."""
    chosen = ["--config", str(EXAMPLES / "qwen3_235b.yaml"), "--nodes", nodes]
    chosen += ["--model-config", str(EXAMPLES / f"shapes/{model}.json")]
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    keys = [f"{key}=1024" for key in ("data.train_batch_size", "data.val_batch_size")]
    keys.append(actor + "ppo_mini_batch_size=1024")
    memory = list[str]()
    if model == "deepseek-v3":
        keys += [actor + "megatron.pipeline_model_parallel_size=16"]
        keys += [actor + "megatron.expert_model_parallel_size=32"]
        memory = ["--gpu-memory", "141", rollout + "quantization=fp8"]
        memory += [rollout + "gpu_memory_utilization=0.7"]
        memory += ["algorithm.rollout_correction.rollout_is=token"]
    began = time.process_time()
    assert main([*chosen, *memory, *keys]) == 0
    assert f"{8 * int(nodes)} GPUs of " in capsys.readouterr().out
    assert main([*chosen, "--push", *keys]) == 0
    assert f"into each of {nodes} engines of 8 workers" in capsys.readouterr().out
    assert time.process_time() - began < 60


def test_what_does_not_fit_is_printed_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LARGE, *SHAPE, "actor_rollout_ref.rollout.gpu_memory_utilization=0.95"]) == 2
    said = capsys.readouterr()
    assert "64 GPUs of 80.0 GiB" in said.out
    assert re.match("plan: [a-z: -]+ needs .* GiB", said.err) and said.err.count("\n") == 1


def test_fine_tuning_has_a_plan_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LARGE, *SHAPE, "--purpose", "sft"]) == 0
    assert "generate" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (LARGE, "models/Qwen2.5-72B-Instruct-sft/config.json does not exist; a plan needs"),
        ([*LARGE, "--model-config", "nowhere.json"], "nowhere.json does not exist"),
        ([*LARGE, *SHAPE, "--nodes", "3"], "does not divide the 24 ranks"),
        ([*LARGE, *SHAPE, "--gpu-memory", "0"], "--gpu-memory=0.0 must be greater than 0"),
        ([*LARGE, *SHAPE, "trainer.nodes=3"], "trainer.nodes"),
    ],
)
def test_wrong_input_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("purpose", ["rl", "sft"])
def test_a_run_that_its_gpu_cannot_hold_does_not_start(
    purpose: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ctrl_megatron.run import train as run
    from ctrl_megatron.run.checks import machine, rl
    from ctrl_megatron.sft import run as sft_run

    shape = json.loads((EXAMPLES / "shapes/qwen2.5-7b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = load_config(
        EXAMPLES / "ctrl_7b.yaml",
        [
            f"actor_rollout_ref.model.path={tmp_path}",
            f"actor_rollout_ref.ref.model.path={tmp_path}",
        ],
    )
    started = []
    for starts, checks in ((run, rl), (sft_run, sft_run)):
        monkeypatch.setattr(starts, "session", lambda *_: started.append(1))
        monkeypatch.setattr(checks, "check_model_files", lambda *_: None)  # there are no weights
    train = run.train if purpose == "rl" else sft_run.train_sft
    monkeypatch.setattr(machine, "gpu_of_rank", lambda: ("NVIDIA Z100 next", 80 * 2**30))
    with pytest.raises(
        ValueError, match=r"trainer\.peak_tflops_per_device: .*Z100 next.* not known"
    ):
        train(config)
    monkeypatch.setattr(machine, "gpu_of_rank", lambda: ("NVIDIA H100 80GB HBM3", 24 * 2**30))
    with pytest.raises(ValueError, match=r"needs .* GiB on rank 0 .*largest: "):
        train(config)
    assert not started


def test_engines_of_the_proxy_have_gpus_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    engine = "actor_rollout_ref.proxy.engine."
    own = [
        "actor_rollout_ref.proxy.kind=engine",
        f"{engine}name=vllm",
        f"{engine}n_gpus_per_node=4",
    ]
    own += [f"{engine}gpu_memory_utilization=0.9", f"{engine}tensor_model_parallel_size=4"]
    small = ["--config", str(EXAMPLES / "ctrl_7b.yaml"), "--gpus-per-node", "8"]
    small += ["--model-config", str(EXAMPLES / "shapes/qwen2.5-7b.json")]
    large = ["--proxy-config", str(EXAMPLES / "shapes/qwen2.5-72b.json")]
    assert main([*small, *own, "--ranks"]) == 0
    assert capsys.readouterr().out == "4\n"
    assert main([*small, *own, *large]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 GPUs of 80.0 GiB on 1 hosts, and 4 of engines alone;")
    # 145.4 GB on four GPUs; the rest of 72 GiB is its cache but for graphs and workspace.
    cache = re.search(r"proxy's engines: 4 .* key-value cache (\d+\.\d) GiB of each GPU", out)
    assert cache is not None and 72 - 34 - 6 < float(cache[1]) < 72 - 33.8
    assert "proxy's engines 20.0 GiB" in out.split("\nhost ")[1]
    # 85 % of two GPUs, 136 GiB, hold the weights with a cache of nothing.
    two = [f"{engine}tensor_model_parallel_size=2", f"{engine}gpu_memory_utilization=0.85"]
    assert main([*small, *large, *own, *two]) == 2
    said = capsys.readouterr().err
    assert (
        "start: proxy's engine: actor_rollout_ref.proxy.engine.gpu_memory_utilization=0.85" in said
    )
    assert "it fits with " in said and said.endswith(f"{engine}tensor_model_parallel_size=4\n")
    assert main([*small, *large, *own, f"{engine}gpu_memory_utilization=1.0"]) == 2
    assert "start: proxy's engine needs 81.1 GiB on a GPU of its own" in capsys.readouterr().err


def test_a_proxy_of_an_unknown_family_is_not_planned_and_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "starcoder2"}))
    own = [
        "actor_rollout_ref.proxy.kind=engine",
        "actor_rollout_ref.proxy.engine.n_gpus_per_node=2",
    ]
    proxy = ["--proxy-config", str(tmp_path / "config.json")]
    small = ["--config", str(EXAMPLES / "ctrl_7b.yaml")]
    small += ["--model-config", str(EXAMPLES / "shapes/qwen2.5-7b.json")]
    assert main([*small, *own, *proxy]) == 0
    out = capsys.readouterr().out
    assert re.search(r"proxy's engines: 2 .* whose memory is not planned: .*starcoder2", out)
    assert main([*small, *own, "--gpus-per-node", "2", *proxy]) == 2
    assert "leaves no GPU for ranks beside 2 of engines" in capsys.readouterr().err


def test_a_model_of_transformers_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", str(EXAMPLES / "any_model_fsdp.yaml")]
    given += ["--model-config", str(EXAMPLES / "shapes/smollm3-3b.json")]
    assert main(given) == 0
    # Four bytes of 3.08 billion weights over eight GPUs.
    assert re.search(r"update .* actor's parameters 1\.4 GiB", capsys.readouterr().out)
    # A copy on every GPU has eight times as much; a GPU of 24 GiB does not hold it.
    copies = "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"
    assert main([*given, copies, "--gpu-memory", "24"]) == 2
    said = capsys.readouterr().err
    assert "actor's moments 22.9 GiB" in said and said.endswith("take more GPUs\n")
    assert main([*given, "--push"]) == 2
    assert "--push" in capsys.readouterr().err
