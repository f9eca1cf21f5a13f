"""Sends each call to the replica with the fewest rows outstanding, so that a burst spreads evenly.

A group is a burst: its calls arrive within a millisecond. Serve's own router reads queue lengths before the burst's
earlier calls are counted and gives one replica up to 2.4 times its share; the whole group then waits for it. Here a
call is counted when its replica is chosen. Other callers' calls are seen through the replicas' own queue lengths.

Ray ships this module by value into every process that calls the denoiser, so it imports ray and the standard library
only.
"""

import asyncio
import random
from collections import defaultdict, deque
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

NUM_ROWS_ARGUMENT = "num_rows"
"""Keyword argument of a call that says how many rows of a forward pass it takes; 1 where it is not given."""


class FewestRowsRouter(FIFOMixin, RequestRouter):
    """Chooses by rows that this process has outstanding at a replica, plus calls that other processes have there."""

    def initialize_state(self, **_: object) -> None:
        """Called once by Serve, before any request."""
        self._rows: dict[ReplicaID, int] = defaultdict(int)
        self._calls: dict[tuple[ReplicaID, str], deque[int]] = defaultdict(deque)
        self._chosen: dict[object, tuple[ReplicaID, str]] = {}
        self._foreign: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one replica with the fewest rows outstanding, ties broken at random; a full one only if all are."""
        if pending_request is not None:
            # Without it, Serve asks again and again without a pause while the chosen replica is full.
            pending_request.routing_context.should_backoff = True
            self._withdraw(pending_request.future)
        candidates = self.select_available_replicas(candidate_replicas) or candidate_replicas
        if not candidates:
            return []
        best = min(candidates, key=lambda replica: (self._load(replica.replica_id), random.random()))
        if pending_request is not None and not pending_request.future.done():
            self._choose(best.replica_id, pending_request)
        return [[best]]

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """The call that a replica was chosen for, by its id; where there is none, Serve takes the one that waits longest.

        It must not be left at the id: calls on behalf of one request share its id, and all but one would never be sent.
        """
        return self._get_pending_request_matching_internal_request_id(request_metadata)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """A replica said how many calls it holds, of all callers."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        own = sum(len(calls) for (replica, _), calls in self._calls.items() if replica == replica_id)
        self._foreign[replica_id] = max(0, num_ongoing_requests - own)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A call ended, in whatever way, or was turned away by the replica."""
        super().on_request_completed(replica_id, internal_request_id)
        self._discount(replica_id, internal_request_id)

    def _load(self, replica_id: ReplicaID) -> int:
        return self._rows.get(replica_id, 0) + self._foreign.get(replica_id, 0)

    def _choose(self, replica_id: ReplicaID, pending: PendingRequest) -> None:
        """Count the call at its replica now; a call that is cancelled before it is sent is taken back."""
        call = (replica_id, pending.metadata.internal_request_id)
        self._count(*call, int(pending.kwargs.get(NUM_ROWS_ARGUMENT, 1)))
        self._chosen[pending.future] = call
        # Once, however often the call is chosen for.
        pending.future.remove_done_callback(self._sent_or_cancelled)
        pending.future.add_done_callback(self._sent_or_cancelled)

    def _sent_or_cancelled(self, future: asyncio.Future[RunningReplica]) -> None:
        if future.cancelled():
            self._withdraw(future)
            return
        chosen = self._chosen.pop(future, None)
        sent_to = future.result().replica_id
        if chosen is not None and chosen[0] != sent_to:
            # Among calls that share an id, one may get the replica that was chosen for another.
            self._count(sent_to, chosen[1], self._discount(*chosen))

    def _withdraw(self, future: object) -> None:
        """Forget a choice that did not lead to a call."""
        call = self._chosen.pop(future, None)
        if call is not None:
            self._discount(*call)

    def _count(self, replica_id: ReplicaID, internal_request_id: str, num_rows: int) -> None:
        self._rows[replica_id] += num_rows
        self._calls[replica_id, internal_request_id].append(num_rows)

    def _discount(self, replica_id: ReplicaID, internal_request_id: str) -> int:
        """Take one call's rows off its replica; returns how many, 0 for a call that was not counted."""
        calls = self._calls.get((replica_id, internal_request_id))
        if not calls:
            return 0
        num_rows = calls.popleft()
        self._rows[replica_id] -= num_rows
        if not calls:
            del self._calls[replica_id, internal_request_id]
        if self._rows[replica_id] == 0:
            # Only our own calls tell of the others': what was last seen there is not known any more.
            del self._rows[replica_id]
            self._foreign.pop(replica_id, None)
        return num_rows
