"""Refuses HTTP bodies over a size, as ASGI middleware: a body is read up to the limit, then handed on whole.

A body that says its length is refused before a byte of it is read, one that comes in chunks as soon as it is too long.
It knows nothing of what is in a body.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.problems import answer
from schemas.errors import invalid


class BodyLimit:
    """Wraps ``app``; what is too long is answered with 413 and a Problem."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = Headers(scope=scope).get("content-length", "")
        too_long = said.isdecimal() and int(said) > self._max_body_bytes
        messages = None if too_long else await self._read(receive)
        if messages is None:
            await self._refusal(said if too_long else "more")(scope, receive, send)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> list[Message] | None:
        """The messages of one body, or what came before the caller went away; None where it is too long."""
        messages: list[Message] = []
        num_bytes, more = 0, True
        while more:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                return None
            messages.append(message)
            more = message.get("more_body", False)
        return messages

    def _refusal(self, found: str) -> ASGIApp:
        problem = invalid(
            "body",
            f"{found} bytes",
            f"must be at most {self._max_body_bytes} bytes (http.max_body_bytes)",
            "send a shorter prompt and less metadata",
        )
        return answer(problem, 413)
