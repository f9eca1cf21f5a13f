"""The front door: a RolloutClient behind HTTP, and behind one handle for callers without this project's modules.

Ad-hoc requests only: a trainer runs its own RolloutClient, so that it owns what it gets and no byte passes here.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray.serve.handle import DeploymentHandle

from configs.settings import AppConfig
from deployments.client import RolloutClient
from deployments.conductor import Handles
from deployments.group import RolloutGroup
from deployments.summary import summarize
from pipeline.checkpoint import read_card
from schemas.errors import Problem, problem_of_validation_error
from schemas.request import RolloutRequest
from schemas.summary import RolloutSummary

logger = logging.getLogger("ray.serve")

STATUS_OF_CODE = {"invalid_request": 422, "queue_full": 503, "deadline_exceeded": 504, "cancelled": 499}
"""HTTP status of a group none of whose samples was done; 500 for any other code."""
RETRY_AFTER_S = 1

http = FastAPI(
    title="ltx-rollout",
    description="Reinforcement-learning rollouts of LTX-2.3. Ad-hoc requests; trainers use RolloutClient.",
)


class Refused(Exception):
    """A problem on its way to an HTTP answer, within this process."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@http.exception_handler(Refused)
async def _answer_refused(_: Request, error: Refused) -> JSONResponse:
    return _answer(error.problem)


@http.exception_handler(RequestValidationError)
async def _answer_unreadable(_: Request, error: RequestValidationError) -> JSONResponse:
    return _answer(problem_of_validation_error(error, RolloutRequest))


class Ingress:
    """Holds the client, and the refs of what it is answering."""

    def __init__(
        self,
        config: AppConfig,
        text_encoder: DeploymentHandle,
        denoiser: DeploymentHandle,
        av_decoder: DeploymentHandle,
        lease_board: DeploymentHandle,
    ) -> None:
        self._config = config
        self._card = read_card(config.model, config.limits, config.defaults)
        handles = Handles(
            text_encoder=text_encoder, denoiser=denoiser, av_decoder=av_decoder, lease_board=lease_board
        )
        self._client = RolloutClient(handles, self._card, config.client, wait_when_full=False)
        self._num_running = 0

    @http.post(
        "/v1/rollouts",
        responses={422: {"description": "cannot be sampled"}, 503: {"description": "full, try again"}},
    )
    async def create_rollout(self, request: RolloutRequest) -> RolloutSummary:
        """Sample one group and answer with its numbers: seeds, log-probs per step and modality, sizes, timings."""
        if self._num_running >= self._config.http.max_rollouts:
            raise Refused(
                Problem(
                    code="queue_full",
                    rule=f"at most {self._config.http.max_rollouts} rollouts are answered at a time (http.max_rollouts)",
                    remedy=f"try again in {RETRY_AFTER_S} s",
                )
            )
        self._num_running += 1
        try:
            group = await self._settled(request)
            failed = group.problems
            if len(failed) == len(group.samples):
                raise Refused(failed[0])
            return await summarize(group)
        finally:
            self._num_running -= 1

    @http.get("/health")
    async def health(self) -> dict[str, str]:
        """Answers when the app takes requests."""
        return {"status": "ok", "checkpoint": self._card.checkpoint}

    async def describe(self) -> dict[str, Any]:
        """What a client must know: the model card and the client's settings. For handle callers."""
        return {
            "card": self._card.model_dump(mode="json"),
            "client": self._config.client.model_dump(mode="json"),
        }

    async def rollout(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sample one group for a caller that has nothing but a handle: dicts in, object refs out.

        The refs are nested, so they arrive as refs. They are owned by this replica and die with it: read them soon,
        or use RolloutClient. Raises ValueError, TimeoutError or RuntimeError, whose text is a Problem, when no sample
        was done.
        """
        try:
            group = await self._settled(request)
        except Refused as refused:
            raise refused.problem.exception() from None
        failed = group.problems
        if len(failed) == len(group.samples):
            raise failed[0].exception()
        return {
            "request": group.request.model_dump(mode="json"),
            "conditioning": group.conditioning,
            "samples": [
                {
                    "sample_index": sample.sample_index,
                    "trajectory": sample.trajectory,
                    "media": sample.media,
                    "problem": sample.problem.payload() if sample.problem else None,
                }
                for sample in group.samples
            ],
        }

    async def _settled(self, request: RolloutRequest | Mapping[str, Any]) -> RolloutGroup:
        """Submit and wait. When our caller goes away the group is cancelled."""
        try:
            group = self._client.submit(request)
        except ValueError as error:
            problem = Problem.of(error)
            raise (Refused(problem) if problem else error) from None
        self._client.collect([group])
        try:
            return await asyncio.shield(asyncio.wrap_future(group.settled))
        except asyncio.CancelledError:
            group.cancel()
            raise


def _answer(problem: Problem) -> JSONResponse:
    status = STATUS_OF_CODE.get(problem.code, 500)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(problem.payload(), status_code=status, headers=headers)
