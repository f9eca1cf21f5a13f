"""The deployments without a model as tests bind them: they say what they hold. They load no more than the real ones do."""

import asyncio
import gc
import os
from typing import Any

import ray

from deployments.archive import RolloutArchive
from deployments.ingress import Ingress
from deployments.lease_board import LeaseBoard


class TellingLeaseBoard(LeaseBoard):
    """Says which process it is."""

    async def status(self) -> dict[str, int]:
        return {"pid": os.getpid()}


class TellingArchive(RolloutArchive):
    """Says what it keeps, and what its process holds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_kept = 0

    async def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.num_kept += 1
        return await super().submit(*args, **kwargs)

    async def status(self) -> dict[str, Any]:
        ids = [*self._shelf._settled, *self._shelf._running]
        return {**await super().status(), **_process(), "ids": ids, "num_kept": self.num_kept}


class TellingIngress(Ingress):
    """Says what its process holds."""

    async def status(self) -> dict[str, Any]:
        return _process()


def _process() -> dict[str, Any]:
    """References to objects that are reachable, and tasks on the loop, this one among them."""
    gc.collect()
    references = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return {"pid": os.getpid(), "refs": len(references), "tasks": len(asyncio.all_tasks())}
