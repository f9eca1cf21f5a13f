"""A rollout over HTTP is found by its id until it is deleted, grows old, or nobody waits for it."""

import asyncio

import httpx

from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, ROLLOUTS, problem_of, talk
from tests.patience import soon


def test_the_same_request_id_gives_the_same_rollout_and_another_request_is_refused() -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> None:
        first, again = [(await http.post(ROLLOUTS, json=BALL)).json() for _ in range(2)]
        assert first == again and archive.num_sampled == 1
        other = await http.post(ROLLOUTS, json={**BALL, "prompt": "a blue ball"})
        assert problem_of(other, 409, "conflict")["field"] == "request_id"

    talk(script)


def test_what_is_deleted_or_was_kept_for_long_is_gone_and_what_never_was_is_not_there() -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> None:
        paths = ["", "/conditioning", "/samples/0/trajectory", "/samples/0/media.mp4", "/samples/0/audio.wav"]
        await http.post(ROLLOUTS, json=BALL)
        await http.post(ROLLOUTS, json={**BALL, "request_id": "old"})
        assert (await http.delete(f"{ROLLOUTS}/ball")).status_code == 204
        archive.now += 61
        for id, status, code in (("ball", 410, "gone"), ("old", 410, "gone"), ("never", 404, "not_found")):
            for path in paths:
                problem_of(await http.get(f"{ROLLOUTS}/{id}{path}"), status, code)
            problem_of(await http.delete(f"{ROLLOUTS}/{id}"), status, code)
            events = await http.get(f"{ROLLOUTS}/{id}", headers={"accept": "text/event-stream"})
            problem_of(events, status, code)
        assert (await http.post(ROLLOUTS, json=BALL)).status_code == 200, "its id is free again"

    talk(script)


def test_a_caller_who_hangs_up_waits_no_longer() -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> None:
        for accept in ("application/json", "text/event-stream"):
            request = {**BALL, "prompt": "a late ball"}
            call = asyncio.create_task(http.post(ROLLOUTS, json=request, headers={"accept": accept}))
            await soon(lambda: any(rollout.num_waiting for rollout in archive.shelf.running))
            rollout = archive.shelf.find("ball")
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert rollout.num_waiting == 0 and archive.shelf.get("ball") is None

    talk(script)
