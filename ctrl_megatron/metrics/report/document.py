"""An HTML document: how it is written, and how it shows a date."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path


def date_of(seconds: float) -> str:
    """A moment, in seconds since the epoch, in universal time to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def write_page(target: Path, html: str) -> None:
    """Write a page in one step: a reader of an older one never sees half of the new one."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(html, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
