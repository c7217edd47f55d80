"""Checks of ``ctrl-serve-critic`` before it loads a model."""

from __future__ import annotations

import socket

import pytest

from ctrl_megatron.commands.serve_critic import _require_free
from ctrl_megatron.errors import UserError


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_reported_at_once(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port: cannot listen on {host}:{port}: .* in use"):
            _require_free(host, port)
    _require_free(host, port)
