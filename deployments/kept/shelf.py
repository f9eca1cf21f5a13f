"""Rollouts under their ids: which run, which are kept and for how long, and which are gone.

Pure bookkeeping on one event loop: it knows no calls and no refs, and puts an end to nothing by itself.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from schemas.errors import Problem

MAX_KEPT = 1000
"""Settled rollouts, so that many small ones do not fill the archive's own memory."""
MAX_GONE = 10_000
"""Ids that are told from those that never were."""


class HasId(Protocol):
    """What is put here."""

    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=HasId)


class Shelf(Generic[R]):
    """Running rollouts stay until they settle; settled ones for a term, and while their bytes fit, the newest last."""

    def __init__(self, keep_s: float, keep_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._keep_bytes, self._clock = keep_s, keep_bytes, clock
        self._running: dict[str, R] = {}
        self._settled: OrderedDict[str, tuple[R, float, int]] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self.kept_bytes = 0
        """Of the settled ones."""

    @property
    def running(self) -> list[R]:
        return list(self._running.values())

    @property
    def num_kept(self) -> int:
        return len(self._settled)

    def get(self, id: str) -> R | None:
        """The rollout under an id; None where there is none."""
        self.sweep()
        if id in self._running:
            return self._running[id]
        return self._settled[id][0] if id in self._settled else None

    def find(self, id: str) -> R:
        """The rollout under an id. Raises LookupError (a Problem)."""
        rollout = self.get(id)
        if rollout is not None:
            return rollout
        raise (gone(id) if id in self._gone else _not_found(id)).exception()

    def put(self, rollout: R) -> None:
        """A rollout has begun; a settled one under its id makes way."""
        self._drop(rollout.id)
        self._gone.pop(rollout.id, None)
        self._running[rollout.id] = rollout

    def settle(self, rollout: R, num_bytes: int) -> None:
        """A rollout is kept from now on, unless it was forgotten meanwhile."""
        if self._running.get(rollout.id) is not rollout:
            return
        del self._running[rollout.id]
        self._settled[rollout.id] = (rollout, self._clock() + self._keep_s, num_bytes)
        self.kept_bytes += num_bytes
        self.sweep()

    def forget(self, rollout: R) -> None:
        """From now on the rollout is gone."""
        if self.get(rollout.id) is rollout:
            self._forget(rollout.id)

    def sweep(self) -> None:
        """Forget what was kept for its term, and the oldest of what is too much."""
        now = self._clock()
        while self._settled:
            id, (_, end, _) = next(iter(self._settled.items()))
            if end > now and self.kept_bytes <= self._keep_bytes and len(self._settled) <= MAX_KEPT:
                return
            self._forget(id)

    def _forget(self, id: str) -> None:
        self._drop(id)
        self._gone[id] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _drop(self, id: str) -> None:
        self._running.pop(id, None)
        if id in self._settled:
            _, _, num_bytes = self._settled.pop(id)
            self.kept_bytes -= num_bytes


def _not_found(id: str) -> Problem:
    return Problem(
        code="not_found",
        field="request_id",
        value=id,
        rule="names no rollout that is known here",
        remedy="use the request_id of a rollout's answer; an archive that was started anew has forgotten all",
    )


def gone(id: str) -> Problem:
    """That what an id named is not there any more."""
    return Problem(
        code="gone",
        field="request_id",
        value=id,
        rule="names a rollout that is not kept any more (http.keep_s, http.keep_bytes, or it was deleted)",
        remedy="send the request again, with the seed of its answer to have the same samples",
    )
