"""Limits on a worker's processes together: how a subtree is divided, and that the kernel counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from sandbox_talk import BackgroundLoop, submission

from ctrl_megatron.sandbox import EmbeddedSandbox, SandboxClient
from ctrl_megatron.sandbox.limits import SandboxLimits
from ctrl_megatron.sandbox.service.cgroups import CgroupSubtree, NotDelegated

ME = str(os.getpid())


class Tree:
    """Directories like a mounted cgroup v2, in which this process is in ``/job``."""

    def __init__(self, root: Path) -> None:
        self.home = root / "cgroup" / "job"
        self.home.mkdir(parents=True)
        self.mounts, self.membership = root / "mountinfo", root / "membership"
        where = self.home.parent
        self.mounts.write_text(f"30 23 0:26 / {where} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n")
        self.membership.write_text("1:name=systemd:/x\n0::/job\n")
        for name, text in {
            "type": "domain",
            "controllers": "cpu memory pids",
            "subtree_control": "",
            "procs": f"{ME}\n",
        }.items():
            (self.home / f"cgroup.{name}").write_text(text)

    def take(self) -> CgroupSubtree:
        return CgroupSubtree.split_own_cgroup(self.mounts, self.membership)

    def read(self, name: str) -> str:
        return (self.home / name).read_text()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr("ctrl_megatron.sandbox.service.cgroups._SYSTEMD", tmp_path / "none")
    return Tree(tmp_path)


def test_the_service_moves_into_a_leaf_and_hands_its_controllers_down(tree: Tree) -> None:
    subtree = tree.take()
    assert subtree.controllers == {"memory", "pids"}
    assert tree.read(f"service-{ME}/cgroup.procs") == ME
    assert tree.read("cgroup.subtree_control") == "+memory +pids"
    assert tree.read(f"sandbox-{ME}/cgroup.subtree_control") == "+memory +pids"


def test_a_failure_half_way_restores_the_cgroup(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel's directories are empty to rmdir.
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    (tree.home / f"sandbox-{ME}").write_text("in the way")
    with pytest.raises(NotDelegated, match=f"sandbox-{ME}: File exists"):
        tree.take()
    assert tree.read("cgroup.procs") == ME
    assert tree.read("cgroup.subtree_control") == "-memory -pids"
    assert not (tree.home / f"service-{ME}").exists()


def test_a_worker_gets_more_than_one_program_may_use_and_not_much_more(tree: Tree) -> None:
    limits = SandboxLimits(memory_mb=100, max_memory_mb=150, disk_mb=10, processes=7)
    subtree = tree.take()
    subtree.confine(3, 4711, limits)
    leaf = f"sandbox-{ME}/worker-3"
    assert tree.read(f"{leaf}/cgroup.procs") == "4711"
    assert 200 + 10 < int(tree.read(f"{leaf}/memory.max")) / 2**20 < 2 * (200 + 10) + 100
    assert 7 < int(tree.read(f"{leaf}/pids.max")) < 7 + 32
    assert not (tree.home / leaf / "memory.swap.max").exists()


def test_controllers_that_are_handed_down_already_are_used_as_they_are(tree: Tree) -> None:
    (tree.home / "cgroup.subtree_control").write_text("memory pids")
    (tree.home / "cgroup.procs").write_text("")
    tree.take()
    assert tree.read("cgroup.subtree_control") == "memory pids"
    assert not (tree.home / f"service-{ME}").exists()


def test_other_processes_in_the_cgroup_are_not_moved(tree: Tree) -> None:
    (tree.home / "cgroup.procs").write_text(f"{ME}\n99\n")
    with pytest.raises(NotDelegated, match=r"other processes \(99\).*systemd-run"):
        tree.take()
    assert not (tree.home / f"sandbox-{ME}").exists()


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda t: (t.home / "cgroup.controllers").write_text("cpu"), "no memory or pids"),
        (lambda t: t.membership.write_text("1:name=systemd:/x\n"), "no cgroup v2 is mounted"),
        (lambda t: t.mounts.write_text("1 1 0:1 / /proc rw - proc proc rw\n"), "no cgroup v2"),
        (lambda t: t.membership.write_text("0::/gone\n"), "gone.*No such file"),
    ],
)
def test_the_reason_is_named_where_nothing_is_delegated(tree: Tree, break_it, reason: str) -> None:
    break_it(tree)
    with pytest.raises(NotDelegated, match=reason):
        tree.take()


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel checks an ordinary user's rights itself")
def test_root_does_not_touch_a_cgroup_that_systemd_did_not_delegate(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctrl_megatron.sandbox.service.cgroups._SYSTEMD", tree.home)
    with pytest.raises(NotDelegated, match="Delegate=yes"):
        tree.take()


def test_the_service_reports_and_the_kernel_counts_where_a_subtree_is_delegated(
    on_loop: BackgroundLoop,
) -> None:
    limits = SandboxLimits(processes=20)
    with EmbeddedSandbox.start(workers=1, isolation="standard", limits=limits) as service:
        counted, reason = service.isolation["cgroups"], service.isolation["no_cgroups"]
        assert bool(counted) != bool(reason)
        leaf = next(iter(Path("/sys/fs/cgroup").glob(f"**/sandbox-{service.pid}/worker-0")), None)
        assert (leaf is not None) == bool(counted)
        if leaf is not None:
            inside = {int(pid) for pid in (leaf / "cgroup.procs").read_text().split()}
            assert len(inside) == 2  # supervisor and fork server
            assert "pids" not in counted or (leaf / "pids.max").read_text().strip() == "36"

        async def judged() -> bool:
            tests = {"test_list": ["assert f(2) == 2"]}
            config = {"dataset_type": "MBPPDataset", "provided_data": tests}
            request = submission("def f(x): return x", **config)
            async with SandboxClient(service.endpoint) as client:
                return (await client.submit(request)).accepted

        assert on_loop(judged())
    assert leaf is None or not leaf.parent.exists()
