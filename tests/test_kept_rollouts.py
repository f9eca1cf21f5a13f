"""The archive over a client without a cluster: one rollout per request_id, for those who wait, and no longer."""

import asyncio

import pytest

from deployments.kept import rollouts as kept_rollouts
from deployments.kept.rollouts import KeptRollouts
from schemas.errors import Problem
from tests.kept import BALL, CARD, FakeClient, hang_up, refused, run, waiting

NON_FINITE = Problem(code="non_finite", rule="the state became NaN or infinite")


def test_a_request_id_names_one_rollout_for_the_request_that_it_resolves_to() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        first = await archive.submit(BALL)
        seed = first["request"]["seed"]
        for same in (
            BALL,
            {**BALL, "seed": seed},
            {**BALL, "num_frames": CARD.defaults.num_frames},
            first["request"],
        ):
            assert await archive.submit(same) == first
        for other in ({**BALL, "seed": seed + 1}, {**BALL, "num_samples": 1}, {**BALL, "prompt": "rain"}):
            assert (await refused(archive.submit(other))).code == "conflict"
        assert (await refused(archive.submit({**BALL, "num_frames": 120}))).field == "num_frames"
        everyone = [await waiting(archive, first) for _ in range(3)]
        client.settle()
        answers = await asyncio.gather(*everyone)
        assert len(client.groups) == 1 and all(answer == answers[0] for answer in answers)
        assert await archive.submit(BALL) == first and await archive.find("ball") == first
        await archive.submit({"prompt": "no name"})
        await archive.submit({"prompt": "no name"})
        assert len(client.groups) == 3

    run(script)


def test_a_rollout_that_failed_tells_why_and_does_not_take_its_request_id() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        await archive.submit(BALL)
        client.settle(-1, NON_FINITE, NON_FINITE)
        settled = await archive.wait("ball")
        assert [sample["problem"]["code"] for sample in settled["samples"] if sample["problem"]] == [
            "non_finite"
        ] * 2
        await archive.submit({**BALL, "prompt": "another"})
        client.settle(-1, NON_FINITE, None)
        await archive.wait("ball")
        await archive.submit({**BALL, "prompt": "another", "seed": client.groups[-1].request.seed})
        assert len(client.groups) == 2, "one that failed in part is kept as it is"

    run(script)


def test_the_last_who_hangs_up_ends_it_and_its_id_is_free() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        first = await waiting(archive, await archive.submit(BALL))
        second = await waiting(archive, await archive.find("ball"))
        await hang_up(first)
        assert not client.cancelled
        await hang_up(second)
        assert client.cancelled == client.groups
        assert (await refused(archive.find("ball"))).code == "gone"
        await archive.submit(BALL)
        assert len(client.groups) == 2

    run(script)


def test_who_hangs_up_on_a_settled_one_ends_nothing() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        await archive.submit(BALL)
        client.settle()
        await archive.wait("ball")
        await hang_up(await waiting(archive, await archive.find("ball")))
        assert not client.cancelled and await archive.find("ball")

    run(script)


def test_one_that_nobody_ever_waits_for_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rollouts, "UNATTENDED_S", 0.05)
    monkeypatch.setattr(kept_rollouts, "TEND_S", 0.01)

    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        await archive.submit(BALL)
        somebody = await waiting(archive, await archive.submit({**BALL, "request_id": "attended"}))
        await asyncio.sleep(0.3)
        assert client.cancelled == client.groups[:1]
        client.settle(1)
        assert (await somebody)["id"] == "attended"

    run(script)


def test_deleting_stops_it_and_tells_those_who_wait() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        somebody = await waiting(archive, await archive.submit(BALL))
        await archive.cancel("ball")
        assert client.cancelled == client.groups
        assert {sample["problem"]["code"] for sample in (await somebody)["samples"]} == {"cancelled"}
        assert (await refused(archive.cancel("ball"))).code == "gone"
        assert (await refused(archive.cancel("never"))).code == "not_found"

    run(script)


def test_only_callers_over_http_are_told_that_it_is_full() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        for _ in range(5):
            await archive.submit({"prompt": "a"}, from_http=False)
        for _ in range(2):
            last = await archive.submit({"prompt": "a"})
        assert (await refused(archive.submit({"prompt": "a"}))).code == "queue_full"
        client.settle()
        await archive.wait(last["id"])
        await archive.submit({"prompt": "a"})

    run(script, max_rollouts=2)


def test_progress_is_told_as_soon_as_it_differs() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        group_id = (await archive.submit(BALL))["group_id"]
        seen = await archive.progress("ball", group_id, None)
        assert [sample["steps_done"] for sample in seen] == [0, 0]
        look = asyncio.create_task(archive.progress("ball", group_id, seen))
        await asyncio.sleep(0.02)
        assert not look.done()
        client.groups[0].samples[1].steps_done = 3
        seen = await look
        assert [(sample["steps_done"], sample["state"]) for sample in seen] == [
            (0, "running"),
            (3, "running"),
        ]
        look = asyncio.create_task(archive.progress("ball", group_id, seen))
        await asyncio.sleep(0)
        client.settle(-1, None, NON_FINITE)
        assert [sample["state"] for sample in await look] == ["done", "failed"]

    run(script)


def test_nothing_is_left_to_do_once_all_is_settled() -> None:
    async def script(archive: KeptRollouts, client: FakeClient) -> None:
        for _ in range(3):
            submitted = await archive.submit({"prompt": "a"})
            client.settle()
            await archive.wait(submitted["id"])
        assert await archive.status() == {"running": 0, "waiting": 0, "kept": 3, "kept_bytes": 0}
        await asyncio.sleep(0.01)
        tending = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(tending) == 1

    run(script)
