"""Encoding beside the event loop: once for all who ask, kept within bounds, and not begun for nobody."""

import asyncio
import threading
import time

import pytest

from deployments.http.encoder import NUM_THREADS, Encoder


def test_a_file_is_made_once_however_many_ask_and_the_loop_goes_on_meanwhile() -> None:
    made = []

    def make() -> bytes:
        time.sleep(0.2)
        made.append(1)
        return b"file"

    async def ask() -> None:
        encoder = Encoder(100)
        calls = [asyncio.create_task(encoder.encoded(("a",), make)) for _ in range(5)]
        turns = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 5 and len({call.result().etag for call in calls}) == 1
        await encoder.encoded(("a",), make)
        assert len(made) == 1

    asyncio.run(ask())


def test_the_longest_unused_files_make_way() -> None:
    async def ask() -> None:
        encoder, made = Encoder(10), []

        async def get(name: str, size: int) -> None:
            def make() -> bytes:
                made.append(name)
                return b"x" * size

            await encoder.encoded((name,), make)

        for name, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("huge", 11), ("a", 4), ("b", 4)):
            await get(name, size)
            assert encoder.kept_bytes <= 10
        assert made == ["a", "b", "c", "huge", "b"]

    asyncio.run(ask())


def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    busy, made = threading.Event(), []

    async def ask() -> None:
        encoder = Encoder(100)
        holding = [
            asyncio.create_task(encoder.encoded((index,), lambda: bytes(busy.wait(10))))
            for index in range(NUM_THREADS)
        ]
        waiting = asyncio.create_task(encoder.encoded(("late",), lambda: made.append(1) or b""))  # type: ignore[func-returns-value]
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        busy.set()
        await asyncio.gather(*holding)
        await encoder.encoded(("last",), lambda: b"last")
        assert not made

    asyncio.run(ask())


def test_a_failure_is_told_to_all_who_ask_and_not_kept() -> None:
    def fail() -> bytes:
        raise ValueError("frames must have even sides")

    async def ask() -> None:
        encoder = Encoder(100)
        for answer in await asyncio.gather(
            *(encoder.encoded(("a",), fail) for _ in range(3)), return_exceptions=True
        ):
            assert isinstance(answer, ValueError)
        with pytest.raises(ValueError):
            await encoder.encoded(("a",), fail)
        assert (await encoder.encoded(("a",), lambda: b"ok")).content == b"ok"

    asyncio.run(ask())
