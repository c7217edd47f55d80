"""A server of the Hugging Face Hub's protocol on loopback, with the models that a test gives it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest


class Hub:
    """``commits``: the id of a model -> the directories of its commits, the newest last. The
    paths of all requests are in ``asked``."""

    def __init__(self) -> None:
        self.commits: dict[str, list[Path]] = {}
        self.asked: list[str] = []
        self.url = ""

    def sha(self, name: str, number: int = -1) -> str:
        """The commit of that number."""
        return hashlib.sha1(f"{name} {self.commits[name][number]}".encode()).hexdigest()

    def directory(self, name: str, revision: str) -> tuple[str, Path] | None:
        """The commit of a revision, and its directory."""
        numbers = range(len(self.commits.get(name, ())))
        known = {self.sha(name, number): number for number in numbers}
        number = known.get(revision, -1 if revision == "main" and numbers else None)
        return None if number is None else (self.sha(name, number), self.commits[name][number])


def _answer(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    missing = 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
    api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/?]+)(?:\?.*)?", path)
    if api:
        found = hub.directory(api[1], api[3])
        if found is None:
            return missing
        files = [file for file in sorted(found[1].rglob("*")) if file.is_file()]
        told = [
            {"type": "file", "path": str(file.relative_to(found[1])), "size": len(data)}
            | {"oid": hashlib.sha1(data).hexdigest()}
            for file in files
            for data in [file.read_bytes()]
        ]
        body = told if api[2] == "tree" else {"id": api[1], "sha": found[0], "siblings": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()
    file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
    found = hub.directory(file[1], file[2]) if file else None
    if file is None or found is None:
        return missing
    data = (found[1] / file[3]).read_bytes()
    tag = hashlib.sha1(data).hexdigest()
    return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": found[0]}, data


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(self.path)
            status, headers, body = _answer(hub, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub, which read its variables when it was imported, ask ``hub``."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
