"""The denoiser's router alone, in Serve's own machinery, over replicas that are nothing but a queue."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any, cast

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from deployments.router import FewestRowsRouter

DEPLOYMENT = DeploymentID("Denoiser", "app")


class Queue:
    """A replica as the router sees it: how many calls it holds, told after a while."""

    is_cross_language = False

    def __init__(self, name: str, max_ongoing_requests: int, draw: random.Random) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.max_ongoing_requests = max_ongoing_requests
        self.num_calls = 0
        self._draw = draw

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(self._draw.random() * 0.005)
        return self.num_calls


class Caller:
    """A process that calls the denoisers: what Serve does around a router, with calls that end when told to."""

    def __init__(self, num_replicas: int = 4, max_ongoing_requests: int = 100, seed: int = 0) -> None:
        draw = random.Random(seed)
        self.router = FewestRowsRouter(
            DEPLOYMENT,
            DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            initial_backoff_s=0.001,
            max_backoff_s=0.005,
        )
        self.router.initialize_state()
        self.queues = [Queue(f"replica{i}", max_ongoing_requests, draw) for i in range(num_replicas)]
        self.router.update_replicas(cast(list[RunningReplica], self.queues))
        self._ids = iter(range(10**6))

    def pending(self, num_rows: int = 1, request_id: str | None = None) -> PendingRequest:
        request_id = request_id or f"request{next(self._ids)}"
        metadata = RequestMetadata(request_id=request_id, internal_request_id=request_id)
        return PendingRequest(args=[], kwargs={"num_rows": num_rows}, metadata=metadata)

    async def send(self, pending: PendingRequest) -> Queue:
        """Until a replica has taken the call; it may be turned away before."""
        is_retry = False
        while True:
            replica = await self.router._choose_replica_for_request(pending, is_retry=is_retry)
            queue = cast(Queue, replica)
            self.router.on_send_request(queue.replica_id)
            await asyncio.sleep(0.001)
            if queue.num_calls < queue.max_ongoing_requests:
                queue.num_calls += 1
                self.router.on_new_queue_len_info(queue.replica_id, queue.num_calls)
                return queue
            self.router.on_new_queue_len_info(queue.replica_id, queue.num_calls)
            self.router.on_request_completed(queue.replica_id, pending.metadata.internal_request_id)
            is_retry = True

    async def burst(self, pending: list[PendingRequest]) -> list[Queue]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*(self.send(one) for one in pending))

    def end(self, pending: PendingRequest, queue: Queue) -> None:
        queue.num_calls -= 1
        self.router.on_request_completed(queue.replica_id, pending.metadata.internal_request_id)
        self.router.decrement_queue_len_cache(queue.replica_id)

    @property
    def counts(self) -> dict[str, int]:
        """All that the router has on its books."""
        books = ("_rows", "_calls", "_chosen", "_foreign")
        return {name: len(getattr(self.router, name)) for name in books}


NOTHING = {"_rows": 0, "_calls": 0, "_chosen": 0, "_foreign": 0}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("seed", range(10))
def test_bursts_spread_evenly_also_the_first_and_the_counts_return_to_zero(seed: int) -> None:
    async def test() -> None:
        caller = Caller(seed=seed)
        for _ in range(3):
            pending = [caller.pending() for _ in range(16)]
            queues = await caller.burst(pending)
            assert sorted(Counter(queue.replica_id for queue in queues).values()) == [4, 4, 4, 4]
            for one, queue in zip(pending, queues, strict=True):
                caller.end(one, queue)
            assert caller.counts == NOTHING

    run(test())


@pytest.mark.parametrize("seed", range(10))
def test_calls_that_share_an_id_are_all_sent_and_the_counts_return_to_zero(seed: int) -> None:
    async def test() -> None:
        caller = Caller(seed=seed)
        for burst in range(3):
            pending = [caller.pending(request_id=f"burst{burst}") for _ in range(16)]
            queues = await caller.burst(pending)
            assert max(Counter(queue.replica_id for queue in queues).values()) <= 6
            for one, queue in zip(pending, queues, strict=True):
                caller.end(one, queue)
            assert caller.counts == NOTHING

    run(test())


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_spread_and_not_calls(seed: int) -> None:
    async def test() -> None:
        caller = Caller(seed=seed)
        await asyncio.sleep(0.02)  # the replicas have told their queues
        pending = [caller.pending(num_rows=rows) for rows in [2, 2, 1, 1, 1, 1, 2, 2, 1, 1, 1, 1]]
        queues = await caller.burst(pending)
        rows: Counter[ReplicaID] = Counter()
        for one, queue in zip(pending, queues, strict=True):
            rows[queue.replica_id] += one.kwargs["num_rows"]
        assert list(rows.values()) == [4, 4, 4, 4]
        for one, queue in zip(pending, queues, strict=True):
            caller.end(one, queue)
        assert caller.counts == NOTHING

    run(test())


def test_calls_that_are_cancelled_before_they_are_sent_are_taken_back() -> None:
    async def test() -> None:
        caller = Caller(num_replicas=2, max_ongoing_requests=1)
        pending = [caller.pending() for _ in range(2)]
        queues = await caller.burst(pending)
        waiting = [asyncio.ensure_future(caller.send(caller.pending(num_rows=2))) for _ in range(6)]
        await asyncio.sleep(0.05)  # they have been chosen for again and again
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for one, queue in zip(pending, queues, strict=True):
            caller.end(one, queue)
        await asyncio.sleep(0)
        assert caller.counts == NOTHING

    run(test())


def test_calls_that_are_turned_away_go_where_there_is_room() -> None:
    async def test() -> None:
        caller = Caller(num_replicas=2, max_ongoing_requests=4)
        await asyncio.sleep(0.02)
        full, free = caller.queues
        full.num_calls = 4  # of another caller, since the router last heard
        pending = [caller.pending() for _ in range(4)]
        queues = await caller.burst(pending)
        assert queues == [free] * 4
        for one, queue in zip(pending, queues, strict=True):
            caller.end(one, queue)
        assert caller.router._rows == {} and caller.router._calls == {} and caller.router._chosen == {}

    run(test())


def test_calls_wait_while_every_replica_is_full_and_are_sent_as_others_end() -> None:
    async def test() -> None:
        caller = Caller(num_replicas=2, max_ongoing_requests=2)

        async def call(num_rows: int) -> None:
            pending = caller.pending(num_rows)
            queue = await caller.send(pending)
            await asyncio.sleep(0.005)
            caller.end(pending, queue)

        async with asyncio.timeout(10):
            await asyncio.gather(*(call(1 + i % 2) for i in range(20)))
        assert caller.counts == NOTHING

    run(test())


def test_what_others_have_at_a_replica_counts_while_we_hear_of_it() -> None:
    async def test() -> None:
        caller = Caller(num_replicas=2)
        await asyncio.sleep(0.02)
        one, other = caller.queues
        one.num_calls = 6  # of another caller
        first = [caller.pending() for _ in range(2)]
        queues = await caller.burst(first)
        assert set(queues) == {one, other}
        second = [caller.pending() for _ in range(6)]
        later = await caller.burst(second)
        assert later == [other] * 6, "until the loads are even"
        for pending, queue in zip([*first, *second], [*queues, *later], strict=True):
            caller.end(pending, queue)
        assert caller.counts == NOTHING
        # The other caller is done as well, and we have not asked since.
        one.num_calls = 0
        third = [caller.pending() for _ in range(8)]
        assert sorted(Counter(q.replica_id for q in await caller.burst(third)).values()) == [4, 4]

    run(test())
