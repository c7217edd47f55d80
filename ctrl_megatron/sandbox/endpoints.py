"""Several services behind one client: which one gets the next request; files of addresses."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Endpoint:
    """One service as the client sees it."""

    url: str
    in_flight: int = 0
    """Requests of this client that it works on."""
    healthy: bool = True
    """False from a failed connection until it answers a health check."""


class Endpoints:
    """The services of one client, in the order given."""

    def __init__(self, given: str | Sequence[str]) -> None:
        """Addresses as a sequence, or in one text with commas between them. Raises
        ``ValueError``.
        """
        texts = given.split(",") if isinstance(given, str) else given
        urls = [text.strip().rstrip("/") for text in texts]
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"sandbox endpoint must be one or more http:// URLs, got {given!r}")
        self._all = tuple(Endpoint(url) for url in dict.fromkeys(urls))

    @property
    def urls(self) -> tuple[str, ...]:
        """Their addresses."""
        return tuple(endpoint.url for endpoint in self._all)

    @property
    def several(self) -> bool:
        """More than one."""
        return len(self._all) > 1

    def choose(self, tried: Collection[str]) -> Endpoint:
        """The least loaded one; healthy ones first, among them those that are not in ``tried``."""
        return min(self._all, key=lambda e: (not e.healthy, e.url in tried, e.in_flight))

    def another(self, tried: Collection[str]) -> bool:
        """Whether a healthy one is left that is not in ``tried``."""
        return any(e.healthy and e.url not in tried for e in self._all)


def publish(file: Path, addresses: Sequence[str]) -> None:
    """Write the addresses in one line as ``Endpoints`` takes it, whole or not at all: a trainer may
    read the file at any moment.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(",".join(addresses) + "\n", encoding="utf-8")
    part.replace(file)
