"""The web page of the critic's service: one file, no other resource."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from aiohttp import web


@cache
def _page() -> tuple[str, str]:
    """(the page, its Content-Security-Policy). The policy allows only the page's own script and
    style, no markup from strings, and requests to this service only.
    """
    text = files(__package__ or "").joinpath("critic_page.html").read_text(encoding="utf-8")
    script, style = (_hash_of(tag, text) for tag in ("script", "style"))
    return text, (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash_of(tag: str, page: str) -> str:
    (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return "sha256-" + b64encode(sha256(inline.encode()).digest()).decode()


async def show_page(request: web.Request) -> web.Response:
    """The page. It contains no secret and needs no token."""
    text, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(text=text, content_type="text/html", headers=headers)
