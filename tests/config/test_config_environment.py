"""Launchers: who am I, of how many, and where do we meet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ctrl_megatron
from ctrl_megatron.config.environment import (
    child_environment,
    first_slurm_host,
    read_launch,
    read_log_level,
    read_provider_options,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}


def test_torchrun() -> None:
    launch = read_launch(TORCHRUN)
    assert (launch.launcher, launch.rank, launch.world_size) == ("torchrun", 5, 8)
    assert (launch.local_rank, launch.local_world_size) == (1, 4)
    assert (launch.master_addr, launch.master_port) == ("node1", 29500)


def test_slurm_ranks_agree_on_the_meeting_point() -> None:
    launches = [
        read_launch({**SLURM, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 8)})
        for r in range(16)
    ]
    assert {(x.master_addr, x.master_port) for x in launches} == {("gpu03", 23456)}
    assert {x.local_world_size for x in launches} == {8}
    assert read_launch({**SLURM, "CTRL_MASTER_PORT": "4000"}).master_port == 4000


def test_torchrun_inside_slurm_wins_and_a_bare_batch_script_is_single() -> None:
    assert read_launch({**SLURM, **TORCHRUN}).launcher == "torchrun"
    bare = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    assert read_launch(bare).launcher == "single"
    assert read_launch({}).world_size == 1


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_a_missing_or_wrong_variable_is_named(name: str) -> None:
    kept = {k: v for k, v in TORCHRUN.items() if k != name}
    with pytest.raises(ValueError, match=f"{name} is not set"):
        read_launch(kept)
    if name != "MASTER_ADDR":
        with pytest.raises(ValueError, match=f"{name}='x'"):
            read_launch({**TORCHRUN, name: "x"})


def test_ranks_outside_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 8"):
        read_launch({**TORCHRUN, "RANK": "8"})
    with pytest.raises(ValueError, match="local rank 4"):
        read_launch({**TORCHRUN, "LOCAL_RANK": "4"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],x1", "gpu03"),
        ("gpu7", "gpu7"),
        ("a,b", "a"),
        ("n[1,3]-ib", "n1-ib"),
        ("rack-1-[007-009]", "rack-1-007"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


def test_own_variables_are_checked() -> None:
    assert read_log_level({}) == "WARNING"
    assert read_log_level({"CTRL_LOG_LEVEL": "debug"}) == "DEBUG"
    with pytest.raises(ValueError, match="did you mean CTRL_LOG_LEVEL"):
        read_log_level({"CTRL_LOGLEVEL": "debug"})
    with pytest.raises(ValueError, match="must be one of"):
        read_log_level({"CTRL_LOG_LEVEL": "loud"})


def test_children_do_not_inherit_the_launcher() -> None:
    environ = {**TORCHRUN, "PATH": "/bin", "TORCHELASTIC_RUN_ID": "x", "CTRL_LOG_LEVEL": "INFO"}
    assert child_environment(environ) == {"PATH": "/bin"}


def test_a_child_sees_its_share_of_the_gpus_that_we_see() -> None:
    assert child_environment({}, devices=(2, 3)) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    for ours, theirs in (("4,5,6,7", "6,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-c,GPU-d")):
        made = child_environment({"CUDA_VISIBLE_DEVICES": ours}, devices=(2, 3))
        assert made == {"CUDA_VISIBLE_DEVICES": theirs}
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=4 shows 1 GPUs, .* number 1"):
        child_environment({"CUDA_VISIBLE_DEVICES": "4"}, devices=(0, 1))


def test_no_other_file_reads_the_environment() -> None:
    """Only one file reads; setting a variable for a library is not reading."""
    package = Path(ctrl_megatron.__file__).parent
    reads = re.compile(
        r"os\.getenv|os\.environ\.(get|items|copy)|(dict\(|\*\*)os\.environ|os\.environ\[.+\](?! =)"
    )
    readers = {
        str(p.relative_to(package)) for p in package.rglob("*.py") if reads.search(p.read_text())
    }
    # The latter is the environment of a sandboxed test, which its fixtures change.
    assert readers <= {"config/environment.py", "sandbox/jail/pytest_stand_in.py"}


def test_a_provider_gets_its_key_or_the_news_that_there_is_none() -> None:
    given = {"E2B_API_KEY": "k", "SANDBOX_FUSION_ENDPOINT": "http://p"}
    assert read_provider_options("e2b", given) == {"api_key": "k"}
    assert read_provider_options("e2b", {}) == {"api_key": None}
    assert read_provider_options("sandbox_fusion", given) == {"endpoint": "http://p"}
    assert read_provider_options("sandbox_fusion", {}) == {"endpoint": None}
    assert read_provider_options("local", given) == {}
