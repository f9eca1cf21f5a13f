"""Sends each call to the replica with the fewest rows outstanding, so that a burst spreads evenly.

A group is a burst: its calls arrive within a millisecond. Serve's own router reads queue lengths before the burst's
earlier calls are counted and gives one replica up to 2.4 times its share; the whole group then waits for it. Here a
call is counted when its replica is chosen. Other callers' calls are seen through the replicas' own queue lengths.

Ray ships this module by value into every process that calls the denoiser, so it imports ray and the standard library
only.
"""

import random
from collections import defaultdict, deque

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

NUM_ROWS_ARGUMENT = "num_rows"
"""Keyword argument of a call that says how many rows of a forward pass it takes; 1 where it is not given."""


class FewestRowsRouter(RequestRouter):
    """Chooses by rows that this process has outstanding at a replica, plus calls that other processes have there."""

    def initialize_state(self, **_: object) -> None:
        """Called once by Serve, before any request."""
        self._rows: dict[ReplicaID, int] = defaultdict(int)
        self._calls: dict[tuple[ReplicaID, str], deque[int]] = defaultdict(deque)
        self._chosen: dict[object, tuple[ReplicaID, str]] = {}
        self._foreign: dict[ReplicaID, int] = defaultdict(int)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one replica with the fewest rows outstanding, ties broken at random."""
        if pending_request is not None:
            self._withdraw(pending_request.future)
        if not candidate_replicas:
            return []
        best = min(candidate_replicas, key=lambda replica: (self._load(replica.replica_id), random.random()))
        if pending_request is not None:
            self._count(best.replica_id, pending_request)
        return [[best]]

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
        return self._rows[replica_id] + self._foreign[replica_id]

    def _count(self, replica_id: ReplicaID, pending: PendingRequest) -> None:
        """Count the call at its replica now; a call that is cancelled before it is sent is taken back."""
        rows = int(pending.kwargs.get(NUM_ROWS_ARGUMENT, 1))
        call = (replica_id, pending.metadata.internal_request_id)
        self._rows[replica_id] += rows
        self._calls[call].append(rows)
        self._chosen[pending.future] = call
        pending.future.add_done_callback(self._sent_or_cancelled)

    def _sent_or_cancelled(self, future: object) -> None:
        if future.cancelled():  # type: ignore[attr-defined]
            self._withdraw(future)
        else:
            self._chosen.pop(future, None)

    def _withdraw(self, future: object) -> None:
        """Forget a choice that did not lead to a call."""
        call = self._chosen.pop(future, None)
        if call is not None:
            self._discount(*call)

    def _discount(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        calls = self._calls.get((replica_id, internal_request_id))
        if not calls:
            return
        self._rows[replica_id] -= calls.popleft()
        if not calls:
            del self._calls[replica_id, internal_request_id]
            if self._rows[replica_id] == 0:
                del self._rows[replica_id]
