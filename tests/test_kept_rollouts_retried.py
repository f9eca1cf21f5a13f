"""Callers of the archive who cross each other: a retry overtakes the hang-up, a deletion the wait."""

import asyncio
from collections.abc import Awaitable

import pytest

from deployments.kept import rollouts as kept_rollouts
from deployments.kept.api import Submitted
from deployments.kept.rollouts import KeptRollouts
from tests.kept import BALL, FakeClient, hang_up, refused, run, waiting


@pytest.mark.parametrize("how", ["submit", "find"])
def test_a_retry_that_comes_before_the_hang_up_has_the_rollout(how: str) -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        first = await waiting(archive, await archive.submit(BALL))
        again: Awaitable[Submitted] = archive.submit(BALL) if how == "submit" else archive.find("ball")
        retry = await again
        await hang_up(first)
        assert not client.cancelled
        second = await waiting(archive, retry)
        client.settle()
        assert (await second)["id"] == "ball" and len(client.groups) == 1

    run(script)


def test_the_retry_ends_it_when_it_hangs_up_too() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        first = await waiting(archive, await archive.submit(BALL))
        retry = await archive.submit(BALL)
        await hang_up(first)
        await hang_up(await waiting(archive, retry))
        assert client.cancelled == client.groups

    run(script)


def test_who_asks_for_a_part_takes_nobodys_place() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        submitted = await archive.submit(BALL)
        part = asyncio.create_task(archive.wait("ball"))
        await asyncio.sleep(0)
        await hang_up(part)
        assert not client.cancelled
        await hang_up(await waiting(archive, submitted))
        assert client.cancelled == client.groups

    run(script)


def test_a_retry_that_never_waits_is_not_expected_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rollouts, "UNATTENDED_S", 0.05)
    monkeypatch.setattr(kept_rollouts, "TEND_S", 0.01)

    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        first = await waiting(archive, await archive.submit(BALL))
        await archive.submit(BALL)
        await hang_up(first)
        assert not client.cancelled
        await asyncio.sleep(0.3)
        assert client.cancelled == client.groups
        another = await waiting(archive, await archive.submit(BALL))
        await archive.submit(BALL)
        await asyncio.sleep(0.1)
        await hang_up(another)
        assert client.cancelled == client.groups, "at once, since nobody was told of it lately"

    run(script)


def test_another_rollout_under_the_id_is_not_the_one_that_was_submitted() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        mine = await archive.submit(BALL)
        await archive.cancel("ball")
        others = await archive.submit({**BALL, "prompt": "another"})
        assert (await refused(archive.wait("ball", mine["group_id"]))).code == "gone"
        assert (await refused(archive.progress("ball", mine["group_id"], None))).code == "gone"
        somebody = await waiting(archive, others)
        client.settle()
        assert (await somebody)["request"]["prompt"] == "another"
        assert (await refused(archive.wait("ball", mine["group_id"]))).code == "gone"

    run(script)
