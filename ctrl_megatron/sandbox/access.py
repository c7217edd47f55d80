"""Who may talk to the service: a bearer token, and which addresses it may listen on without one."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

_SHORTEST_TOKEN = 16


class OpenAddress(ValueError):
    """The service would run programs for anybody who reaches the address."""


def read_token(path: str | Path) -> str:
    """The token in the first line of a file. Raises ``ValueError`` or ``OSError``."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return checked_token(lines[0].strip() if lines else "", str(path))


def checked_token(token: str, origin: str) -> str:
    """``token`` itself. Raises ``ValueError`` naming ``origin`` for one that is easily guessed or
    cannot travel in a header.
    """
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise ValueError(
            f"the token in {origin} must be at least {_SHORTEST_TOKEN} printable ASCII characters; "
            "make one with: openssl rand -hex 32"
        )
    return token


def is_allowed(authorization: str, token: str | None) -> bool:
    """Whether an ``Authorization`` header carries ``token``; compared in constant time."""
    if token is None:
        return True
    scheme, _, given = authorization.partition(" ")
    equal = hmac.compare_digest(
        given.strip().encode(errors="surrogateescape"), token.encode(errors="surrogateescape")
    )
    return equal and scheme.lower() == "bearer"


def require_safe_address(host: str, token: str | None, *, allow_open: bool) -> None:
    """Raises ``OpenAddress`` for an address beyond loopback without a token, unless allowed."""
    if token is None and not allow_open and not _is_loopback(host):
        raise OpenAddress(
            f"--host {host} is reached from other machines: give --token-file, or --allow-open to "
            "run programs for anybody who reaches it"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may mean any address
