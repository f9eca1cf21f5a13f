"""SGLang's weight routes that wait for the whole fleet keep nobody else waiting."""

import asyncio
import threading
from pathlib import Path

import httpx

from schemas.control import ReplicaState
from tests.sglang_apps import FakeArchive, FakeWeights, app_of

NUM_WAITING = 40
"""More than the threads that asyncio has for all else."""


class NeverDrained(FakeWeights):
    """Samples run on until somebody wakes the fleet."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = threading.Event()

    def sleep(self) -> list[ReplicaState]:
        self.woken.wait(60)
        return super().sleep()

    def wake(self) -> list[ReplicaState]:
        self.woken.set()
        return super().wake()


def test_a_look_and_a_wake_pass_those_who_wait_for_sleep() -> None:
    async def script() -> None:
        weights = NeverDrained()
        transport = httpx.ASGITransport(app_of(FakeArchive(), weights, Path("/nowhere")))
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
            waiting = [
                asyncio.create_task(http.post("/release_memory_occupation")) for _ in range(NUM_WAITING)
            ]
            await asyncio.sleep(0.1)
            looks = await asyncio.wait_for(http.post("/get_weights_checksum"), 20)
            assert looks.status_code == 200 and not any(call.done() for call in waiting)
            woken = await asyncio.wait_for(http.post("/resume_memory_occupation"), 20)
            assert woken.json()["sleeping"] is False
            await asyncio.gather(*waiting)

    asyncio.run(script())
