"""The HTTP face of the app: routes for ad-hoc requests, their limits, and Problems as status codes.

It knows how to have a group sampled and nothing of deployments, so it runs wherever FastAPI does.
"""

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from configs.settings import HttpSettings
from deployments.body_limit import BodyLimit
from deployments.group import RolloutGroup
from deployments.summary import summarize
from schemas.control import Fleet
from schemas.errors import Problem, invalid, problem_of_validation_error
from schemas.request import RolloutRequest
from schemas.summary import RolloutSummary

STATUS_OF_CODE = {
    "invalid_request": 422,
    "weights_refused": 422,
    "queue_full": 503,
    "halted": 503,
    "deadline_exceeded": 504,
    "cancelled": 499,
}
"""HTTP status of a group none of whose samples was done; 500 for any other code."""
RETRY_AFTER_S = 1

STATUSES = {
    413: "the body is too long",
    422: "cannot be sampled",
    500: "no sample could be made",
    503: "full or halted, try again",
    504: "not done by its deadline",
}
"""What is answered besides 200, for the documentation."""


def http_app(
    sample: Callable[[RolloutRequest], Awaitable[RolloutGroup]],
    fleet: Callable[[], Awaitable[Fleet]],
    *,
    checkpoint: str,
    settings: HttpSettings,
) -> FastAPI:
    """The routes over ``sample``, which settles a group or raises ValueError (a Problem) for one that cannot be, and
    ``fleet``, which tells what is sampled from."""
    app = FastAPI(
        title="ltx-rollout",
        description="Reinforcement-learning rollouts of LTX-2.3. Ad-hoc requests; trainers use RolloutClient.",
    )
    app.add_middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)
    room = asyncio.Semaphore(settings.max_rollouts)

    @app.exception_handler(RequestValidationError)
    async def answer_unreadable(_: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(_not_json(error) or problem_of_validation_error(error, RolloutRequest))

    @app.post(
        "/v1/rollouts",
        response_model=RolloutSummary,
        responses={status: {"description": meaning} for status, meaning in STATUSES.items()},
    )
    async def create_rollout(request: RolloutRequest) -> RolloutSummary | JSONResponse:
        """Sample one group and answer with its numbers: seeds, log-probs per step and modality, sizes, timings."""
        if request.num_samples > settings.max_num_samples:
            return _answer(_too_many_samples(request.num_samples, settings.max_num_samples))
        if room.locked():
            return _answer(_full(settings.max_rollouts))
        async with room:
            try:
                group = await sample(request)
            except ValueError as error:
                problem = Problem.of(error)
                if problem is None:
                    raise
                return _answer(problem)
            failed = group.problems
            if len(failed) == len(group.samples):
                return _answer(failed[0])
            return await summarize(group)

    @app.get("/v1/weights")
    async def weights() -> Fleet:
        """The policy's version, and each replica's: version, digest of its weights, whether it runs."""
        return await fleet()

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Answers when the app takes requests."""
        return {"status": "ok", "checkpoint": checkpoint}

    return app


def _answer(problem: Problem) -> JSONResponse:
    status = STATUS_OF_CODE.get(problem.code, 500)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(problem.payload(), status_code=status, headers=headers)


def _not_json(error: RequestValidationError) -> Problem | None:
    """What is wrong with a body that is no JSON at all, or was not sent as such; None for any other error."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        at = first["loc"][-1]
        rule = f"must be JSON, and is not at character {at}: {first['ctx']['error']}"
        return invalid("body", error.body, rule, 'send an object such as {"prompt": "a red ball"}')
    if first["loc"] == ("body",) and first["type"] in ("missing", "model_attributes_type"):
        remedy = 'send an object such as {"prompt": "a red ball"} with content-type application/json'
        return invalid("body", error.body, "must be a JSON object", remedy)
    return None


def _too_many_samples(found: int, most: int) -> Problem:
    return invalid(
        "num_samples",
        found,
        f"must be at most {most} over HTTP (http.max_num_samples)",
        f"use {most}, or a RolloutClient for larger groups",
    )


def _full(most: int) -> Problem:
    return Problem(
        code="queue_full",
        rule=f"at most {most} rollouts are answered at a time (http.max_rollouts)",
        remedy=f"try again in {RETRY_AFTER_S} s",
    )
