"""The archive, reached by its handle: every failure of a call is a Problem, and who stops waiting cancels the call."""

import asyncio
from typing import Any, cast

from ray.serve.handle import DeploymentHandle

from deployments.calls import problem_of
from deployments.kept.api import SampleProgress, Settled, Submitted


class ArchiveClient:
    """An `deployments.kept.api.Archive`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def submit(self, request: dict[str, Any], *, from_http: bool = True) -> Submitted:
        return cast(Submitted, await self._call("submit", request, from_http=from_http))

    async def find(self, id: str) -> Submitted:
        return cast(Submitted, await self._call("find", id))

    async def wait(self, id: str, group_id: str | None = None) -> Settled:
        return cast(Settled, await self._call("wait", id, group_id))

    async def progress(
        self, id: str, group_id: str, seen: list[SampleProgress] | None
    ) -> list[SampleProgress]:
        return cast(list[SampleProgress], await self._call("progress", id, group_id, seen))

    async def cancel(self, id: str) -> None:
        await self._call("cancel", id)

    async def rollout(self, request: dict[str, Any]) -> Settled:
        """As the archive's own."""
        return cast(Settled, await self._call("rollout", request))

    async def _call(self, method: str, *args: object, **kwargs: object) -> Any:
        response = getattr(self._handle, method).remote(*args, **kwargs)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            raise problem_of(error).exception() from None
