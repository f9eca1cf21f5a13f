"""An archive without a cluster: the same book-keeping, and tables of known numbers in place of samples.

A prompt says what becomes of it: `fails` (every sample), `partly` (sample 1 fails), `late` (not before `release`).
"""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa

from deployments.kept.api import SampleProgress, Settled, Submitted
from deployments.kept.shelf import Shelf, gone
from schemas.arrow import manifest_of
from schemas.conditioning import pack_conditioning
from schemas.errors import Problem
from schemas.media import pack_media
from schemas.resolve import resolve
from schemas.resolved import ResolvedRequest
from schemas.trajectory import pack_trajectory
from tests.cards import ltx23_card

CARD = ltx23_card()
HEIGHT, WIDTH, NUM_FRAMES, FRAME_RATE, SAMPLE_RATE, NUM_SOUNDS = 64, 96, 9, 24.0, 48000, 17_960
NON_FINITE = Problem(
    code="non_finite", rule="the state became NaN or infinite", remedy="lower the noise level"
)
LATE = Problem(
    code="deadline_exceeded", field="deadline_s", value=1, rule="was not done", remedy="allow more"
)


class Ref:
    """A ref of a value: awaited any number of times."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.is_fetched = False

    def __await__(self) -> Generator[Any, None, Any]:
        self.is_fetched = True
        yield from asyncio.sleep(0).__await__()
        return self.value


def trajectory_of(request: ResolvedRequest, index: int) -> pa.Table:
    steps = list(request.return_steps)
    rng = np.random.default_rng(index)
    num_steps = request.num_inference_steps
    log_probs = [-1.0 - step - index for step in range(num_steps)]
    manifest = {
        "request": request.model_dump(mode="json"),
        "sample_index": index,
        "seed": request.seed,
        "policy_version": 3,
        "conditioning_digest": "abc",
        "sigmas": [1 - step / num_steps for step in range(num_steps + 1)],
        "log_probs_video": log_probs,
        "log_probs_audio": log_probs,
        "n_video": 96,
        "n_audio": 32,
        "timings": {"denoise_s": 0.5},
    }
    told = [log_probs[step] if step < num_steps else None for step in steps]
    return pack_trajectory(
        steps=steps,
        sigmas=[manifest["sigmas"][step] for step in steps],
        video_latents=rng.standard_normal((len(steps), 12, 8)).astype(np.float32),
        audio_latents=rng.standard_normal((len(steps), 8, 4)).astype(np.float32),
        log_prob_video=told,
        log_prob_audio=told,
        state_dtype="float32",
        manifest=manifest,
    )


def media_of(trajectory_manifest: dict[str, Any], index: int) -> dict[str, pa.Table]:
    frames = np.zeros((NUM_FRAMES, HEIGHT, WIDTH, 3), np.uint8)
    frames[:] = np.arange(NUM_FRAMES, dtype=np.uint8)[:, None, None, None] * 20 + index
    tone = np.sin(np.arange(NUM_SOUNDS) * 0.05).astype(np.float32) * 0.5
    return pack_media(frames, FRAME_RATE, np.stack([tone, -tone]), SAMPLE_RATE, trajectory_manifest)


def conditioning() -> pa.Table:
    context = np.arange(12, dtype=np.float32).reshape(4, 3)
    return pack_conditioning(
        video_context=context,
        audio_context=context + 1,
        text_mask=np.ones(4, np.uint8),
        torch_dtype="float32",
        manifest={"prompt": "a red ball"},
    )


@dataclass
class Rollout:
    request: ResolvedRequest
    answer: asyncio.Future[Settled]
    num_waiting: int = 0
    steps_done: int = 0
    group_id: str = field(default_factory=lambda: uuid4().hex)

    @property
    def id(self) -> str:
        return self.request.request_id


@dataclass
class FakeArchive:
    """Keeps what it is asked for."""

    keep_s: float = 60.0
    keep_bytes: int = 2**20
    is_full: bool = False
    now: float = 0.0
    num_sampled: int = 0
    shelf: Shelf[Rollout] = field(init=False)

    def __post_init__(self) -> None:
        self.shelf = Shelf(self.keep_s, self.keep_bytes, lambda: self.now)

    async def submit(self, request: dict[str, Any], *, from_http: bool = True) -> Submitted:
        assert from_http
        if self.is_full:
            raise Problem(code="queue_full", rule="is full", remedy="try again").exception()
        known = self.shelf.get(request["request_id"]) if request.get("request_id") else None
        if known is None:
            rollout = Rollout(resolve(request, CARD), asyncio.get_running_loop().create_future())
            self.shelf.put(rollout)
            self.num_sampled += 1
            if "late" not in rollout.request.prompt:
                self.release(rollout.id)
            known = rollout
        elif resolve({**request, "seed": known.request.seed}, CARD) != known.request:
            raise Problem(
                code="conflict", field="request_id", rule="is taken", remedy="use another"
            ).exception()
        return await self.find(known.id)

    async def find(self, id: str) -> Submitted:
        rollout = self.shelf.find(id)
        request = rollout.request.model_dump(mode="json")
        return {"id": id, "group_id": rollout.group_id, "request": request}

    async def wait(self, id: str, group_id: str | None = None) -> Settled:
        rollout = self._found(id, group_id)
        rollout.num_waiting += 1
        try:
            return await asyncio.shield(rollout.answer)
        finally:
            rollout.num_waiting -= 1
            if not rollout.num_waiting and not rollout.answer.done():
                self.shelf.forget(rollout)

    async def progress(
        self, id: str, group_id: str, seen: list[SampleProgress] | None
    ) -> list[SampleProgress]:
        rollout = self._found(id, group_id)
        while (now := self._progress(rollout)) == seen:
            await asyncio.sleep(0.001)
        return now

    async def cancel(self, id: str) -> None:
        self.shelf.forget(self.shelf.find(id))

    def release(self, id: str) -> None:
        """Let a rollout settle."""
        rollout = self.shelf.find(id)
        rollout.answer.set_result(_settled(rollout))
        self.shelf.settle(rollout, num_bytes=1000)

    def _found(self, id: str, group_id: str | None) -> Rollout:
        rollout = self.shelf.find(id)
        if group_id not in (None, rollout.group_id):
            raise gone(id).exception()
        return rollout

    def _progress(self, rollout: Rollout) -> list[SampleProgress]:
        return [
            {
                "sample_index": index,
                "attempt": 1,
                "steps_done": rollout.steps_done,
                "num_steps": rollout.request.num_inference_steps,
                "state": "running",
                "problem": None,
            }
            for index in range(rollout.request.num_samples)
        ]


def _settled(rollout: Rollout) -> Settled:
    request = rollout.request
    samples: list[Any] = []
    for index in range(request.num_samples):
        known: dict[str, Any] = {"sample_index": index, "attempt": 1, "trajectory": None, "media": None}
        if "fails" in request.prompt or ("partly" in request.prompt and index == 1):
            problem = LATE if "fails" in request.prompt else NON_FINITE
            samples.append({**known, "problem": problem.payload()})
            continue
        table = trajectory_of(request, index)
        manifest = {"request": request.model_dump(mode="json"), "timings": {"decode_s": 0.1}}
        tables = media_of({**manifest_of(table), **manifest}, index)
        known["trajectory"] = Ref(table) if request.trajectory else None
        known["media"] = Ref(tables) if request.media else None
        samples.append({**known, "problem": None})
    return {
        "id": request.request_id,
        "group_id": rollout.group_id,
        "request": request.model_dump(mode="json"),
        "policy_version": 3,
        "conditioning": Ref(conditioning()),
        "samples": samples,
    }
