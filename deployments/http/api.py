"""The HTTP face of the app: its routes, its limits, its door.

It knows an archive and nothing of deployments, so it runs wherever FastAPI does.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from configs.settings import HttpSettings
from deployments.http.body_limit import BodyLimit
from deployments.http.origin import OwnPages
from deployments.http.problems import describe_problems, responses, tell_problems
from deployments.http.rollouts import rollout_router
from deployments.http.token import OPEN_PATH, BearerToken, read_token
from deployments.kept.api import Archive
from schemas.control import Fleet

READ_BY_SCRIPTS = ["Content-Location", "Content-Range", "ETag", "Retry-After"]
"""Headers that a page of another origin may read, where it may read answers."""


def http_app(
    archive: Archive,
    fleet: Callable[[], Awaitable[Fleet]],
    *,
    checkpoint: str,
    settings: HttpSettings,
    routers: Iterable[APIRouter] = (),
) -> FastAPI:
    """The routes over ``archive``, and over ``fleet``, which tells what is sampled from; ``routers`` are others' beside them.

    Raises ValueError (a Problem) where the settings ask for a token and there is none.
    """
    token = read_token(settings)
    app = FastAPI(
        title="ltx-rollout",
        description="Reinforcement-learning rollouts of LTX-2.3. Ad-hoc requests; trainers use RolloutClient.",
        redirect_slashes=False,
    )
    tell_problems(app)
    app.include_router(rollout_router(archive, settings))
    for router in routers:
        app.include_router(router)

    @app.get("/v1/weights", responses=responses())
    async def weights() -> Fleet:
        """The policy's version, and each replica's: version, digest of its weights, whether it runs."""
        return await fleet()

    @app.head(OPEN_PATH, include_in_schema=False)
    @app.get(OPEN_PATH, responses=responses(401))
    async def health() -> dict[str, str]:
        """Answers when the app takes requests. Needs no token."""
        return {"status": "ok", "checkpoint": checkpoint}

    describe_problems(app)
    # The last one is the first that a request comes to.
    max_body_bytes, body_timeout_s = settings.max_body_bytes, settings.body_timeout_s
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes, body_timeout_s=body_timeout_s)
    if token is not None:
        app.add_middleware(BearerToken, token=token)
    app.add_middleware(OwnPages, origins=settings.cors_origins)
    if settings.cors_origins:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST", "DELETE"], "allow_headers": ["*"]}
        origins = list(settings.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, expose_headers=READ_BY_SCRIPTS, **allowed)
    return app
