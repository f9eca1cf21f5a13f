"""SGLang's routes over an archive that is none and weights that are none, and what they are asked."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from configs.settings import HttpSettings
from deployments.http.api import http_app
from deployments.kept.api import SampleProgress, Settled, Submitted
from deployments.sglang.api import sglang_router
from schemas.control import Control, Fleet, ReplicaState
from schemas.errors import Problem
from schemas.resolve import resolve
from tests.cards import ltx23_card
from tests.fake_archive import Ref
from tests.sglang_tables import Tables, tables

GENERATE = "/rollout/generate"
DIGEST = "ab" * 16


class FakeArchive:
    """Samples tables out of thin air; ``fails`` by sample index."""

    def __init__(self, fails: dict[int, Problem] | None = None) -> None:
        self._fails = fails or {}
        self.asked: list[dict[str, Any]] = []
        self.made: list[Tables] = []
        self.settled: Settled | None = None
        """The last one, with its refs."""
        self.waiting = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def submit(self, request: dict[str, Any], *, from_http: bool = True) -> Submitted:
        self.asked.append(request)
        resolved = resolve(request, ltx23_card())
        return {"id": "mine", "group_id": "g", "request": resolved.model_dump(mode="json")}

    async def wait(self, id: str, group_id: str | None = None) -> Settled:
        self.waiting += 1
        try:
            await self.hold.wait()
        finally:
            self.waiting -= 1
        request = resolve(self.asked[-1], ltx23_card())
        self.made = [
            tables(index, steps=(0, 1, 2, 3, 4), guided=request.guidance.needs_negative_prompt)
            for index in range(request.num_samples)
        ]
        self.settled = {
            "id": id,
            "group_id": "g",
            "request": request.model_dump(mode="json"),
            "policy_version": 3,
            "conditioning": Ref(self.made[0].conditioning),
            "samples": [
                {
                    "sample_index": index,
                    "attempt": 1,
                    "trajectory": Ref(made.trajectory) if request.trajectory else None,
                    "media": Ref(made.media),
                    "problem": self._fails[index].payload() if index in self._fails else None,
                }
                for index, made in enumerate(self.made)
            ],
        }
        return self.settled

    async def find(self, id: str) -> Submitted:
        raise AssertionError

    async def progress(
        self, id: str, group_id: str, seen: list[SampleProgress] | None
    ) -> list[SampleProgress]:
        raise AssertionError

    async def cancel(self, id: str) -> None:
        raise AssertionError


class FakeWeights:
    """Two replicas at version 3."""

    def __init__(self) -> None:
        self.version, self.run = 3, "running"
        self.digests = [DIGEST, DIGEST]
        self.published: list[tuple[int, Path]] = []
        self.error: Exception | None = None
        """What whatever changes the fleet fails with."""

    def _states(self) -> list[ReplicaState]:
        return [
            ReplicaState(replica_id=f"r{i}", version=self.version, weights_digest=digest, run=self.run)  # type: ignore[arg-type]
            for i, digest in enumerate(self.digests)
        ]

    def publish_weights(self, *, version: int, path: str | Path) -> list[ReplicaState]:
        if self.error is not None:
            raise self.error
        self.published.append((version, Path(path)))
        self.version = version
        return self._states()

    def policy_version(self) -> Fleet:
        return Fleet(control=Control(version=self.version), replicas=tuple(self._states()))

    def sleep(self) -> list[ReplicaState]:
        if self.error is not None:
            raise self.error
        self.run = "asleep"
        return self._states()

    def wake(self) -> list[ReplicaState]:
        if self.error is not None:
            raise self.error
        self.run = "running"
        return self._states()


def post(
    url: str,
    body: Any = None,
    *,
    archive: FakeArchive | None = None,
    weights: FakeWeights | None = None,
    root: Path | None = None,
) -> httpx.Response:
    """What an app of these parts answers. Bytes are sent as they are."""

    async def ask() -> httpx.Response:
        app = app_of(archive or FakeArchive(), weights or FakeWeights(), root)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://app"
        ) as http:
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await http.post(url, **given)

    return asyncio.run(ask())


def app_of(archive: FakeArchive, weights: FakeWeights, root: Path | None = None) -> FastAPI:
    async def fleet() -> Fleet:
        return weights.policy_version()

    weights_root = None if root is None else str(root)
    router = sglang_router(archive, weights, max_num_samples=4, weights_root=weights_root)
    return http_app(archive, fleet, checkpoint="tiny", settings=HttpSettings(), routers=[router])


def saved(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("diffusion_pytorch_model.safetensors",):
        (folder / name).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder
