"""A small server with OpenAI's chat interface, on this machine, that answers what a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""Status, and what is sent as JSON (or as it is, when it is bytes)."""


def said(text: Any, ending: str = "stop", **extra: Any) -> Reply:
    """A good answer."""
    message = {"role": "assistant", "content": text, **extra}
    return 200, {"choices": [{"message": message, "finish_reason": ending}], "usage": {"completion_tokens": 3}}


@dataclass
class ChatServer:
    """What it was asked, and how it answers.

    Attributes:
        reply: the body of a request → the answer to it.
        asked: bodies of all requests so far, in order.
        keys: the Authorization header of each.
        most: requests that were under way at the same time.
    """

    reply: Callable[[dict[str, Any]], Reply]
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    models: list[str] = field(default_factory=lambda: ["toy"])
    most: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any], key: str | None) -> Reply:
        with self._lock:
            self.asked.append(body)
            self.keys.append(key)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return self.reply(body)
        finally:
            with self._lock:
                self._now -= 1


@contextmanager
def serving(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[ChatServer]:
    """Run a server until the block ends."""
    state = ChatServer(reply)

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, told: Any) -> None:
            data = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": name} for name in state.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions":
                self._send(404, {"error": {"message": f"no {self.path}"}})
            else:
                self._send(*state.answer(body, self.headers.get("Authorization")))

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
