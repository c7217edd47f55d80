"""Ranks read objects of their own run only."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from ctrl_megatron.config.environment import child_environment, make_run_key, read_run_key
from ctrl_megatron.parallel import signed_objects
from ctrl_megatron.parallel.signed_objects import (
    ForeignObjectError,
    install_object_signing,
    signed_pickle,
    verified_unpickle,
)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's and the module's state after a test is that before it."""
    for owner, name in ((c10d, "_pickler"), (c10d, "_unpickler"), (signed_objects, "_key")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


class Touches:
    """Creates a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


def sent(value: object) -> tuple[torch.Tensor, int]:
    """The bytes that torch sends for ``value``, and their number."""
    data, size = c10d._object_to_tensor(value, torch.device("cpu"), None)  # type: ignore[arg-type]
    return data, int(size)


def read(data: torch.Tensor, size: int) -> Any:
    return c10d._tensor_to_object(data, size, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [None, b"another key"])
def test_what_a_stranger_sends_is_not_unpickled(tmp_path: Path, key: bytes | None) -> None:
    file = tmp_path / "ran"
    if key:
        install_object_signing(key)
    foreign = sent(Touches(file))
    install_object_signing(b"the run's key")
    with pytest.raises(ForeignObjectError, match="CTRL_RUN_KEY"):
        read(*foreign)
    for data in (b"", b"short", pickle.dumps(Touches(file)), signed_pickle(Touches(file))[:-1]):
        with pytest.raises(ForeignObjectError):
            verified_unpickle(data)
    assert not file.exists()
    read(*sent(Touches(file)))
    assert file.exists()


def test_objects_of_the_run_arrive() -> None:
    install_object_signing(b"the run's key")
    value = {"rows": [1, 2], "at": torch.arange(3)}
    found = read(*sent(value))
    assert found["rows"] == [1, 2] and torch.equal(found["at"], value["at"])
    assert verified_unpickle(signed_pickle((1, "a"))) == (1, "a")


def test_a_launcher_makes_a_key_that_only_ranks_get() -> None:
    first, second = dict[str, str](), dict[str, str]()
    make_run_key(first)
    make_run_key(second)
    key = read_run_key(first)
    assert key and len(key) == 64 and key != read_run_key(second)
    make_run_key(first)
    assert read_run_key(first) == key
    assert read_run_key({}) is None
    assert child_environment({**first, "PATH": "/bin"}) == {"PATH": "/bin"}
