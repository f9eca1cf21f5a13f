"""Bodies that take their time, or come in very many pieces."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from deployments.http.body_limit import BodyLimit
from tests import leaping
from tests.asgi import said, scope
from tests.fake_archive import FakeArchive
from tests.http_apps import app_of


async def count(asked: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes of the body."""
    await PlainTextResponse(str(len(await Request(asked, receive).body())))(asked, receive, send)


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/rollouts"), ("GET", "/health")])
def test_a_body_that_does_not_end_is_answered_all_the_same(method: str, path: str) -> None:
    pieces: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def run() -> list[Message]:
        async def receive() -> Message:
            return pieces.pop() if pieces else await asyncio.Event().wait()  # type: ignore[return-value]

        app = app_of(FakeArchive(), body_timeout_s=30)
        return await said(app, scope(method, path), receive)

    start, body, *_ = leaping.run(run())
    assert not pieces
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert b"http.body_timeout_s" in body["body"] and b'"remedy":"send it at once' in body["body"]


def test_a_slow_answer_is_not_bounded_by_the_bodys_time() -> None:
    async def slowly(asked: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3600)
        await count(asked, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"abc", "more_body": False}

    app = BodyLimit(slowly, max_body_bytes=10, body_timeout_s=30)
    start, body = leaping.run(said(app, scope("POST", "/"), receive))
    assert (start["status"], body["body"]) == (200, b"3")


class Piece(bytes):
    """Knows what it was added to, as the right side of `+` or `+=`."""

    added_to: object = None

    def __radd__(self, before: object) -> object:
        self.added_to = before
        return NotImplemented  # bytes can do it


def test_a_body_of_very_many_pieces_costs_no_more_than_its_bytes() -> None:
    """Each piece is added to what the one before was added to, which is thus never copied, and all are handed on at once."""
    pieces = [Piece(b"x") for _ in range(1000)]
    left, num_received = [*pieces], 0

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    async def counted(asked: Scope, receive: Receive, send: Send) -> None:
        async def next_piece() -> Message:
            nonlocal num_received
            num_received += 1
            return await receive()

        await count(asked, next_piece, send)

    app = BodyLimit(counted, max_body_bytes=2**20, body_timeout_s=60)
    start, body = asyncio.run(said(app, scope("POST", "/"), receive))
    assert (start["status"], body["body"]) == (200, b"1000")
    assert len({id(piece.added_to) for piece in pieces}) == 1 and num_received == 1


def test_a_body_of_very_many_pieces_that_is_too_long_is_refused_at_once() -> None:
    sent = 0

    async def receive() -> Message:
        nonlocal sent
        sent += 1
        return {"type": "http.request", "body": b"x", "more_body": sent < 1000}

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
