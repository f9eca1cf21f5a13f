"""Waits for what another thread, task or process brings about: each has an end, and says so when it comes to it."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""More than anything here takes on a busy machine: who waits longer waits for what will not come."""


def until(holds: Callable[[], object]) -> None:
    """Wait on this thread until ``holds()``."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"it did not come to be within {PATIENCE_S:g} s"
        time.sleep(0.01)


async def soon(holds: Callable[[], object]) -> None:
    """Wait on this event loop until ``holds()``."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"it did not come to be within {PATIENCE_S:g} s"
        await asyncio.sleep(0.001)
