"""A server of OpenAI's protocol that always answers with the same program, or passes requests on to
another server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

from tiny_run import PROGRAM


class Server(ThreadingHTTPServer):
    """Answers every conversation as the server at ``behind`` does, or with the program, and where
    it ``fails``, three of ten attempts with status 500.
    """

    daemon_threads = True

    def __init__(self, *, fails: bool, behind: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fails, self.behind, self.lock = fails, behind, threading.Lock()
        self.bodies = list[dict[str, Any]]()
        self.answered = list[tuple[dict[str, Any], dict[str, Any]]]()
        """Requests with their answers, where no failure came between."""
        self.failures = 0
        self.credentials = set[str]()
        """The headers ``Authorization`` of the requests."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.behind:
            return {
                "model": "stranger-7b-v2",
                "choices": [{"message": {"content": PROGRAM}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 5},
            }
        kind = {"Content-Type": "application/json"}
        sent = Request(f"{self.behind}/chat/completions", json.dumps(body).encode(), kind)
        with urlopen(sent, timeout=120) as reply:
            return json.loads(reply.read())


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.credentials.add(self.headers.get("Authorization", ""))
            fails = self.server.fails and len(self.server.bodies) % 10 in (3, 6, 9)
            self.server.failures += fails
        answer = {"error": "no memory"} if fails else self.server.answer(body)
        if not fails:
            self.server.answered.append((body, answer))
        text = json.dumps(answer).encode()
        self.send_response(500 if fails else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(*, fails: bool, behind: str = "") -> Iterator[Server]:
    server = Server(fails=fails, behind=behind)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
