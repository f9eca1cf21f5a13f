"""Bodies that take their time, or come in very many pieces."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from deployments.http.body_limit import BodyLimit
from tests.fake_archive import FakeArchive
from tests.http_apps import app_of


def scope(method: str, path: str, *headers: tuple[bytes, bytes]) -> Scope:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"app"), *headers],
        "server": ("app", 80),
        "client": ("caller", 1),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }


async def said(app: Any, asked: Scope, receive: Callable[[], Awaitable[Message]]) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await app(asked, receive, send)
    return messages


async def count(asked: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes of the body."""
    await PlainTextResponse(str(len(await Request(asked, receive).body())))(asked, receive, send)


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/rollouts"), ("GET", "/health")])
def test_a_body_that_does_not_end_is_answered_all_the_same(method: str, path: str) -> None:
    async def run() -> list[Message]:
        pieces: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive() -> Message:
            return pieces.pop() if pieces else await asyncio.Event().wait()  # type: ignore[return-value]

        app = app_of(FakeArchive(), body_timeout_s=0.05)
        return await asyncio.wait_for(said(app, scope(method, path), receive), 10)

    start, body, *_ = asyncio.run(run())
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert b"http.body_timeout_s" in body["body"] and b'"remedy":"send it at once' in body["body"]


def test_a_slow_answer_is_not_bounded_by_the_bodys_time() -> None:
    async def slowly(asked: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.2)
        await count(asked, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"abc", "more_body": False}

    app = BodyLimit(slowly, max_body_bytes=10, body_timeout_s=0.05)
    start, body = asyncio.run(said(app, scope("POST", "/"), receive))
    assert (start["status"], body["body"]) == (200, b"3")


def test_a_body_of_very_many_pieces_costs_no_more_than_its_bytes() -> None:
    num_pieces, sent = 300_000, 0

    async def receive() -> Message:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": b"x", "more_body": sent < num_pieces}

    app = BodyLimit(count, max_body_bytes=2**20, body_timeout_s=60)
    started = time.process_time()
    start, body = asyncio.run(said(app, scope("POST", "/"), receive))
    assert (start["status"], body["body"]) == (200, str(num_pieces).encode())
    assert time.process_time() - started < 5


def test_a_body_of_very_many_pieces_that_is_too_long_is_refused_at_once() -> None:
    sent = 0

    async def receive() -> Message:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": b"x", "more_body": True}

    app = BodyLimit(count, max_body_bytes=10, body_timeout_s=60)
    start, _ = asyncio.run(said(app, scope("POST", "/"), receive))
    assert start["status"] == 413 and sent == 11


def test_who_goes_away_before_the_body_is_whole_is_not_waited_for() -> None:
    pieces: list[Message] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b"{", "more_body": True},
    ]

    async def receive() -> Message:
        return pieces.pop()

    seen: list[Message] = []

    async def look(asked: Scope, receive: Receive, send: Send) -> None:
        seen.append(await receive())

    asyncio.run(said(BodyLimit(look, max_body_bytes=10, body_timeout_s=60), scope("POST", "/"), receive))
    assert seen == [{"type": "http.disconnect"}]
