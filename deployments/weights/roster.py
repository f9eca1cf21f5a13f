"""Which replicas there are, and waiting until all of them have come to something.

A replica is on the roster while it is heard of; one that falls silent is taken for dead, and nobody waits for it. Its
successor comes with the newest weights or not at all. For the time of one silence after a start, replicas may be there
that have not been heard of yet, so no wait ends before. Confined to one event loop.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from schemas.control import ReplicaState


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heard:
    state: ReplicaState
    at: float


class Roster:
    """The last word of every replica."""

    def __init__(self, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._news = asyncio.Condition()
        self.start(silence_s)

    def start(self, silence_s: float) -> None:
        """Begin anew, with nobody on the roster."""
        self.silence_s = silence_s
        """Time after which a replica is taken for dead."""
        self._heard: dict[str, _Heard] = {}
        self._complete_at = self._clock() + silence_s

    async def note(self, state: ReplicaState) -> None:
        """A replica said how it is. A word that an earlier one has overtaken only tells that it lives."""
        async with self._news:
            last = self._heard.get(state.replica_id)
            if last is not None and last.state.word > state.word:
                state = last.state
            self._heard[state.replica_id] = _Heard(state=state, at=self._clock())
            self._news.notify_all()

    async def leave(self, replica_id: str) -> None:
        """A replica is taken down, or not to be trusted."""
        async with self._news:
            self._heard.pop(replica_id, None)
            self._news.notify_all()

    def states(self) -> list[ReplicaState]:
        """Of those that were heard of lately."""
        horizon = self._clock() - self.silence_s
        self._heard = {replica: heard for replica, heard in self._heard.items() if heard.at >= horizon}
        return [heard.state for heard in self._heard.values()]

    @property
    def is_complete(self) -> bool:
        """Whether every replica that lives has had time to be heard of."""
        return self._clock() >= self._complete_at

    async def wait(self, settled: Callable[[ReplicaState], bool], timeout_s: float) -> list[ReplicaState]:
        """The states of all replicas once each is ``settled``. Raises TimeoutError when that takes too long."""
        end = self._clock() + timeout_s
        async with self._news:
            while not (self.is_complete and all(settled(state) for state in self.states())):
                left = end - self._clock()
                if left <= 0:
                    raise TimeoutError
                start_s = self._complete_at - self._clock()
                try:
                    # No longer than a silence or the start, for these end without news.
                    pause_s = min(left, self.silence_s if start_s <= 0 else start_s)
                    await asyncio.wait_for(self._news.wait(), pause_s)
                except TimeoutError:
                    continue
        return self.states()
