"""Bounds HTTP bodies in bytes and in time, as ASGI middleware: a body is read whole, and then handed on in one piece.

A body that says its length is refused before a byte of it is read, one that comes in chunks as soon as it is too long, and
one that does not end in time whatever has come of it. It knows nothing of what is in a body.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.problems import answer
from schemas.errors import invalid


class BodyLimit:
    """Wraps ``app``; what is too long is answered with 413 and a Problem, what takes too long with 408."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, body_timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes, self._body_timeout_s = max_body_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = Headers(scope=scope).get("content-length", "")
        too_long = said.isdecimal() and int(said[:19]) > self._max_body_bytes
        try:
            async with asyncio.timeout(self._body_timeout_s):
                message = None if too_long else await self._read(receive)
        except TimeoutError:
            await self._too_slow()(scope, receive, send)
            return
        if message is None:
            await self._too_long(said if too_long else "more")(scope, receive, send)
            return
        messages = [message]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> Message | None:
        """The body in one message, or that the caller went away; None where it is too long."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                return None
            more = message.get("more_body", False)
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _too_long(self, found: str) -> ASGIApp:
        problem = invalid(
            "body",
            f"{found} bytes",
            f"must be at most {self._max_body_bytes} bytes (http.max_body_bytes)",
            "send a shorter prompt and less metadata",
        )
        return answer(problem, 413)

    def _too_slow(self) -> ASGIApp:
        problem = invalid(
            "body",
            None,
            f"must be there whole within {self._body_timeout_s:g} s (http.body_timeout_s)",
            "send it at once, and as many bytes as Content-Length says",
        )
        # What may still come of it belongs to no request.
        return answer(problem, 408, {"Connection": "close"})
