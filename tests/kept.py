"""The archive over a client without a cluster, and callers who wait for it, hang up, or are refused."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import pytest

from configs.settings import HttpSettings
from deployments.group import RolloutGroup
from deployments.kept.api import Submitted
from deployments.kept.rollouts import KeptRollouts
from schemas.errors import Problem
from schemas.resolve import resolve
from tests.cards import ltx23_card

CARD = ltx23_card()
BALL = {"prompt": "a red ball", "num_samples": 2, "request_id": "ball"}


class FakeClient:
    """Samples nothing until it is told to; a group that is cancelled fails."""

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []
        self.cancelled: list[RolloutGroup] = []

    def submit(self, request: Mapping[str, Any]) -> RolloutGroup:
        self.groups.append(RolloutGroup(resolve(request, CARD), self._cancel))
        return self.groups[-1]

    def collect(self, groups: Iterable[RolloutGroup]) -> None:
        assert all(group in self.groups for group in groups)

    def settle(self, index: int = -1, *problems: Problem | None) -> None:
        group = self.groups[index]
        for sample, problem in zip(group.samples, problems or [None] * len(group.samples), strict=True):
            if problem is None:
                sample.finish(None, None)
            else:
                sample.fail(problem)
        group.settled.set_result(None)

    def _cancel(self, group: RolloutGroup) -> None:
        self.cancelled.append(group)
        cancelled = Problem(code="cancelled", rule="was cancelled")
        self.settle(self.groups.index(group), *[cancelled] * len(group.samples))


def run(script: Callable[[KeptRollouts, FakeClient], Awaitable[None]], **settings: Any) -> None:
    async def talk() -> None:
        client = FakeClient()
        await script(KeptRollouts(client, CARD, HttpSettings(**settings)), client)

    asyncio.run(talk())


async def refused(call: Awaitable[Any]) -> Problem:
    with pytest.raises((ValueError, LookupError, RuntimeError)) as error:
        await call
    problem = Problem.of(error.value)
    assert problem is not None
    return problem


async def waiting(archive: KeptRollouts, submitted: Submitted) -> asyncio.Task[Any]:
    """Somebody who was told of a rollout, and has begun to wait."""
    task = asyncio.create_task(archive.wait(submitted["id"], submitted["group_id"]))
    await asyncio.sleep(0)
    return task


async def hang_up(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
