"""The budget of bytes in flight, alone on an event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.budget import ByteBudget


def never() -> bool:
    return False


def always() -> bool:
    return True


class Sample:
    """One that enters, runs until it is told to stop, and is held until it is collected."""

    def __init__(self, budget: ByteBudget, num_bytes: int, wanted: Callable[[], bool] = never) -> None:
        self.budget, self.num_bytes = budget, num_bytes
        self.task = asyncio.ensure_future(budget.enter(num_bytes, wanted))

    @property
    def entered(self) -> bool:
        return self.task.done() and not self.task.cancelled()

    def stop(self) -> None:
        self.budget.stopped()

    def collect(self) -> None:
        self.budget.leave(self.num_bytes)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def entered(samples: list[Sample]) -> list[bool]:
    return [sample.entered for sample in samples]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_as_many_enter_as_fit_and_others_as_bytes_are_collected() -> None:
    async def test() -> None:
        budget = ByteBudget(100)
        samples = [Sample(budget, 40) for _ in range(4)]
        await settle()
        assert entered(samples) == [True, True, False, False]
        assert (budget.held_bytes, budget.num_running) == (80, 2)
        samples[0].stop()
        await settle()
        assert entered(samples) == [True, True, False, False], "done, and not collected"
        samples[0].collect()
        await settle()
        assert entered(samples) == [True, True, True, False]
        assert budget.held_bytes == 80

    run(test)


def test_a_small_one_does_not_overtake_a_large_one() -> None:
    async def test() -> None:
        budget = ByteBudget(100)
        samples = [Sample(budget, 60), Sample(budget, 60), Sample(budget, 10)]
        await settle()
        assert entered(samples) == [True, False, False]
        samples[0].stop()
        samples[0].collect()
        await settle()
        assert entered(samples) == [True, True, True]

    run(test)


def test_who_is_waited_for_enters_past_what_nobody_collects_one_at_a_time() -> None:
    async def test() -> None:
        budget = ByteBudget(100)
        held = [Sample(budget, 50), Sample(budget, 50)]
        behind = Sample(budget, 50)
        waited_for = [Sample(budget, 50, always), Sample(budget, 50, always)]
        await settle()
        assert not any(entered([behind, *waited_for])), "the held ones still run"
        for sample in held:
            sample.stop()
        await settle()
        assert entered([behind, *waited_for]) == [False, True, False]
        waited_for[0].stop()
        waited_for[0].collect()
        await settle()
        assert entered([behind, *waited_for]) == [False, True, True]
        assert budget.held_bytes == 150

    run(test)


def test_it_is_looked_at_again_when_somebody_begins_to_wait() -> None:
    async def test() -> None:
        budget = ByteBudget(50)
        wanted = False
        held = Sample(budget, 50)
        waiting = Sample(budget, 50, lambda: wanted)
        await settle()
        held.stop()
        await settle()
        assert not waiting.entered
        wanted = True
        budget.review()
        await settle()
        assert waiting.entered

    run(test)


def test_who_is_cancelled_while_waiting_leaves_no_trace() -> None:
    async def test() -> None:
        budget = ByteBudget(100)
        held = Sample(budget, 100)
        gone, next_one = Sample(budget, 100), Sample(budget, 30)
        await settle()
        gone.task.cancel()
        await settle()
        held.stop()
        held.collect()
        await settle()
        assert gone.task.cancelled() and next_one.entered
        assert (budget.held_bytes, budget.num_running) == (30, 1)

    run(test)


def test_who_is_cancelled_in_the_moment_of_entering_gives_the_place_back() -> None:
    async def test() -> None:
        budget = ByteBudget(100)
        held = Sample(budget, 100)
        gone, next_one = Sample(budget, 100), Sample(budget, 100)
        await settle()
        held.stop()
        held.collect()  # lets the next one in, which has not yet been told
        gone.task.cancel()
        await settle()
        assert gone.task.cancelled() and next_one.entered
        assert (budget.held_bytes, budget.num_running) == (100, 1)

    run(test)


def test_all_is_free_when_all_have_left() -> None:
    async def test() -> None:
        budget = ByteBudget(100)
        most = 0

        async def one(num_bytes: int) -> None:
            nonlocal most
            await budget.enter(num_bytes, never)
            most = max(most, budget.held_bytes)
            await asyncio.sleep(0)
            budget.stopped()
            await asyncio.sleep(0)
            budget.leave(num_bytes)

        await asyncio.gather(*(one(10 + 7 * i % 60) for i in range(50)))
        assert 60 <= most <= 100
        assert (budget.held_bytes, budget.num_running) == (0, 0)

    run(test)
