"""Refuses what a page of another origin would have done here, as ASGI middleware.

A browser sends some requests for any page, whether or not the page may read the answer, and says whose page it was. A
request that reads passes, and so does one without an origin: it is no page's.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.problems import answer
from schemas.errors import invalid

READING = ("GET", "HEAD", "OPTIONS")


class OwnPages:
    """Wraps ``app``; what another origin's page sends, and ``origins`` do not name, is answered with 403."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in READING:
            foreign = self._foreign(Headers(scope=scope))
            if foreign is not None:
                problem = invalid(
                    "Origin",
                    foreign,
                    "must be this host, or one of http.cors_origins",
                    "name it there to let its pages send requests",
                )
                await answer(problem, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _foreign(self, headers: Headers) -> str | None:
        """The other origin that a request comes from; None where it comes from none."""
        said = headers.getlist("origin")
        if not said:
            site = headers.get("sec-fetch-site", "")
            return site if site == "cross-site" else None
        others = (origin for origin in said if not self._may_send(origin, headers.get("host", "")))
        return next(others, None)

    def _may_send(self, origin: str, host: str) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        try:
            own = urlsplit(origin).netloc
        except ValueError:
            return False
        # A scheme is not compared: TLS may end before this process.
        return bool(own) and own.lower() == host.lower()
