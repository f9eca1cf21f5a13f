"""SGLang's weight routes that wait for the whole fleet keep nobody else waiting."""

import asyncio
import threading
from pathlib import Path

import httpx

from schemas.control import ReplicaState
from tests.patience import PATIENCE_S, soon
from tests.sglang_apps import FakeArchive, FakeWeights, app_of

NUM_WAITING = 40
"""More than the threads that asyncio has for all else."""


class NeverDrained(FakeWeights):
    """Samples run on until somebody wakes the fleet."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = threading.Event()
        self.waiting: list[threading.Thread] = []

    def sleep(self) -> list[ReplicaState]:
        self.waiting.append(threading.current_thread())
        assert self.woken.wait(PATIENCE_S)
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
            try:
                await soon(lambda: len(weights.waiting) == NUM_WAITING)
                looks = await asyncio.wait_for(http.post("/get_weights_checksum"), PATIENCE_S)
                assert looks.status_code == 200 and not any(call.done() for call in waiting)
                woken = await asyncio.wait_for(http.post("/resume_memory_occupation"), PATIENCE_S)
                assert woken.json()["sleeping"] is False
            finally:
                weights.woken.set()
            answers = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
            assert all(answer.json()["sleeping"] for answer in answers)

    asyncio.run(script())
