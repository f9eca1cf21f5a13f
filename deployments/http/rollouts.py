"""Routes of rollouts: one that is posted or found, in every form, and its parts.

A rollout that is under way is waited for, wherever it is asked for.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response

from configs.settings import HttpSettings
from deployments.http.accept import chosen
from deployments.http.bodies import ARROW_TYPE, arrow_answer, media_answer
from deployments.http.encoder import Encoder
from deployments.http.events import EVENTS_TYPE, EventStream, rollout_events
from deployments.http.parts import (
    MP4,
    PNG,
    WAV,
    Media,
    conditioning_parts,
    group_parts,
    some_done,
    trajectory_parts,
)
from deployments.http.problems import responses
from deployments.http.summary import summarize
from deployments.kept.api import Archive, Settled, Submitted
from schemas.errors import invalid
from schemas.request import RolloutRequest
from schemas.summary import RolloutSummary

JSON = "application/json"
FORMS = (JSON, EVENTS_TYPE, MP4, ARROW_TYPE)
NEEDED: dict[str, str] = {MP4: "media", ARROW_TYPE: "trajectory"}
"""What a request must ask for to be answered in a form."""

Id = Annotated[str, Path(description="The rollout's request_id.")]
Sample = Annotated[int, Path(description="Which sample of the rollout, from 0.", ge=0)]
Frame = Annotated[int, Path(description="Which frame of the video, from 0.", ge=0)]

BINARY = {"schema": {"type": "string", "format": "binary"}}
EVENTS = {
    "itemSchema": {
        "type": "object",
        "properties": {
            "event": {"enum": ["started", "progress", "summary", "problem"]},
            "data": {"type": "string", "contentMediaType": JSON},
        },
    }
}
IN_EVERY_FORM: dict[str, Any] = {
    "description": "The rollout: its numbers, its events, sample 0 as a video, or the trajectories of all samples",
    "content": {EVENTS_TYPE: EVENTS, MP4: BINARY, ARROW_TYPE: BINARY},
}


def rollout_router(archive: Archive, settings: HttpSettings) -> APIRouter:
    """The routes over an archive."""
    router = APIRouter(prefix="/v1/rollouts", default_response_class=Response)
    media = Media(Encoder(settings.encoded_bytes))

    async def found(http: Request, id: str, *offers: str) -> Settled:
        chosen(http, offers)
        return await archive.wait(id)

    async def in_form(http: Request, form: str, submitted: Submitted) -> Response:
        id, root = submitted["id"], http.scope.get("root_path", "")
        headers = {"Content-Location": f"{root}/v1/rollouts/{id}", "Vary": "Accept"}

        async def summary(settled: Settled) -> RolloutSummary:
            return await summarize(some_done(settled), root)

        if form == EVENTS_TYPE:
            return EventStream(rollout_events(archive, submitted, summary), headers)
        settled = some_done(await archive.wait(id, submitted["group_id"]))
        if form == MP4:
            return media_answer(http, await media.mp4(settled, 0), MP4, f"{id}-0.mp4", headers)
        if form == ARROW_TYPE:
            return arrow_answer(await group_parts(settled), f"{id}.arrows", headers)
        return JSONResponse((await summary(settled)).model_dump(mode="json"), headers=headers)

    @router.post(
        "",
        response_class=JSONResponse,
        response_model=RolloutSummary,
        responses={200: IN_EVERY_FORM, **responses(400, 406, 409, 410)},
    )
    async def create_rollout(request: RolloutRequest, http: Request) -> Response:
        """Sample one group, or find the one under its request_id.

        Accept says in which form it is answered: application/json (numbers and links), text/event-stream (progress,
        then the numbers), video/mp4 (sample 0), application/vnd.apache.arrow.stream (the trajectories of all samples).
        """
        form = chosen(http, FORMS)
        _refuse_unfit(request, form, settings.max_num_samples)
        submitted = await archive.submit(request.model_dump(mode="json"))
        return await in_form(http, form, submitted)

    @router.get(
        "/{id}",
        response_class=JSONResponse,
        response_model=RolloutSummary,
        responses={200: IN_EVERY_FORM, 206: _file(MP4), **responses(404, 406, 410, 416)},
    )
    async def read_rollout(id: Id, http: Request) -> Response:
        """A rollout that is kept or under way, in any of the forms that a new one is answered in."""
        form = chosen(http, FORMS)
        return await in_form(http, form, await archive.find(id))

    @router.delete("/{id}", status_code=204, responses=responses(404, 410))
    async def delete_rollout(id: Id) -> None:
        """Stop what runs of a rollout, and forget it."""
        await archive.cancel(id)

    @router.get("/{id}/conditioning", responses={200: _file(ARROW_TYPE), **responses(404, 406, 410)})
    async def read_conditioning(id: Id, http: Request) -> Response:
        """The prompt's contexts, a table of one row."""
        settled = await found(http, id, ARROW_TYPE)
        return arrow_answer(await conditioning_parts(settled), f"{settled['id']}-conditioning.arrows", {})

    @router.get(
        "/{id}/samples/{sample}/trajectory", responses={200: _file(ARROW_TYPE), **responses(404, 406, 410)}
    )
    async def read_trajectory(id: Id, sample: Sample, http: Request) -> Response:
        """One sample's trajectory, a row per kept state; the manifest in the schema's metadata."""
        settled = await found(http, id, ARROW_TYPE)
        return arrow_answer(await trajectory_parts(settled, sample), f"{settled['id']}-{sample}.arrows", {})

    @router.head("/{id}/samples/{sample}/media.mp4", include_in_schema=False)
    @router.get("/{id}/samples/{sample}/media.mp4", responses=_ranged(MP4))
    async def read_mp4(id: Id, sample: Sample, http: Request) -> Response:
        """Picture and sound of one sample: H.264 and AAC. In ranges, too."""
        settled = await found(http, id, MP4)
        return media_answer(http, await media.mp4(settled, sample), MP4, f"{settled['id']}-{sample}.mp4", {})

    @router.head("/{id}/samples/{sample}/audio.wav", include_in_schema=False)
    @router.get("/{id}/samples/{sample}/audio.wav", responses=_ranged(WAV))
    async def read_wav(id: Id, sample: Sample, http: Request) -> Response:
        """The sound of one sample as it was made: 32-bit float samples. In ranges, too."""
        settled = await found(http, id, WAV)
        return media_answer(http, await media.wav(settled, sample), WAV, f"{settled['id']}-{sample}.wav", {})

    @router.head("/{id}/samples/{sample}/frames/{frame}.png", include_in_schema=False)
    @router.get("/{id}/samples/{sample}/frames/{frame}.png", responses=_ranged(PNG))
    async def read_frame(id: Id, sample: Sample, frame: Frame, http: Request) -> Response:
        """One frame of a sample, pixel by pixel."""
        settled = await found(http, id, PNG)
        file = await media.png(settled, sample, frame)
        return media_answer(http, file, PNG, f"{settled['id']}-{sample}-{frame}.png", {})

    return router


def _refuse_unfit(request: RolloutRequest, form: str, max_num_samples: int) -> None:
    """Raise ValueError (a Problem) for what could not be answered, before it is sampled."""
    if request.num_samples > max_num_samples:
        raise invalid(
            "num_samples",
            request.num_samples,
            f"must be at most {max_num_samples} over HTTP (http.max_num_samples)",
            f"use {max_num_samples}, or a RolloutClient for larger groups",
        ).exception()
    needed = NEEDED.get(form)
    if needed is not None and not getattr(request, needed):
        raise invalid(needed, False, f"must be true for Accept: {form}", "leave it out").exception()


def _file(media_type: str) -> dict[str, Any]:
    return {"content": {media_type: BINARY}}


def _ranged(media_type: str) -> dict[int | str, dict[str, Any]]:
    whole, part = _file(media_type), {**_file(media_type), "description": "The range that was asked for"}
    return {200: whole, 206: part, **responses(404, 406, 410, 416)}
