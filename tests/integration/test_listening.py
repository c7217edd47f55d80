"""A run on one host is reached from that host only."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request

import psutil
import pytest
from free_port import free_port
from launched_run import Job
from listening import listening, reached_from_outside

from ctrl_megatron.rollout.engine import available_engines

# A busy machine may be several times slower than an idle one.
pytestmark = pytest.mark.timeout(900)

_ROLLOUT = "actor_rollout_ref.rollout"
_NAMELESS = ("unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid; exec "$@"', "sh")
"""On a machine whose own name leads nowhere, as in many containers; needs root."""
_MACHINE = _NAMELESS if subprocess.run([*_NAMELESS, "true"], check=False).returncode == 0 else ()


def status_without_token(place: str) -> int:
    """The answer of an HTTP service to a program of somebody else."""
    try:
        with urllib.request.urlopen(f"http://{place}/run_code", b"{}", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def listens_on_loopback(job: Job, name: str, *extra: str) -> dict[str, str]:
    """The sockets at which a whole run of the command listens, all of them on loopback."""
    port, sockets, answered = free_port(), dict[str, str](), list[int]()
    extra = (f"trainer.metrics_port={port}", *extra)
    with job.launch(
        name, steps=2, extra=extra, ranks=2, own=True, preloaded=True, under=_MACHINE
    ) as run:
        while run.process.poll() is None:
            try:
                processes = [psutil.Process(run.process.pid), *run.look()]
                sockets |= listening(processes)
                for service in () if answered else processes:
                    if "ctrl_megatron.sandbox" in service.cmdline():
                        answered = [status_without_token(place) for place in listening([service])]
            except psutil.NoSuchProcess:
                continue
        assert run.ends() == 0, run.output()[-8000:]
    assert f"127.0.0.1:{port}" in sockets
    assert answered == [401]
    assert reached_from_outside(sockets) == {}
    return sockets


def test_a_run_listens_on_loopback_only(job: Job) -> None:
    sockets = listens_on_loopback(job, "listening")
    # The launcher's two stores, ranks, engine and sandbox.
    assert len(set(sockets.values())) >= 5, sockets


@pytest.mark.long
def test_so_does_a_run_with_engines_beside_the_trainer(job: Job) -> None:
    listens_on_loopback(
        job, "dedicated", f"{_ROLLOUT}.placement=dedicated", f"{_ROLLOUT}.n_gpus_per_node=1"
    )


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_so_do_engines_with_workers_of_their_own(job: Job, engine: str, tensor: int) -> None:
    if engine not in available_engines():
        pytest.skip(f"the optional engine {engine} is not installed")
    keys = (f"name={engine}", f"tensor_model_parallel_size={tensor}", "kv_cache_gib=0.1")
    listens_on_loopback(job, f"{engine}{tensor}", *(f"{_ROLLOUT}.{key}" for key in keys))
