"""The stores of the launcher: who reaches them, and what somebody who does can write there."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from free_port import free_port
from hypothesis import given
from hypothesis import strategies as st
from listening import listening, reached_from_outside
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from ctrl_megatron.parallel.rendezvous_state import RendezvousStateError, StateAsJson
from ctrl_megatron.parallel.store import SingleAddressTCPStore, _listening

ROOT = Path(__file__).parents[2]
LAUNCHER = (sys.executable, "-m", "ctrl_megatron.commands.launcher")
RANK = "import os, sys, time; open(f'{sys.argv[1]}.{os.environ[\"RANK\"]}', 'x'); time.sleep(60)"
_TIME = st.datetimes(timezones=st.just(UTC))
_NODE = st.builds(dynamic_rendezvous._NodeDesc, st.text(), st.integers(0, 2**22), st.integers(0, 9))


@st.composite
def states(draw: st.DrawFn) -> Any:
    state = dynamic_rendezvous._RendezvousState()
    state.round, state.complete, state.closed = draw(
        st.tuples(st.integers(0), *[st.booleans()] * 2)
    )
    state.deadline = draw(st.none() | _TIME)
    state.participants = draw(st.dictionaries(_NODE, st.integers(0, 99)))
    state.last_heartbeats = draw(st.dictionaries(_NODE, _TIME))
    state.wait_list, state.redundancy_list = draw(st.sets(_NODE)), draw(st.sets(_NODE))
    return state


@given(states())
def test_a_state_is_read_back_as_pickle_does(state: Any) -> None:
    assert vars(StateAsJson.loads(StateAsJson.dumps(state))) == vars(
        pickle.loads(pickle.dumps(state))
    )


def test_equal_states_are_equal_bytes() -> None:
    # torch compares the bytes to see whether its own were kept.
    nodes = [dynamic_rendezvous._NodeDesc(f"h{n}", n, 0) for n in range(40)]
    one, other = dynamic_rendezvous._RendezvousState(), dynamic_rendezvous._RendezvousState()
    one.wait_list = {*nodes}
    one.participants = {node: node.pid for node in nodes}
    for node in reversed(nodes):
        other.wait_list.add(node)
        other.participants[node] = node.pid
    assert StateAsJson.dumps(one) == StateAsJson.dumps(other)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b"\xff\x00",
        pickle.dumps(dynamic_rendezvous._RendezvousState()),
        json.dumps(dict.fromkeys(vars(dynamic_rendezvous._RendezvousState()))).encode(),
    ],
)
def test_what_is_no_state_is_refused(text: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        StateAsJson.loads(text)


@contextmanager
def launched(flags: Sequence[str], tmp_path: Path, ranks: int) -> Iterator[list[psutil.Process]]:
    """The launcher and its ranks, which sleep."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    there = tmp_path / "there"
    command = [*LAUNCHER, *flags, str(program), str(there)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environ, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("there.*"))) < ranks:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        own = psutil.Process(process.pid)
        yield [own, *own.children(recursive=True)]
    finally:
        process.terminate()
        process.wait(30)


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._flag}",)


@pytest.mark.parametrize(
    "meeting", [(), ("--rdzv-backend", "c10d", "--rdzv-endpoint", "nowhere.invalid:4711")]
)
def test_on_one_host_only_loopback_is_listened_at_and_no_pickle_is_read(
    tmp_path: Path, meeting: Sequence[str]
) -> None:
    flag = tmp_path / "ran"
    with launched(("--nnodes", "1", "--nproc-per-node", "1", *meeting), tmp_path, 1) as processes:
        sockets = listening(processes)
        assert sockets and reached_from_outside(sockets) == {}
        written = 0
        for place in sockets:
            address, _, port = place.rpartition(":")
            store: Any = SingleAddressTCPStore(address, int(port), timeout=timedelta(seconds=5))
            for key in store.list_keys():
                if key.startswith("torch.rendezvous.") and key.count(".") == 2:
                    store.set(key, base64.b64encode(pickle.dumps(Evil(flag))).decode())
                    written += 1
        assert written == 1
        # The launcher reads the state each second.
        time.sleep(3)
        assert not flag.exists()


def test_several_hosts_meet_at_their_address_and_nowhere_else(tmp_path: Path) -> None:
    meeting = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=1")
    flags = (*meeting, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1")
    with launched(flags, tmp_path, 1) as processes:
        assert reached_from_outside(listening(processes)) == {}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2"])
def test_a_store_listens_at_the_address_that_it_is_given(host: str) -> None:
    store: Any = SingleAddressTCPStore(host, 0, is_master=True, wait_for_workers=False)
    address = "127.0.0.1" if host == "localhost" else host
    assert f"{address}:{store.port}" in listening([psutil.Process()])
    client: Any = SingleAddressTCPStore(host, store.port)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_that_listens_everywhere_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Many machines know their own name as 127.0.1.1."""
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    assert _listening("host1", 0) is None
    assert "the store of host1 listens at all addresses" in caplog.text
    assert "leads to 127.0.1.1 here" in caplog.text
