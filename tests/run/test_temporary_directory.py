"""Engines put sockets into the temporary directory, whose path may be too long for them."""

from __future__ import annotations

import os
import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from ctrl_megatron.config import load_config
from ctrl_megatron.engine_kinds import ENGINES
from ctrl_megatron.errors import UserError
from ctrl_megatron.run.checks.machine import check_temporary_directory

# What the engines create: vLLM a socket named by a UUID, SGLang one named like a temporary file.
NAMES = {"vllm": str(uuid.uuid4()), "sglang": "tmpabcd_123"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [70, 71, 95, 96, 200])
def test_a_path_is_refused_where_a_socket_would_be(
    engine: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path("/tmp", "x" * (size - 5))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    fits = True
    if engine in NAMES:
        folder.mkdir(exist_ok=True)
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(folder / NAMES[engine]))
            os.unlink(folder / NAMES[engine])
        except OSError:
            fits = False
        folder.rmdir()
    config = load_config(None, (f"actor_rollout_ref.rollout.name={engine}",), "none")
    if fits:
        check_temporary_directory(config)
        return
    with pytest.raises(UserError, match="TMPDIR: the temporary directory /tmp/x") as caught:
        check_temporary_directory(config)
    most = 107 - 1 - len(NAMES[engine])
    assert f"at most {most} bytes, such as /tmp" in str(caught.value)
