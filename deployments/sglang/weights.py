"""SGLang's weight routes, over the controls that a trainer of ours has: publish by path, digests, sleep and wake.

Answers have that server's form, `success` and `message`; where something was not done, the fields of a Problem stand
beside them. What it takes over CUDA's inter-process memory (`update_weights_from_tensor`) is refused in words.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from deployments.http.problems import problem_of_any, responses
from deployments.sglang.body import body_of, read_json
from deployments.sglang.weights_root import FIELD, weights_under
from schemas.control import Fleet, ReplicaState
from schemas.errors import Problem
from schemas.sglang_weights import (
    MODULE,
    ChecksumRequest,
    UpdateFromDisk,
    WeightsAnswer,
    WeightsRefusal,
)
from schemas.validation import validated

A = TypeVar("A")
T = TypeVar("T")

NOT_FOUND = "not_found"
WAITS = ThreadPoolExecutor(512, thread_name_prefix="weights")
"""For calls that wait for the whole fleet, maybe for minutes: as many as an ingress may have requests, so that neither the
call that would end such a wait nor a look at the fleet stands in line behind it."""
"""That server's answer for a module it does not know."""
AGREE_S = 2.5
"""Longest wait for replicas to agree: the store may hear last what a replica said before it changed its weights, and
hears it again within `weights.poll_s`."""
GLANCE_S = 0.1
STATUSES = {
    400: "was not done",
    500: "was not done: a fault of ours",
    501: "is not supported here",
    503: "sampling is halted, or replicas do not agree",
    504: "was not done in time",
}


class Weights(Protocol):
    """The policy of an app, as `RolloutClient` controls it. The calls wait, so they are made in threads."""

    def publish_weights(self, *, version: int, path: str | Path) -> list[ReplicaState]: ...

    def policy_version(self) -> Fleet: ...

    def sleep(self) -> list[ReplicaState]: ...

    def wake(self) -> list[ReplicaState]: ...


def weight_routes(weights: Weights, weights_root: str | None) -> APIRouter:
    """The routes over ``weights``; paths are read under ``weights_root`` alone, and nowhere where it is None."""
    router = APIRouter(
        responses={
            **{status: responses()[status] for status in (401, 403, 408, 413)},
            **{status: _described(status) for status in (400, 500, 503, 504)},
        }
    )
    in_turn = asyncio.Lock()

    @router.post(
        "/update_weights_from_disk", response_model=WeightsAnswer, openapi_extra=body_of(UpdateFromDisk)
    )
    async def update_weights_from_disk(request: Request) -> WeightsAnswer | JSONResponse:
        """Publish weights from a folder of the server's; answers once every replica samples from them."""

        async def publish() -> WeightsAnswer:
            asked = validated(UpdateFromDisk, await read_json(request))
            path = await asyncio.to_thread(weights_under, weights_root, asked.model_path)
            async with in_turn:
                version = asked.version or await _next_version(weights)
                states = await _in_the_end(partial(weights.publish_weights, version=version, path=path))
            return WeightsAnswer(
                success=True,
                message=f"{_replicas(states)} from version {version}; only the {MODULE} is published",
                policy_version=version,
                weights_digest=states[0].weights_digest if states else None,
            )

        return await _answered(publish)

    @router.post(
        "/get_weights_checksum",
        response_model=dict[str, str],
        openapi_extra=body_of(ChecksumRequest, required=False),
    )
    async def get_weights_checksum(request: Request) -> dict[str, str] | JSONResponse:
        """The digest of every replica's transformer, by module name."""

        async def digests() -> dict[str, str] | JSONResponse:
            asked = validated(ChecksumRequest, await read_json(request))
            digest = await _agreed(weights)
            if isinstance(digest, Problem):
                return _refusal(digest, 503)
            names = [MODULE] if asked.module_names is None else asked.module_names
            return {name: digest if name == MODULE else NOT_FOUND for name in names}

        return await _answered(digests)

    @router.post("/release_memory_occupation", response_model=WeightsAnswer)
    async def release_memory_occupation() -> WeightsAnswer | JSONResponse:
        """Let running samples end, then move weights to host memory; answers once every replica has. Twice is once."""

        async def sleep() -> WeightsAnswer:
            states = await _in_the_end(weights.sleep)
            return WeightsAnswer(success=True, sleeping=True, message=f"{_replicas(states)} asleep")

        return await _answered(sleep)

    @router.post("/resume_memory_occupation", response_model=WeightsAnswer)
    async def resume_memory_occupation() -> WeightsAnswer | JSONResponse:
        """Move weights back and sample on. Twice is once."""

        async def wake() -> WeightsAnswer:
            states = await _in_the_end(weights.wake)
            return WeightsAnswer(success=True, sleeping=False, message=f"{_replicas(states)} awake")

        return await _answered(wake)

    for unsupported in ("update_weights_from_tensor", "update_weights_from_tensor_checker"):
        router.add_api_route(
            f"/{unsupported}",
            _not_supported,
            methods=["POST"],
            status_code=501,
            response_model=WeightsRefusal,
            response_description=STATUSES[501],
            name=unsupported,
        )
    return router


def _described(status: int) -> dict[str, Any]:
    return {"model": WeightsRefusal, "description": STATUSES[status]}


async def _not_supported() -> JSONResponse:
    """Not supported: tensors are published by a RolloutClient, over Ray's object store."""
    problem = Problem(
        code="invalid_request",
        rule="tensors cannot be published over HTTP",
        remedy="use RolloutClient.publish_weights(version=..., tensors=...), or POST /update_weights_from_disk",
    )
    return _refusal(problem, 501)


async def _answered(work: Callable[[], Awaitable[A]]) -> A | JSONResponse:
    """What ``work`` answers, or in that server's form why it was not done."""
    try:
        return await work()
    except Exception as error:
        problem = problem_of_any(error)
        if problem.field == "path":
            problem = replace(problem, field=FIELD)
        statuses = {"invalid_request": 400, "weights_refused": 400, "deadline_exceeded": 504, "halted": 503}
        return _refusal(problem, statuses.get(problem.code, 500))


def _refusal(problem: Problem, status: int) -> JSONResponse:
    content = {"success": False, "message": str(problem), **problem.payload()}
    return JSONResponse(content, status_code=status)


async def _next_version(weights: Weights) -> int:
    fleet = await asyncio.to_thread(weights.policy_version)
    return fleet.control.version + 1


async def _agreed(weights: Weights) -> str | Problem:
    """The digest that all replicas have of the newest version; a Problem where they still differ after a while."""
    end = time.monotonic() + AGREE_S
    while True:
        fleet = await asyncio.to_thread(weights.policy_version)
        digests = {state.weights_digest for state in fleet.replicas}
        is_newest = all(state.version == fleet.control.version for state in fleet.replicas)
        if len(digests) == 1 and is_newest:
            return digests.pop()
        if time.monotonic() > end:
            return Problem(
                code="internal",
                value={state.replica_id: state.version for state in fleet.replicas},
                rule=f"every replica must be there with version {fleet.control.version}, and be awake",
                remedy="try again shortly; GET /v1/weights shows each replica",
            )
        await asyncio.sleep(GLANCE_S)


async def _in_the_end(call: Callable[[], T]) -> T:
    """What a call returns that waits for the whole fleet."""
    return await asyncio.get_running_loop().run_in_executor(WAITS, call)


def _replicas(states: list[ReplicaState]) -> str:
    return f"{len(states)} replica{' is' if len(states) == 1 else 's are'}"
