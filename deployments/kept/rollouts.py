"""Samples rollouts for ad-hoc callers and keeps them under their request_id, over a RolloutClient.

It holds refs, never tables. Somebody must wait for a rollout: when the last of those who do hangs up, and nobody was told
of it a moment ago and is on the way, it is given up.
Confined to one event loop; it knows no deployments.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from configs.settings import HttpSettings
from deployments.calls import size_of
from deployments.group import RolloutGroup, RolloutSample
from deployments.kept.api import SampleProgress, Settled, Submitted
from deployments.kept.shelf import Shelf, gone
from schemas.card import ModelCard
from schemas.errors import Problem
from schemas.resolve import resolve

logger = logging.getLogger("ray.serve")

UNATTENDED_S = 10.0
"""How long a caller who was told of a rollout may take to wait for it."""
POLL_S = 5.0
"""Longest time until progress is told that there is none."""
GLANCE_S = 0.1
"""Between two looks at the steps of a rollout whose progress is asked for."""
TEND_S = 1.0
"""Between two looks for what is kept too long, or waited for by nobody."""


class Rollout:
    """One group in the archive."""

    def __init__(self, group: RolloutGroup, *, from_http: bool) -> None:
        self.group = group
        self.from_http = from_http
        self.num_waiting = 0
        self._num_expected, self._expected_since = 0, 0.0
        self.answer: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        return self.group.request_id

    def expect(self) -> None:
        """A caller is told of it, and will wait for it."""
        self._num_expected, self._expected_since = self._num_expected + 1, time.monotonic()

    def come(self) -> None:
        """One of those who were told of it begins to wait."""
        self._num_expected = max(0, self._num_expected - 1)

    @property
    def is_attended(self) -> bool:
        """Whether somebody waits for it, or was told of it a moment ago and is on the way."""
        is_expected = self._num_expected > 0 and time.monotonic() - self._expected_since < UNATTENDED_S
        return self.num_waiting > 0 or is_expected

    @property
    def has_failed(self) -> bool:
        """Whether it is settled and no sample was done."""
        return self.answer.done() and all(sample["problem"] for sample in self.answer.result()["samples"])


class Client(Protocol):
    """What is needed of a `deployments.client.RolloutClient`."""

    def submit(self, request: Mapping[str, Any]) -> RolloutGroup: ...

    def collect(self, groups: Iterable[RolloutGroup]) -> None: ...


class KeptRollouts:
    """An `deployments.kept.api.Archive`."""

    def __init__(self, client: Client, card: ModelCard, settings: HttpSettings) -> None:
        self._client, self._card, self._settings = client, card, settings
        self._shelf: Shelf[Rollout] = Shelf(settings.keep_s, settings.keep_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._tending: asyncio.Task[None] | None = None

    async def submit(self, request: Mapping[str, Any], *, from_http: bool = True) -> Submitted:
        """Start a rollout, or find it."""
        rollout = self._same(request)
        if rollout is None:
            if from_http:
                self._refuse_when_full()
            rollout = self._begin(self._client.submit(request), from_http)
        return _told_of(rollout)

    async def find(self, id: str) -> Submitted:
        """A rollout that is there."""
        return _told_of(self._shelf.find(id))

    async def wait(self, id: str, group_id: str | None = None) -> Settled:
        """A rollout once it is settled."""
        rollout = self._found(id, group_id)
        if group_id is not None:
            rollout.come()
        rollout.num_waiting += 1
        try:
            return await asyncio.shield(rollout.answer)
        finally:
            rollout.num_waiting -= 1
            if not rollout.is_attended and not rollout.answer.done():
                self._give_up(rollout)

    async def progress(
        self, id: str, group_id: str, seen: list[SampleProgress] | None
    ) -> list[SampleProgress]:
        """How far a rollout is, once that is not ``seen``."""
        rollout = self._found(id, group_id)
        end = time.monotonic() + POLL_S
        while (now := _progress(rollout.group)) == seen and time.monotonic() < end:
            await asyncio.wait([rollout.answer], timeout=GLANCE_S)
            if rollout.answer.done():
                return _progress(rollout.group)
        return now

    async def cancel(self, id: str) -> None:
        """Stop and forget a rollout."""
        self._give_up(self._shelf.find(id))

    async def rollout(self, request: Mapping[str, Any]) -> Settled:
        """Both at once, for callers that have a handle alone. Not bound by the limits of HTTP."""
        submitted = await self.submit(request, from_http=False)
        return await self.wait(submitted["id"], submitted["group_id"])

    async def status(self) -> dict[str, int]:
        """What it holds."""
        return {
            "running": len(self._shelf.running),
            "waiting": sum(rollout.num_waiting for rollout in self._shelf.running),
            "kept": self._shelf.num_kept,
            "kept_bytes": self._shelf.kept_bytes,
        }

    def _found(self, id: str, group_id: str | None) -> Rollout:
        """The rollout under an id. Raises LookupError (a Problem), also where it is another one by now."""
        rollout = self._shelf.find(id)
        if group_id not in (None, rollout.group.group_id):
            raise gone(id).exception()
        return rollout

    def _same(self, request: Mapping[str, Any]) -> Rollout | None:
        """The rollout of this very request under its request_id, unless it failed. Raises ValueError (a Problem) where
        it is another request's. A seed that is left out is any."""
        id = request.get("request_id") if isinstance(request, Mapping) else None
        rollout = self._shelf.get(id) if isinstance(id, str) else None
        if rollout is None or rollout.has_failed:
            return None
        kept = rollout.group.request
        seed = kept.seed if request.get("seed") is None else request["seed"]
        if resolve({**request, "seed": seed}, self._card) != kept:
            raise _taken(kept.request_id).exception()
        return rollout

    def _begin(self, group: RolloutGroup, from_http: bool) -> Rollout:
        self._client.collect([group])
        rollout = Rollout(group, from_http=from_http)
        self._shelf.put(rollout)
        task = asyncio.create_task(self._settle(rollout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())
        return rollout

    async def _settle(self, rollout: Rollout) -> None:
        group = rollout.group
        await asyncio.wrap_future(group.settled)
        answer = _settled(group)
        refs = [answer["conditioning"]]
        for told in answer["samples"]:
            refs += [told["trajectory"], told["media"]]
        rollout.answer.set_result(answer)
        self._shelf.settle(rollout, sum(size_of(ref) for ref in refs if ref is not None))

    def _give_up(self, rollout: Rollout) -> None:
        self._shelf.forget(rollout)
        rollout.group.cancel()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            self._shelf.sweep()
            for rollout in self._shelf.running:
                if not rollout.is_attended:
                    logger.info("nobody waits for rollout %s; it is given up", rollout.id)
                    self._give_up(rollout)

    def _refuse_when_full(self) -> None:
        """Raise RuntimeError (a Problem) when as many rollouts are under way over HTTP as may be."""
        most = self._settings.max_rollouts
        if sum(rollout.from_http for rollout in self._shelf.running) >= most:
            raise Problem(
                code="queue_full",
                rule=f"at most {most} rollouts are sampled at a time (http.max_rollouts)",
                remedy="try again in 1 s",
            ).exception()


def _told_of(rollout: Rollout) -> Submitted:
    """What a caller is told, who then waits for it."""
    rollout.expect()
    group = rollout.group
    return {"id": rollout.id, "group_id": group.group_id, "request": group.request.model_dump(mode="json")}


def _progress(group: RolloutGroup) -> list[SampleProgress]:
    num_steps = group.request.num_inference_steps
    return [
        {
            "sample_index": sample.sample_index,
            "attempt": sample.attempt,
            "steps_done": sample.steps_done,
            "num_steps": num_steps,
            "state": _state(sample),
            "problem": sample.problem.payload() if sample.problem else None,
        }
        for sample in group.samples
    ]


def _state(sample: RolloutSample) -> str:
    if not sample.settled.done():
        return "running"
    return "failed" if sample.problem else "done"


def _settled(group: RolloutGroup) -> Settled:
    return {
        "id": group.request_id,
        "group_id": group.group_id,
        "request": group.request.model_dump(mode="json"),
        "policy_version": group.policy_version,
        "conditioning": group.conditioning,
        "samples": [
            {
                "sample_index": sample.sample_index,
                "attempt": sample.attempt,
                "trajectory": sample.trajectory,
                "media": sample.media,
                "problem": sample.problem.payload() if sample.problem else None,
            }
            for sample in group.samples
        ],
    }


def _taken(request_id: str) -> Problem:
    return Problem(
        code="conflict",
        field="request_id",
        value=request_id,
        rule="is taken by the rollout of another request",
        remedy="use another one, leave it out to have one drawn, or delete that rollout first",
    )
