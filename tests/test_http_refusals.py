"""Every call that is refused or fails is answered in the same words, whoever noticed it."""

import httpx
import pytest

from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, ROLLOUTS, problem_of, talk


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("PUT", ROLLOUTS, 405), ("PATCH", f"{ROLLOUTS}/ball", 405)],
)
def test_frameworks_own_refusals_are_in_the_same_words(method: str, path: str, status: int) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> httpx.Response:
        return await http.request(method, path)

    answer = talk(script)
    problem_of(answer, status, "not_found" if status == 404 else "invalid_request")
    assert status != 405 or answer.headers["allow"]


@pytest.mark.parametrize(
    ("body", "status"), [(b'"\xff"', 400), (b"{", 422), (b"", 422), (b"[]", 422), (b"{}", 422)]
)
def test_a_body_that_is_no_request_is_refused(body: bytes, status: int) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> httpx.Response:
        return await http.post(ROLLOUTS, content=body, headers={"content-type": "application/json"})

    problem_of(talk(script), status, "invalid_request")


def test_a_failed_rollout_a_full_app_and_a_fault_of_ours_each_have_their_status() -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> None:
        problem_of(await http.post(ROLLOUTS, json={"prompt": "it fails"}), 504, "deadline_exceeded")
        archive.is_full = True
        full = await http.post(ROLLOUTS, json=BALL)
        assert problem_of(full, 503, "queue_full") and full.headers["retry-after"] == "1"
        archive.submit = None  # type: ignore[method-assign, assignment]
        problem_of(await http.post(ROLLOUTS, json=BALL), 500, "internal")

    talk(script)
