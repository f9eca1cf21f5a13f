"""Bounds the bytes that a client has in flight: charged when a sample is sent, freed when it is handed over.

Finished samples that nobody has collected count, since they fill the object store too. A group that somebody waits
for is never held back by those: with nothing else running it may exceed the bound, so that waiting always ends.
Confined to one event loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable


class ByteBudget:
    """First come, first served, by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """Of samples that are running or wait to be collected."""
        self.num_running = 0
        self._waiting: deque[tuple[int, Callable[[], bool], asyncio.Future[None]]] = deque()

    async def enter(self, num_bytes: int, wanted: Callable[[], bool]) -> None:
        """Wait until ``num_bytes`` fit; ``wanted`` tells whether somebody waits for them."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, wanted, granted))
        self.review()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.stopped()
                self.leave(num_bytes)
            raise

    def stopped(self) -> None:
        """A sample that had entered runs no longer; its bytes may still be held."""
        self.num_running -= 1
        self.review()

    def leave(self, num_bytes: int) -> None:
        """Bytes were handed over or given up."""
        self.held_bytes -= num_bytes
        self.review()

    def review(self) -> None:
        """Let in whoever may enter now. To be called when somebody starts to wait for a group."""
        kept: deque[tuple[int, Callable[[], bool], asyncio.Future[None]]] = deque()
        blocked = False
        for num_bytes, wanted, granted in self._waiting:
            if granted.done():
                continue
            fits = not blocked and self.held_bytes + num_bytes <= self.max_bytes
            if fits or (self.num_running == 0 and wanted()):
                self.held_bytes += num_bytes
                self.num_running += 1
                granted.set_result(None)
            else:
                blocked = True
                kept.append((num_bytes, wanted, granted))
        self._waiting = kept
