"""ASGI applications called by hand, where how messages come and go is what is tested."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Message, Scope


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
    """The messages that an application answers with."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await app(asked, receive, send)
    return messages
