"""asyncio's TaskGroup, which on Python 3.11 leaves its errors in a cycle with their frames, and so with all that these hold."""

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """The same, and what a failed or cancelled task held is freed when its error is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
