"""The control record in the weight store: changed in one place, and waited for.

Every record is validated as a whole, so that no replica ever gets one that it cannot read. Confined to one event loop.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from schemas.control import Control


class ControlRecord:
    """The record as it is now."""

    def __init__(self) -> None:
        # From the clock, so that a replica that followed an earlier store takes this one's records for newer.
        self.now = Control(revision=int(time.time() * 1000))
        self._changed = asyncio.Condition()

    async def change(self, **changes: Any) -> int:
        """Replace fields; returns the revision from which on they hold."""
        async with self._changed:
            fields = {**self.now.model_dump(), **changes, "revision": self.now.revision + 1}
            self.now = Control.model_validate(fields)
            self._changed.notify_all()
            return self.now.revision

    async def wait(self, holds: Callable[[Control], bool], timeout_s: float) -> Control:
        """The record once ``holds`` is true of it. Raises TimeoutError when it is not by then."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: holds(self.now))
        return self.now
