"""SGLang's rollout API over the archive: a trainer that was written for that server needs another address only.

`schemas.sglang` says how its fields read here, `schemas.sglang_answer` what is answered, `deployments.sglang.weights` has
its weight routes. This module chains them, and knows neither numbers nor weights.

Invariants:
* an answer has every sample of its group, or is an error: that API has no place for a part of one;
* a body is written piece by piece, off the event loop, out of the archive's own memory.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from deployments.http.problems import answer, problem_of_any, responses
from deployments.kept.api import Archive, Settled, SettledSample
from deployments.sglang.body import body_of, read_json
from deployments.sglang.weights import Weights, weight_routes
from schemas.errors import Problem, invalid
from schemas.sglang import SGLangRequest, renamed, rollout_request_of
from schemas.sglang_answer import answer_of
from schemas.sglang_wire import pieces

MSGPACK = "application/msgpack"


def sglang_router(
    archive: Archive, weights: Weights, *, max_num_samples: int, weights_root: str | None
) -> APIRouter:
    """The routes. ``weights_root``: the folder that weights may be read from (`http.weights_root`), None for no folder."""
    router = APIRouter(tags=["SGLang's rollout API"])

    @router.post(
        "/rollout/generate",
        response_class=Response,
        responses={
            **responses(410),
            200: {"description": "A list with a map for each sample, as msgpack", "content": {MSGPACK: {}}},
        },
        openapi_extra=body_of(SGLangRequest),
    )
    async def generate(request: Request) -> Response:
        """Sample one group, and answer when all of its samples are done."""
        try:
            asked = SGLangRequest.of(await read_json(request))
            _refuse_large(asked, max_num_samples)
            submitted = await archive.submit(rollout_request_of(asked))
            settled = await archive.wait(submitted["id"], submitted["group_id"])
            for sample in settled["samples"]:
                if sample["problem"] is not None:
                    return answer(renamed(Problem(**sample["problem"])))
            body = pieces(await _read(asked, settled))
        except Exception as error:
            return answer(renamed(problem_of_any(error)))
        return StreamingResponse(body, media_type=MSGPACK)

    router.include_router(weight_routes(weights, weights_root))
    return router


def _refuse_large(asked: SGLangRequest, most: int) -> None:
    found = asked.num_outputs_per_prompt or 1
    if found > most:
        rule = f"must be at most {most} over HTTP (http.max_num_samples)"
        remedy = f"use {most}, or a RolloutClient for larger groups"
        raise invalid("num_outputs_per_prompt", found, rule, remedy).exception()


async def _read(asked: SGLangRequest, settled: Settled) -> list[dict[str, Any]]:
    wants_contexts = asked.rollout and asked.rollout_return_denoising_env
    conditioning = await settled["conditioning"] if wants_contexts else None

    async def read(sample: SettledSample) -> dict[str, Any]:
        trajectory = sample["trajectory"]
        return answer_of(
            asked,
            request_id=settled["id"],
            media=await sample["media"],
            trajectory=None if trajectory is None else await trajectory,
            conditioning=conditioning,
        )

    return await asyncio.gather(*(read(sample) for sample in settled["samples"]))
