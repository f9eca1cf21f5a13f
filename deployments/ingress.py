"""The front door: HTTP, and one handle for callers without this project's modules.

Ad-hoc requests only: a trainer runs its own RolloutClient, so that it owns what it gets and no byte passes here. Any
number of replicas: they own nothing, and forward to the one archive.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from configs.settings import AppConfig
from deployments.http.api import http_app
from deployments.http.parts import some_done
from deployments.kept.client import ArchiveClient
from deployments.sglang.api import sglang_router
from deployments.weights.controls import WeightControls
from schemas.card import ModelCard
from schemas.control import Fleet


class Ingress:
    """Forwards to the archive, and puts what comes back into a caller's form."""

    def __init__(self, config: AppConfig, card: ModelCard, archive: DeploymentHandle) -> None:
        self._config, self._card = config, card
        self._archive = ArchiveClient(archive)
        self._weights = WeightControls(serve.get_replica_context().app_name)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once the replica is made: what answers its HTTP requests."""
        settings = self._config.http
        sglang = sglang_router(
            self._archive,
            self._weights,
            weights_root=settings.weights_root,
            max_num_samples=settings.max_num_samples,
        )
        return http_app(
            self._archive,
            self._fleet,
            checkpoint=self._card.checkpoint,
            settings=settings,
            routers=[sglang],
        )

    async def describe(self) -> dict[str, Any]:
        """What a client must know: the model card and the client's settings. For handle callers."""
        return {
            "card": self._card.model_dump(mode="json"),
            "client": self._config.client.model_dump(mode="json"),
        }

    async def rollout(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sample one group for a caller that has nothing but a handle: dicts in, object refs out.

        The refs are nested, so they arrive as refs. The archive owns them, and they die with it: read them soon, or use
        RolloutClient. The same request under the same request_id gives the same rollout, for as long as it is kept.
        Raises ValueError, TimeoutError or RuntimeError, whose text is a Problem, when no sample was done.
        """
        return dict(some_done(await self._archive.rollout(dict(request))))

    async def _fleet(self) -> Fleet:
        return await asyncio.to_thread(self._weights.policy_version)
