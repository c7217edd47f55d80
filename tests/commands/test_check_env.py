"""Every line of the check, on a right machine and on a wrong one."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctrl_megatron.commands import check_env
from ctrl_megatron.commands.check_env import EnvironmentFinding
from ctrl_megatron.config import load_config

ROOT = Path(__file__).parents[2]


def by_item(findings: object) -> dict[str, EnvironmentFinding]:
    return {finding.item: finding for finding in findings}  # type: ignore[attr-defined]


def test_a_job_of_two_machines_is_checked() -> None:
    """Real ranks: they meet, and compare their clocks."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = [*launcher, "--nproc-per-node", "2", "tools/check_env.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert sum(line.startswith("pass  machine") for line in lines) == 1  # the first rank's
    for item, words in (
        ("megatron-core", metadata.version("megatron-core")),
        ("kernel: attention", "PackedAttention"),
        ("kernel: optimizer", "AdamW"),
        ("sandbox", "isolation "),
        ("ranks meet", "2 at "),
        ("clocks", "0.0"),
    ):
        assert any(item in line and words in line for line in lines), (item, done.stdout)
    assert (done.returncode == 0) == (not any(line.startswith("FAIL") for line in lines))


def test_a_wrong_configuration_is_wrong_input(capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", str(ROOT / "examples/ctrl_7b.yaml")]
    assert check_env.main([*config, "trainer.sead=1"]) == 2
    assert check_env.main([*config, "--nproc-per-node", "3"]) == 2
    assert check_env.main(["trainer.seed=1"]) == 2
    errors = capsys.readouterr().err
    assert "'trainer.sead'" in errors and "needs --config FILE" in errors


def test_a_wrong_version_and_the_other_apex_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = check_env.installed_version
    wrong = {"transformers": "4.0.0", "rich": None, "apex": "0.9.10.dev0"}
    monkeypatch.setattr(check_env, "installed_version", lambda name: wrong.get(name, real(name)))
    found = by_item(check_env.package_findings())
    assert found["transformers"].status == "FAIL" and "wanted " in found["transformers"].found
    assert found["rich"] == EnvironmentFinding("FAIL", "rich", "not installed", check_env._ENV)
    assert found["apex"].status == "FAIL" and found["apex"].remedy == "pip uninstall apex"
    assert found["torch"].status == "pass" and found["flash-attn"].status == "skip"


NVIDIA_SMI = """#!/bin/sh
cat <<'END'
{rows}
END
exit {code}
"""


@pytest.fixture
def nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, EnvironmentFinding]]:
    """The findings of ``gpu_findings`` if nvidia-smi prints these rows."""

    def find(rows: str, code: int = 0, cuda: str = "13.0") -> dict[str, EnvironmentFinding]:
        import torch

        program = tmp_path / "nvidia-smi"
        program.write_text(NVIDIA_SMI.format(rows=rows, code=code))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return by_item(check_env.gpu_findings())

    return find


def test_gpus_in_order(nvidia_smi: Callable[..., dict[str, EnvironmentFinding]]) -> None:
    found = nvidia_smi("0, 580.65.06, 81559, 4, 0\n1, 580.65.06, 81559, 4, [N/A]")
    assert {f.status for f in found.values()} == {"pass"}
    assert set(found) == {"driver", "GPU 0", "GPU 1"}


@pytest.mark.parametrize(
    ("rows", "code", "item", "words"),
    [
        ("0, 535.10, 81559, 4, 0", 0, "driver", "needs driver 580"),
        ("0, 580.65, 81559, 71234, 0", 0, "GPU 0", "another job left"),
        ("0, 580.65, 81559, 4, 7", 0, "GPU 0", "out of service"),
        ("NVIDIA-SMI has failed", 9, "driver", "NVIDIA-SMI has failed"),
    ],
)
def test_a_gpu_that_is_not(
    nvidia_smi: Callable[..., dict[str, EnvironmentFinding]],
    rows: str,
    code: int,
    item: str,
    words: str,
) -> None:
    finding = nvidia_smi(rows, code)[item]
    assert finding.status == "FAIL" and words in str(finding)


ROLLOUT, PROXY = "actor_rollout_ref.rollout.", "actor_rollout_ref.proxy."
LORA = "actor_rollout_ref.model.lora_rank=8"
TWO = "tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("overrides", "gpus", "status", "words"),
    [
        (None, 0, "warn", "1.0 needed by several GPUs, and by a vLLM on several devices or with"),
        ([], 1, "pass", "0.1 GiB free, 0.0 needed"),
        ([], 2, "FAIL", "0.1 GiB free, 1.0 needed"),
        ([ROLLOUT + "name=vllm", ROLLOUT + TWO], 0, "FAIL", "--shm-size"),
        ([ROLLOUT + "name=vllm", ROLLOUT + "adapter_push=true", LORA], 0, "FAIL", "--shm-size"),
        ([ROLLOUT + "name=sglang", ROLLOUT + TWO], 0, "pass", "0.0 needed"),
        (
            [PROXY + "kind=engine", PROXY + "engine.name=vllm", PROXY + "engine." + TWO],
            *(0, "FAIL", "--shm-size"),
        ),
    ],
)
def test_the_shared_memory_that_a_run_needs(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str] | None, gpus: int, status: str, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    config = None if overrides is None else load_config(None, overrides, "none")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    (finding,) = check_env.shared_memory_findings(config)
    assert finding.status == status and words in str(finding)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    (finding,) = check_env.shared_memory_findings(config)
    assert finding.status == "pass"


def test_low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    files, locked = check_env.resource_limit_findings()
    assert files.status == "FAIL" and "1024, at most 4096" in str(files)
    assert locked.status == "warn" and "InfiniBand" in str(locked)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert {finding.status for finding in check_env.resource_limit_findings()} == {"pass"}


def test_a_step_bound_to_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_env.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(check_env.os, "sched_getaffinity", lambda _: {5})
    (finding,) = check_env.processor_findings()
    assert finding.status == "FAIL" and "1 of 64 usable" in str(finding)
    assert "--cpu-bind=none" in str(finding)


def test_gpus_that_torch_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from ctrl_megatron.parallel import devices

    monkeypatch.setattr(devices, "why_gpus_unusable", lambda: "no way; install it")
    (finding,) = check_env.torch_gpu_findings()
    assert finding == EnvironmentFinding("FAIL", "torch and GPUs", "no way; install it")


def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "H100")
    (found,), (enough,) = check_env.torch_gpu_findings(8), check_env.torch_gpu_findings(7)
    assert (found.status, enough.status) == ("FAIL", "pass")
    assert "7 x H100" in str(found) and "for 8 ranks" in str(found)


def test_a_check_that_breaks_is_a_line_and_the_next_ones_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(config: object) -> None:
        raise RuntimeError("kernel module missing\nand more")

    monkeypatch.setattr(check_env, "kernel_findings", broken)
    launch = check_env.Launch("single", 0, 1, 0, 1, "127.0.0.1", 0)
    found = by_item(check_env.environment_findings(launch, None))
    assert found["kernels"].found == "RuntimeError: kernel module missing"
    assert found["processors"].status == "pass" and found["ranks meet"].status == "skip"


@pytest.mark.parametrize(
    ("capability", "dtype", "found", "note"),
    [
        ((9, 0), "bfloat16", "TEDotProductAttention", ""),
        ((8, 0), "bfloat16", "varlen_attn", "no variable lengths on sm80; install flash-attn"),
        ((7, 5), "bfloat16", "scaled_dot_product_attention", "on sm75"),
        ((9, 0), "float32", "scaled_dot_product_attention", "use bfloat16"),
    ],
)
def test_attention_that_transformer_engine_does_not_compute_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: str,
    found: str,
    note: str,
) -> None:
    import torch

    from ctrl_megatron.models import attention_kernel, kernels, layer_spec

    installed = {"transformer_engine": "2.11.0"}
    for name, value in (
        ("is_available", lambda: True),
        ("current_device", lambda: 0),
        ("get_device_capability", lambda device: capability),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(attention_kernel, "_version", lambda _, module: installed.get(module))
    monkeypatch.setattr(
        attention_kernel, "attention_kernel_on", attention_kernel.attention_kernel_on.__wrapped__
    )
    monkeypatch.setattr(layer_spec, "has_transformer_engine", lambda: True)
    provider = kernels._attention("megatron.core.extensions.TEDotProductAttention", dtype)
    monkeypatch.setattr(kernels, "kernel_providers", lambda kind: {"attention": provider})
    config = load_config(None, [f"actor_rollout_ref.model.dtype={dtype}"], "none")
    (finding,) = check_env.kernel_findings(config)
    assert found in finding.found and note in finding.remedy
    assert (finding.status == "warn") == bool(note)


def test_clocks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from ctrl_megatron.parallel import meeting

    def two_clocks(values: list[object], mine: object) -> None:
        now = time.time()
        values[:] = [(now, "gpu01"), (now + 42.0, "gpu02")]

    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(meeting, "rendezvous", lambda *args: {})
    monkeypatch.setattr(dist, "all_gather_object", two_clocks)
    launch = check_env.Launch("torchrun", 0, 2, 0, 1, "gpu01", 20000)
    clocks = by_item(check_env.rendezvous_and_clock_findings(launch))["clocks"]
    assert clocks.status == "FAIL" and "42.000 s apart, gpu02 is ahead of gpu01" in str(clocks)


def test_machines_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_env, "_MEETING_SECONDS", 1.0)
    launch = check_env.Launch("slurm", 1, 2, 0, 1, "127.0.0.1", 1)  # a port without a listener
    (finding,) = check_env.rendezvous_and_clock_findings(launch)
    assert finding.status == "FAIL" and "not at 127.0.0.1:1" in str(finding)
    assert "GLOO_SOCKET_IFNAME" in str(finding)
