"""Waiting for replicas: until all have settled, without those that fell silent, and never without end."""

import asyncio
from typing import Any

import pytest

from deployments.weights.roster import Roster
from schemas.control import ReplicaState
from tests.engines import Clock


def state(replica_id: str, version: int, **more: Any) -> ReplicaState:
    return ReplicaState(replica_id=replica_id, version=version, weights_digest="", run="running", **more)


def at_least(version: int) -> Any:
    return lambda replica: replica.version >= version


def test_all_replicas_are_waited_for_and_the_states_are_their_last() -> None:
    async def test() -> None:
        roster = Roster(silence_s=5, clock=(clock := Clock()))
        clock.now += 5
        for replica in ("a", "b"):
            await roster.note(state(replica, 0))
        waiting = asyncio.ensure_future(roster.wait(at_least(1), 5))
        await roster.note(state("a", 1))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await roster.note(state("b", 2))
        assert {s.replica_id: s.version for s in await waiting} == {"a": 1, "b": 2}

    asyncio.run(test())


def test_a_replica_that_falls_silent_or_leaves_is_not_waited_for() -> None:
    async def test() -> None:
        roster = Roster(silence_s=0.1)
        await roster.note(state("dies", 0))
        await roster.note(state("lives", 1))
        waiting = asyncio.ensure_future(roster.wait(at_least(1), 5))
        for _ in range(8):
            await asyncio.sleep(0.03)
            await roster.note(state("lives", 1))
        assert [s.replica_id for s in await waiting] == ["lives"]
        await roster.note(state("goes", 0))
        waiting = asyncio.ensure_future(roster.wait(at_least(1), 5))
        await asyncio.sleep(0)
        await roster.leave("goes")
        await asyncio.wait_for(waiting, 1)

    asyncio.run(test())


def test_a_word_that_was_overtaken_takes_nothing_back() -> None:
    async def test() -> None:
        roster = Roster(silence_s=5)
        await roster.note(state("a", 2, word=7))
        await roster.note(state("a", 1, word=6))
        assert [s.version for s in roster.states()] == [2]
        await roster.note(state("a", 3, word=8))
        assert [s.version for s in roster.states()] == [3]

    asyncio.run(test())


def test_no_wait_ends_before_every_replica_has_had_time_to_be_heard_of() -> None:
    async def test() -> None:
        roster = Roster(silence_s=0.2)
        waiting = asyncio.ensure_future(roster.wait(at_least(1), 5))
        await asyncio.sleep(0.1)
        assert not waiting.done() and not roster.is_complete
        await roster.note(state("was here", 0))
        await asyncio.sleep(0.15)
        assert not waiting.done() and roster.is_complete
        await roster.note(state("was here", 1))
        assert [s.version for s in await waiting] == [1]
        roster.start(0.2)
        assert roster.states() == [] and not roster.is_complete

    asyncio.run(test())


def test_the_wait_has_an_end() -> None:
    async def test() -> None:
        roster = Roster(silence_s=50)
        await roster.note(state("slow", 0))
        with pytest.raises(TimeoutError):
            await roster.wait(at_least(1), 0.05)

    asyncio.run(test())
