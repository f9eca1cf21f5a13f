"""Asks HTTP callers for a bearer token, as ASGI middleware. /health answers without: it tells nothing but that it does."""

import hmac
import os
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.settings import HttpSettings
from deployments.http.problems import answer
from schemas.errors import invalid

OPEN_PATH = "/health"


def read_token(settings: HttpSettings) -> str | None:
    """The token that the settings lead to; None where none is asked for. Raises ValueError where they lead to nothing:
    an app that is meant to ask for a token does not start without one."""
    if settings.token_env is not None:
        token, place = os.environ.get(settings.token_env, ""), f"environment variable {settings.token_env}"
        setting, name = "http.token_env", settings.token_env
    elif settings.token_file is not None:
        path = Path(settings.token_file).expanduser()
        token, place = path.read_text() if path.is_file() else "", f"file {path}"
        setting, name = "http.token_file", settings.token_file
    else:
        return None
    if not token.strip():
        rule, remedy = (
            f"must lead to a token, but there is no {place} or it is empty",
            "set it where the ingress runs",
        )
        raise invalid(setting, name, rule, remedy).exception()
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        rule = "must lead to a token of printable ASCII characters on one line: a header holds no others for sure"
        raise invalid(setting, name, rule, "make another token").exception()
    return token


class BearerToken:
    """Wraps ``app``; who does not say the token is answered with 401."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        problem = invalid(
            "Authorization",
            None,
            'must be "Bearer" and the token of this app',
            "ask whoever runs it (http.token_env, http.token_file)",
        )
        await answer(problem, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == OPEN_PATH:
            return True
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compared in a time that does not tell how much of it is right.
        is_right = hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self._token)
        return scheme.lower() == "bearer" and is_right
