"""Accept chooses the form of an answer, and what it cannot have is refused before anything is sampled."""

import httpx
import pytest

from deployments.http.bodies import ARROW_TYPE
from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, ROLLOUTS, problem_of, talk


@pytest.mark.parametrize(
    ("accept", "found"),
    [
        (None, "application/json"),
        ("", "application/json"),
        ("*/*", "application/json"),
        ("text/html, */*;q=0.1", "application/json"),
        ("video/*", "video/mp4"),
        ("application/json;q=0.5, video/mp4", "video/mp4"),
        ("application/*;q=0.9, application/json;q=0.1", ARROW_TYPE),
        ("VIDEO/MP4; codecs=avc1", "video/mp4"),
    ],
)
def test_accept_chooses_the_form(accept: str | None, found: str) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> httpx.Response:
        del http.headers["accept"]
        return await http.post(ROLLOUTS, json=BALL, headers={} if accept is None else {"accept": accept})

    answer = talk(script)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(found)


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0", "video/mp4;q=x", "*/*;q=0"])
@pytest.mark.parametrize("path", ["", "/ball", "/ball/samples/0/media.mp4", "/ball/conditioning"])
def test_an_accept_that_cannot_be_met_is_refused_before_anything_is_sampled(accept: str, path: str) -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> tuple[httpx.Response, int]:
        if path:
            await http.post(ROLLOUTS, json=BALL)
            answer = await http.get(f"{ROLLOUTS}{path}", headers={"accept": accept})
        else:
            answer = await http.post(ROLLOUTS, json=BALL, headers={"accept": accept})
        return answer, archive.num_sampled

    answer, num_sampled = talk(script)
    problem = problem_of(answer, 406, "invalid_request")
    assert problem["field"] == "Accept" and num_sampled == (1 if path else 0)


@pytest.mark.parametrize(("accept", "field"), [("video/mp4", "media"), (ARROW_TYPE, "trajectory")])
def test_a_form_without_its_part_is_refused_before_anything_is_sampled(accept: str, field: str) -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> tuple[httpx.Response, int]:
        answer = await http.post(ROLLOUTS, json={"prompt": "a", field: False}, headers={"accept": accept})
        return answer, archive.num_sampled

    answer, num_sampled = talk(script)
    assert problem_of(answer, 422, "invalid_request")["field"] == field and num_sampled == 0
