"""Access to a service: the bearer token and its file, name and password in an address, the
addresses on which a service may listen without a token, and the file that contains its own address.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from ctrl_megatron.errors import UserError

_SHORTEST_TOKEN = 16
_ADDRESS = re.compile(r"(https?://)(?:([^/?#]*)@)?([^/?#@]+(?:[/?#].*)?)")
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:]*))(?::[0-9]*)?")
"""A ``Host`` header: an IPv6 address in brackets or a name, and a port."""


class UnprotectedAddress(ValueError):
    """The service would run programs for everyone who can reach the address."""


def read_token(path: str | Path) -> str:
    """The token in a file's first line. Raises ``OSError``, or ``UserError`` for a weak token."""
    token = next(iter(Path(path).read_text(encoding="utf-8").splitlines()), "").strip()
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
        raise UserError(
            f"the token in {path} must be at least {_SHORTEST_TOKEN} printable ASCII characters; "
            "make one with: openssl rand -hex 32"
        )
    return token


def split_credentials(address: str, authorization: str | None = None) -> tuple[str, dict[str, str]]:
    """Split an address into the address without name and password, as messages may show it, and the
    headers that carry them (RFC 7617), or ``authorization`` in their place.

    Raises ``UserError`` for text that is no ``http://`` or ``https://`` address, and if both are
    given.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise UserError(f"{address.rpartition('@')[2]!r} is no http:// or https:// URL")
    scheme, given, rest = found.groups()
    if given and authorization:
        raise UserError(f"{rest} has a password, and a token is given: leave one out")
    if given:
        name, _, password = given.partition(":")
        pair = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
        authorization = f"Basic {pair}"
    return scheme + rest, {"Authorization": authorization} if authorization else {}


def is_allowed(authorization: str, token: str | None) -> bool:
    """Whether an ``Authorization`` header contains ``token``; compared in constant time."""
    if token is None:
        return True
    scheme, _, given = authorization.partition(" ")
    equal = hmac.compare_digest(
        given.strip().encode(errors="surrogateescape"), token.encode(errors="surrogateescape")
    )
    return equal and scheme.lower() == "bearer"


def require_safe_address(host: str, token: str | None, *, allow_open: bool) -> None:
    """Raise ``UnprotectedAddress`` for an address beyond loopback without a token, unless
    ``allow_open``.
    """
    if token is None and not allow_open and not is_loopback(host):
        raise UnprotectedAddress(
            f"--host {host} is reached from other machines: give --token-file, or --allow-open to "
            "run programs for every client that reaches it"
        )


def publish_endpoints(file: Path, addresses: Sequence[str]) -> None:
    """Write the addresses in one line, in the form that ``SandboxClient`` accepts. The file is
    replaced as a whole, because a trainer may read it at any moment.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(",".join(addresses) + "\n", encoding="utf-8")
    part.replace(file)


def cross_site_refusal(
    host: str, method: str, content_type: str, *, loopback: bool
) -> tuple[int, str] | None:
    """Status and reason for refusing a request without a token that a web page of another site may
    have sent, through the browser of somebody on this machine; None if none can.

    ``host`` is the request's header; ``loopback`` says whether the service listens on loopback, so
    that another name is one that leads there by deceit.
    """
    found = _HOST.fullmatch(host)
    if loopback and not (found and is_loopback(found[1] or found[2])):
        return 403, f"the host {host!r} is not this machine's loopback"
    # A page of another site cannot send this type without a preflight request, which fails.
    if method == "POST" and content_type != "application/json":
        return 415, "send application/json"
    return None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name may have any address
