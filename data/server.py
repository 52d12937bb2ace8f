"""Any server with OpenAI's chat interface as one that answers conversations: many at once, again when it is busy."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from data.rewrite import FAILED, Answer, Rewriting

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may do."""
WRONG_SET_UP = frozenset({401, 403, 404})
"""Statuses that every request would get: wrong key, wrong address, wrong model."""
LONGEST_PAUSE = 60.0
FAILURES_IN_A_ROW = 20
"""Conversations that fail one after the other until the server is taken to be broken."""


class ServerError(OSError):
    """The server cannot be used at all; what was answered is kept."""


@dataclass
class ServerAnswerer:
    """Answers through ``URL/chat/completions``; ``concurrency`` conversations are under way at any time.

    Attributes:
        url: up to and with ``/v1``.
        key: sent as bearer token when there is one; never written or shown.
        seed: with a temperature, each request's own seed follows from it and from the conversation.
        retries: how often a request is sent again after a busy or broken answer, with growing pauses.
        timeout: seconds until a request counts as broken.
        pause: sleeps; another one for tests.
    """

    url: str
    model: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    concurrency: int = 16
    retries: int = 5
    timeout: float = 600.0
    key: str | None = field(default=None, repr=False)
    pause: Callable[[float], None] = time.sleep
    requests: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def play(self, rewritings: Iterable[Rewriting]) -> Iterator[Rewriting]:
        """See :class:`data.rewrite.Answerer`.

        Raises:
            ServerError: it cannot be reached, refuses the key, does not know the model, or fails again and again.
        """
        self._stopped.clear()
        self._check_address()
        failures = 0
        running: set[Future[Rewriting]] = set()
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                for done in self._feed(pool, rewritings, running):
                    yield done
                    failures = failures + 1 if done.status == FAILED else 0
                    if failures == FAILURES_IN_A_ROW:
                        raise ServerError(f"{failures} conversations failed one after the other, last: {done.error}")
            finally:
                self._stopped.set()
                for future in running:
                    future.cancel()

    def _feed(
        self, pool: ThreadPoolExecutor, rewritings: Iterable[Rewriting], running: set[Future[Rewriting]]
    ) -> Iterator[Rewriting]:
        """Hand out conversations, few more than are under way, and give them back as they end."""
        for rewriting in rewritings:
            running.add(pool.submit(self._converse, rewriting))
            while len(running) >= 2 * self.concurrency:
                yield from _ended(running)
        while running:
            yield from _ended(running)

    def _converse(self, rewriting: Rewriting) -> Rewriting:
        while rewriting.pending and not self._stopped.is_set():
            rewriting.take(self._answer(rewriting))
        return rewriting

    def _answer(self, rewriting: Rewriting) -> Answer:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": turn.role, "content": turn.content} for turn in rewriting.prompt()],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        if self.temperature:
            body["seed"] = (int(rewriting.key[:8], 16) + rewriting.answered + self.seed * 1_000_003) % 2**31
        try:
            return read_answer(self._request("/chat/completions", body))
        except _Failed as error:
            return Answer(error=str(error))

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request, sent again while the server is busy.

        Raises:
            _Failed: this request is refused, or the server stays busy.
            ServerError: no request can be answered.
        """
        pause = 1.0
        for left in range(self.retries, -1, -1):
            with self._counting:
                self.requests += 1
            try:
                return self._send(path, body)
            except urllib.error.HTTPError as error:
                with error:
                    said = _said(error)
                if error.code in WRONG_SET_UP:
                    raise ServerError(f"{self.url} answers {error.code}: {said}") from error
                if error.code not in BUSY or not left:
                    raise _Failed(f"the server answers {error.code}: {said}") from error
                asked = error.headers.get("Retry-After", "")
                pause = float(asked) if asked.isdigit() else pause
            except ValueError as error:
                if not left:
                    raise _Failed(f"the server's answer is not JSON ({error})") from error
            except (OSError, http.client.HTTPException) as error:
                if not left:
                    raise ServerError(f"{self.url} cannot be reached ({error}): run again to go on") from error
            if self._stopped.is_set():
                raise _Failed("stopped")
            self.pause(min(pause, LONGEST_PAUSE) * random.uniform(0.75, 1.25))
            pause *= 2
        raise AssertionError("a request ends in its last try")

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as answer:
            return json.load(answer)

    def _check_address(self) -> None:
        address = urllib.parse.urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ServerError(f"{self.url!r} is no address of a server: write it as http://HOST:PORT/v1")

    def only_model(self) -> str:
        """The name of the one model that the server has.

        Raises:
            ServerError: it cannot be asked, or has another number of models.
        """
        self._check_address()
        try:
            told = self._request("/models")
            names = [str(model["id"]) for model in told["data"]]
        except (_Failed, KeyError, TypeError) as error:
            raise ServerError(f"{self.url} does not tell its models ({error}): name one with --model") from error
        if len(names) != 1:
            raise ServerError(f"{self.url} has {len(names)} models ({', '.join(names)}): name one with --model")
        return names[0]


class _Failed(Exception):
    """One request failed for good."""


def _ended(running: set[Future[Rewriting]]) -> Iterator[Rewriting]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    running -= done
    for future in done:
        yield future.result()


def _said(error: urllib.error.HTTPError) -> str:
    """The server's own words, in a line."""
    text = error.read(2000).decode(errors="replace")
    try:
        told = json.loads(text)
        inner = told.get("error", told)
        text = (inner.get("message") or (text if inner else "")) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:300] or str(error.reason)


def read_answer(told: Any) -> Answer:
    """A server's answer → text and whether the turn ended; ``length`` is a cut turn, other endings are failures."""
    try:
        choice = told["choices"][0]
        message, ending = choice["message"], choice["finish_reason"]
        text = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        tokens = int((told.get("usage") or {}).get("completion_tokens") or 0)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        return Answer(error=f"the server's answer lacks {error}")
    if not isinstance(text, str) or not isinstance(reasoning, str):
        return Answer(error="the server's answer is no text")
    if ending not in ("stop", "length"):
        return Answer(error=f"the server ended the answer with {ending!r}")
    return Answer(text, ending == "stop", tokens, reasoning)
