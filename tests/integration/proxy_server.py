"""A server of OpenAI's protocol that always answers with the same program."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tiny_run import PROGRAM


class Server(ThreadingHTTPServer):
    """Answers every conversation with the program, and where it
    ``fails``, each third attempt with status 500.
    """

    daemon_threads = True

    def __init__(self, *, fails: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fails, self.bodies, self.lock = fails, list[dict[str, Any]](), threading.Lock()
        self.failures = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            fails = self.server.fails and len(self.server.bodies) % 3 == 0
            self.server.failures += fails
        answer: dict[str, Any] = {
            "model": "stranger-7b-v2",
            "choices": [{"message": {"content": PROGRAM}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 5},
        }
        text = json.dumps({"error": "no memory"} if fails else answer).encode()
        self.send_response(500 if fails else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(*, fails: bool) -> Iterator[Server]:
    server = Server(fails=fails)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
