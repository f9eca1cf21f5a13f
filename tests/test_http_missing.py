"""Parts of a rollout that are not there: each is said to be missing, by its name."""

import httpx
import pytest

from deployments.http.bodies import ARROW_TYPE
from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, ROLLOUTS, problem_of, talk


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/samples/2/trajectory", 404, "sample"),
        ("/samples/-1/trajectory", 422, "sample"),
        ("/samples/x/media.mp4", 422, "sample"),
        ("/samples/0/frames/9.png", 404, "frame"),
        ("/samples/0/frames/x.png", 422, "frame"),
        ("/samples/99999999999999999999/audio.wav", 404, "sample"),
        ("/nothing", 404, "path"),
    ],
)
def test_a_part_that_is_not_there_is_said_to_be_missing(path: str, status: int, field: str) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> httpx.Response:
        await http.post(ROLLOUTS, json=BALL)
        return await http.get(f"{ROLLOUTS}/ball{path}")

    problem = problem_of(talk(script), status, "not_found" if status == 404 else "invalid_request")
    assert problem["field"] == field


def test_what_was_not_asked_for_is_missing_and_a_failed_sample_tells_why() -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> None:
        await http.post(ROLLOUTS, json={**BALL, "media": False})
        for path in ("media.mp4", "audio.wav", "frames/0.png"):
            answer = await http.get(f"{ROLLOUTS}/ball/samples/0/{path}")
            assert problem_of(answer, 404, "not_found")["field"] == "media"
        no_trajectory = {"prompt": "a ball", "trajectory": False, "request_id": "only-media"}
        summary = (await http.post(ROLLOUTS, json=no_trajectory)).json()
        assert summary["samples"][0]["links"]["trajectory"] is None
        answer = await http.get(f"{ROLLOUTS}/only-media/samples/0/trajectory")
        assert problem_of(answer, 404, "not_found")["field"] == "trajectory"
        answer = await http.get(f"{ROLLOUTS}/only-media", headers={"accept": ARROW_TYPE})
        assert problem_of(answer, 404, "not_found")["field"] == "trajectory"
        await http.post(ROLLOUTS, json={**BALL, "prompt": "partly", "request_id": "partly"})
        failed = await http.get(f"{ROLLOUTS}/partly/samples/1/media.mp4")
        problem_of(failed, 500, "non_finite")

    talk(script)
