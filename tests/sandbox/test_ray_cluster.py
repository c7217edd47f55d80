"""Services on the nodes of a Ray cluster: two nodes on loopback addresses of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sandbox_talk import BackgroundLoop, submission, wait_until

from ctrl_megatron.sandbox import SandboxClient
from ctrl_megatron.sandbox.client.ray_cluster import (
    Deployment,
    NodeFailure,
    ServiceOptions,
    connect,
)

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef"
HEAD, OTHER = "127.0.0.2", "127.0.0.3"


def test_the_tool_says_that_there_is_no_cluster(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/serve_sandbox_ray.py")]
    files = ["--endpoints-file", str(tmp_path / "e"), "--token-file", str(tmp_path / "t")]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    ran = subprocess.run(
        [*command, *files],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert ran.stderr.strip().splitlines()[-1].startswith("sandbox: ")
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "e").exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Any, Any]]:
    """A Ray cluster of two nodes that this process is connected to, and its second node."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    before = {child.pid for child in psutil.Process().children()}
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    head = {**small, "include_dashboard": False, "node_ip_address": HEAD}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        other = found.add_node(**small, node_ip_address=OTHER)
        connect(found.address, _node_ip_address=HEAD)
        yield found, other
    finally:
        ray.shutdown()
        found.shutdown()
        left = [child for child in psutil.Process().children() if child.pid not in before]
        assert not psutil.wait_procs(left, timeout=20)[1]


def hosts(deployment: Deployment) -> set[str]:
    return {address.split("//")[1].split(":")[0] for address in deployment.endpoints.values()}


def service_on(host: str) -> psutil.Process:
    wanted = ["ctrl_megatron.sandbox", "--host", host]
    # A process that ends meanwhile has no command line.
    processes = psutil.process_iter(["cmdline"])
    return next(p for p in processes if (p.info["cmdline"] or [])[2:5] == wanted)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_every_node_serves_a_service_that_ends_is_replaced_a_node_that_leaves_is_forgotten(
    cluster: tuple[Any, Any], tmp_path: Path, on_loop: BackgroundLoop
) -> None:
    file = tmp_path / "endpoints"
    options = ServiceOptions(token=TOKEN, workers=1, isolation="standard", drain_seconds=2.0)
    deployment = Deployment(options, file)

    async def judged(endpoint: str) -> bool:
        tests = {"test_list": ["assert f(2) == 4"]}
        config = {"dataset_type": "MBPPDataset", "provided_data": tests}
        request = submission("def f(x): return x * x", **config)
        async with SandboxClient(endpoint, token=TOKEN) as client:
            return (await client.submit(request)).accepted

    try:
        deployment.reconcile()
        deployment.require_all()
        assert hosts(deployment) == {HEAD, OTHER}
        assert file.read_text().strip().split(",") == sorted(deployment.endpoints.values())
        assert all(on_loop(judged(address)) for address in deployment.endpoints.values())
        assert deployment.reconcile() == []

        addresses, process = deployment.endpoints, service_on(OTHER)
        process.send_signal(signal.SIGKILL)
        assert wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        report: list[str] = []
        # A node that is slow to answer is taken for a busy one, until the next time.
        assert wait_until(lambda: report.extend(deployment.reconcile()) or len(report) > 1, 60)
        ended, started = report
        assert "the service ended" in ended and f"node {OTHER}" in started
        assert deployment.endpoints == addresses  # a trainer knows no others
        assert all(on_loop(judged(address)) for address in addresses.values())

        cluster[0].remove_node(cluster[1])
        told: list[str] = []
        assert wait_until(lambda: bool(told.extend(deployment.reconcile()) or told), 60)
        assert hosts(deployment) == {HEAD}
        assert file.read_text().strip() in addresses.values()
        left = service_on(HEAD)
    finally:
        deployment.stop()
    assert not file.exists()
    assert wait_until(lambda: not left.is_running())


@pytest.mark.timeout(120)
def test_a_node_that_cannot_serve_is_named_with_the_reason(
    cluster: tuple[Any, Any], tmp_path: Path
) -> None:
    options = ServiceOptions(token="short", workers=1)
    deployment = Deployment(options, tmp_path / "endpoints")
    try:
        deployment.reconcile()
        with pytest.raises(NodeFailure, match=rf"node {HEAD}: no service: .*at least 16"):
            deployment.require_all()
    finally:
        deployment.stop()
