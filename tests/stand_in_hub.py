"""A server of the Hugging Face Hub's protocol on loopback, with the models that a test gives it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest


class Hub:
    """``commits``: the id of a model -> the directories of its commits, the newest last. The
    paths of all requests are in ``asked``. ``uploaded``: the id of a repository that was made here
    -> the contents of its files; ``tokens`` came with these requests."""

    def __init__(self) -> None:
        self.commits: dict[str, list[Path]] = {}
        self.uploaded: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.tokens: set[str | None] = set()
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
    own = re.fullmatch(r"/api/models/([^/]+/[^/?]+)(/tree/main)?(?:\?.*)?", path)
    if own and own[1] in hub.uploaded:
        files = hub.uploaded[own[1]].items()
        told = {"id": own[1], "private": hub.private[own[1]], "siblings": []}
        if own[2]:
            told = [{"type": "file", "path": n, "size": len(d), "oid": "1" * 40} for n, d in files]
        return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()
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


def _take(hub: Hub, path: str, body: bytes) -> Any:
    """The answer to a step of an upload: a new repository, a model card, the question how to send
    files, and a commit whose files are in its lines."""
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        hub.uploaded.setdefault(name, {})
        hub.private.setdefault(name, asked.get("private", False))
        return {"url": f"{hub.url}/{name}", "id": name}
    if path == "/api/validate-yaml":  # of a model card
        return {"errors": [], "warnings": []}
    _, _, _, owner, name, what, *_ = path.split("/")
    files = hub.uploaded[f"{owner}/{name}"]
    if what == "preupload":
        told = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": one["path"], **told} for one in json.loads(body)["files"]]}
    assert what == "commit", path
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    return {"commitUrl": f"{hub.url}/{owner}/{name}/commit/1", "commitOid": "1" * 40}


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

        def do_POST(self) -> None:
            hub.asked.append(self.path)
            hub.tokens.add(self.headers.get("Authorization"))
            length = int(self.headers["Content-Length"])
            body = json.dumps(_take(hub, self.path, self.rfile.read(length))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

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
