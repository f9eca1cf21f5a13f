"""Deployment of the one place where callers and denoisers hear of each other, beside the calls themselves.

Ray lets a call run on when its caller dies. So a client holds a lease and renews it here, and every denoiser asks here
which of its samples' leases still stand. The same exchange carries progress back. None of it needs a request slot of
a denoiser. The board holds no results: it may be lost and started anew, and a lease that a new board has not heard of
is given one full term.
"""

import time
from collections.abc import Callable

Progress = dict[str, tuple[int, int]]
"""Steps done and steps in all, by sample id."""


class LeaseBoard:
    """Leases of clients, and what denoisers last said of their samples."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._ends: dict[str, float] = {}
        self._progress: dict[str, tuple[float, dict[str, Progress]]] = {}

    async def renew(self, lease_id: str) -> Progress:
        """Extend the caller's lease by one term from now; returns the progress of its samples."""
        self._forget()
        self._ends[lease_id] = self._clock() + self._lease_s
        progress: Progress = {}
        for _, by_lease in self._progress.values():
            progress |= by_lease.get(lease_id, {})
        return progress

    async def release(self, lease_id: str) -> None:
        """End a lease at once: its samples are dropped at the denoisers' next pulse."""
        self._ends[lease_id] = self._clock()

    async def pulse(self, replica_id: str, held: dict[str, Progress]) -> dict[str, float]:
        """A denoiser says what it holds, by lease; returns the seconds left of each of these leases."""
        now = self._clock()
        self._progress[replica_id] = (now, held)
        return {lease: self._ends.setdefault(lease, now + self._lease_s) - now for lease in held}

    async def leases(self) -> dict[str, float]:
        """Seconds left of every lease that the board remembers."""
        now = self._clock()
        return {lease: end - now for lease, end in self._ends.items()}

    def _forget(self) -> None:
        """Drop leases that ended and replicas that fell silent more than a term ago, so that neither piles up."""
        horizon = self._clock() - self._lease_s
        self._ends = {lease: end for lease, end in self._ends.items() if end > horizon}
        self._progress = {replica: entry for replica, entry in self._progress.items() if entry[0] > horizon}
