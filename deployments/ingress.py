"""The front door: a RolloutClient behind HTTP, and behind one handle for callers without this project's modules.

Ad-hoc requests only: a trainer runs its own RolloutClient, so that it owns what it gets and no byte passes here.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from configs.settings import AppConfig
from deployments.client import RolloutClient
from deployments.conductor import Handles
from deployments.group import RolloutGroup
from deployments.http_api import http_app
from schemas.card import ModelCard
from schemas.control import Fleet
from schemas.request import RolloutRequest


class Ingress:
    """Holds the client, and the refs of what it is answering."""

    def __init__(
        self,
        config: AppConfig,
        card: ModelCard,
        text_encoder: DeploymentHandle,
        denoiser: DeploymentHandle,
        av_decoder: DeploymentHandle,
        lease_board: DeploymentHandle,
    ) -> None:
        self._config = config
        self._card = card
        handles = Handles(
            app_name=serve.get_replica_context().app_name,
            text_encoder=text_encoder,
            denoiser=denoiser,
            av_decoder=av_decoder,
            lease_board=lease_board,
        )
        self._client = RolloutClient(handles, self._card, config.client, wait_when_full=False)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once the replica is made: what answers its HTTP requests."""
        return http_app(
            self._settled, self._fleet, checkpoint=self._card.checkpoint, settings=self._config.http
        )

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
        group = await self._settled(request)
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

    async def _fleet(self) -> Fleet:
        return await asyncio.to_thread(self._client.policy_version)

    async def _settled(self, request: RolloutRequest | Mapping[str, Any]) -> RolloutGroup:
        """Submit and wait. When our caller goes away the group is cancelled."""
        group = self._client.submit(request)
        self._client.collect([group])
        try:
            return await asyncio.shield(asyncio.wrap_future(group.settled))
        except asyncio.CancelledError:
            group.cancel()
            raise
