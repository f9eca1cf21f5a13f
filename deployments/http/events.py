"""A rollout as server-sent events: `started`, `progress` per sample as its steps are done, then `summary` or `problem`.

Who listens waits for the rollout: when the stream is closed, so is the wait.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from anyio import CancelScope
from fastapi.responses import StreamingResponse
from starlette.types import Send

from deployments.http.problems import problem_of_any, status_of
from deployments.kept.api import Archive, SampleProgress, Settled, Submitted
from schemas.problem_details import ProblemDetails
from schemas.summary import RolloutSummary

EVENTS_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""So that nothing on the way keeps events back."""
QUIET = b": still at it\n\n"
"""A comment, when there is nothing to tell, so that nothing on the way takes the stream for dead."""


class EventStream(StreamingResponse):
    """Events as an answer, whose source is closed however the answer ends: when the caller goes while a piece is on its way,
    too."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(events, media_type=EVENTS_TYPE, headers={**headers, **HEADERS})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        finally:
            with CancelScope(shield=True):
                await self._events.aclose()


async def rollout_events(
    archive: Archive,
    submitted: Submitted,
    summary: Callable[[Settled], Awaitable[RolloutSummary]],
) -> AsyncGenerator[bytes, None]:
    """The stream of one rollout. ``summary`` raises a Problem when no sample was done."""
    id, group_id, seen = submitted["id"], submitted["group_id"], None
    waiting = asyncio.ensure_future(archive.wait(id, group_id))
    try:
        yield _event("started", {"request_id": id, "request": submitted["request"]})
        while not waiting.done():
            look = asyncio.ensure_future(archive.progress(id, group_id, seen))
            try:
                await asyncio.wait({waiting, look}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not look.done():
                    look.cancel()
            if look.done() and not look.cancelled():
                if look.exception() is not None:
                    break
                for event in _news(seen, look.result()):
                    yield event
                seen = look.result()
        settled = await waiting
        for event in _news(seen, _final(settled)):
            yield event
        yield _event("summary", (await summary(settled)).model_dump(mode="json"))
    except Exception as error:
        problem = problem_of_any(error)
        yield _event("problem", ProblemDetails.of(problem, status_of(problem)).model_dump(mode="json"))
    finally:
        waiting.cancel()
        # Whatever came of it is told or not wanted.
        await asyncio.gather(waiting, return_exceptions=True)


def _news(seen: list[SampleProgress] | None, now: list[SampleProgress]) -> list[bytes]:
    """An event for every sample that has moved; a comment where none has."""
    before: list[SampleProgress | None] = [None] * len(now) if seen is None else [*seen]
    moved = [sample for sample, earlier in zip(now, before, strict=True) if sample != earlier]
    return [_event("progress", sample) for sample in moved] or [QUIET]


def _final(settled: Settled) -> list[SampleProgress]:
    num_steps = settled["request"]["num_inference_steps"]
    return [
        {
            "sample_index": sample["sample_index"],
            "attempt": sample["attempt"],
            "steps_done": 0 if sample["problem"] else num_steps,
            "num_steps": num_steps,
            "state": "failed" if sample["problem"] else "done",
            "problem": sample["problem"],
        }
        for sample in settled["samples"]
    ]


def _event(name: str, told: Any) -> bytes:
    # JSON in ASCII is on one line, whatever stands in it.
    return f"event: {name}\ndata: {json.dumps(told)}\n\n".encode()
