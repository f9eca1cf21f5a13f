"""Encodes media beside the event loop, each file once however many ask for it, and keeps the last ones for those who seek.

What nobody waits for any more and has not begun is not begun. Bounded: two files are made at a time, and the finished
ones by their bytes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from deployments.http.bodies import Encoded

NUM_THREADS = 2

Key = tuple[str | int, ...]


class _Making:
    def __init__(self, future: Future[Encoded]) -> None:
        self.future = future
        self.num_waiting = 0


class Encoder:
    """Confined to one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, Encoded] = OrderedDict()
        self._making: dict[Key, _Making] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="encode")
        self.kept_bytes = 0

    async def encoded(self, key: Key, make: Callable[[], bytes]) -> Encoded:
        """The file under ``key``, made by ``make`` in a thread unless it is here. Raises what ``make`` raises."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = _Making(self._threads.submit(_encoded, make))
        making.num_waiting += 1
        try:
            encoded = await asyncio.shield(asyncio.wrap_future(making.future))
        finally:
            making.num_waiting -= 1
            if making.num_waiting == 0:
                making.future.cancel()
                self._making.pop(key, None)
        self._keep(key, encoded)
        return encoded

    def _keep(self, key: Key, encoded: Encoded) -> None:
        size = len(encoded.content)
        if key in self._kept or size > self._max_bytes:
            return
        self._kept[key] = encoded
        self.kept_bytes += size
        while self.kept_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.kept_bytes -= len(oldest.content)


def _encoded(make: Callable[[], bytes]) -> Encoded:
    content = make()
    return Encoded(content=content, etag=f'"{xxhash.xxh3_128_hexdigest(content)}"')
