"""What happens to an engine between two steps or between two samples: weights change, sampling halts.

Work is handed in from any thread and done on the engine's own, so that it never meets a forward pass. It waits for its
boundary: "step" is the next turn of the loop, whatever samples are on their way; "sample" is when all that run have
ended, and until then no other starts. It is done in the order in which it was handed in, unless its future is cancelled
before. It knows no weights and no samples.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

Boundary = Literal["sample", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Crossing:
    work: Callable[[], None]
    boundary: Boundary
    admitted_before: int
    """Samples that were submitted as this number or later wait until the work is done."""
    done: Future[None] = field(default_factory=Future)


class Boundaries:
    """The queue of such work, in order, and whether sampling is halted. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._crossings: deque[_Crossing] = deque()
        self._halted = False

    @property
    def halted(self) -> bool:
        """Whether no sample may move."""
        return self._halted

    @property
    def admitted_before(self) -> int | None:
        """While work waits for its boundary: number of submission from which on samples wait for it. None: any may
        start."""
        with self._lock:
            wanted = [crossing for crossing in self._crossings if not crossing.done.cancelled()]
        return min((crossing.admitted_before for crossing in wanted), default=None)

    def at(self, boundary: Boundary, work: Callable[[], None], admitted_before: int) -> Future[None]:
        """Have ``work`` done at the next such boundary; the future gets None, or what the work raised. Until then only
        samples start that were submitted as an earlier number than ``admitted_before``."""
        crossing = _Crossing(work=work, boundary=boundary, admitted_before=admitted_before)
        with self._lock:
            self._crossings.append(crossing)
        return crossing.done

    def halt(self) -> None:
        """Let no sample move from now on; for work at a boundary."""
        self._halted = True

    def resume(self) -> None:
        """Let samples move again."""
        self._halted = False

    def cross(self, *, drained: bool) -> int:
        """On the engine's thread, between steps: do the work whose boundary this is. ``drained``: nothing runs.

        Returns how many pieces of work there were.
        """
        num_done = 0
        while (crossing := self._due(drained)) is not None:
            if not crossing.done.set_running_or_notify_cancel():
                continue
            num_done += 1
            try:
                crossing.work()
            except Exception as error:
                crossing.done.set_exception(error)
            else:
                crossing.done.set_result(None)
        return num_done

    def give_up(self, error: Exception) -> None:
        """No boundary will come any more."""
        with self._lock:
            crossings, self._crossings = list(self._crossings), deque()
        for crossing in crossings:
            if crossing.done.set_running_or_notify_cancel():
                crossing.done.set_exception(error)

    def _due(self, drained: bool) -> _Crossing | None:
        """Take the first crossing if it may be done now; those that were taken back are dropped."""
        with self._lock:
            while self._crossings and self._crossings[0].done.cancelled():
                self._crossings.popleft()
            if self._crossings and (drained or self._crossings[0].boundary == "step"):
                return self._crossings.popleft()
        return None
