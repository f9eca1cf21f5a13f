"""The HTTP app over an archive without a cluster, and callers that read its answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from configs.settings import HttpSettings
from deployments.http.api import http_app
from schemas.control import Fleet
from schemas.problem_details import ProblemDetails
from tests.fake_archive import FakeArchive
from tests.patience import PATIENCE_S

ROLLOUTS = "/v1/rollouts"
BALL = {"prompt": "a red ball", "num_samples": 2, "seed": 7, "request_id": "ball"}
PROBLEM = "application/problem+json"

A = TypeVar("A", bound=FakeArchive)
T = TypeVar("T")


async def fleet() -> Fleet:
    return Fleet.model_validate({"control": {}, "replicas": (), "kept_versions": (), "kept_bytes": 0})


def app_of(archive: FakeArchive, **settings: Any) -> FastAPI:
    return http_app(archive, fleet, checkpoint="tiny", settings=HttpSettings(**settings))


def http_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://app")


def talk(script: Callable[[httpx.AsyncClient, FakeArchive], Awaitable[T]], **settings: Any) -> T:
    """Run a caller's script against a fresh app."""
    return talk_to(FakeArchive(), script, **settings)


def talk_to(archive: A, script: Callable[[httpx.AsyncClient, A], Awaitable[T]], **settings: Any) -> T:
    """Run a caller's script against an app over this archive. A script that waits for what will not come is broken off."""

    async def run() -> T:
        async with asyncio.timeout(PATIENCE_S), http_of(app_of(archive, **settings)) as http:
            return await script(http, archive)

    return asyncio.run(run())


def problem_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.headers["content-type"] == PROBLEM
    problem = ProblemDetails.model_validate(answer.json())
    assert (answer.status_code, problem.status, problem.code) == (status, status, code)
    assert problem.title and problem.rule in problem.detail and problem.type.endswith(code)
    return problem.model_dump()
