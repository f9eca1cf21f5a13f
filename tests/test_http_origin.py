"""Pages in a browser: which of them may have something done here, and read the answer."""

import asyncio
from typing import Any

import httpx
import pytest

from configs.settings import HttpSettings
from deployments.http.api import http_app
from deployments.sglang.api import sglang_router
from tests.fake_archive import FakeArchive
from tests.http_apps import ROLLOUTS, fleet, http_of, problem_of, talk
from tests.sglang_apps import FakeWeights

EVIL = "https://evil.example"
CHANGING = [
    ("POST", ROLLOUTS),
    ("DELETE", f"{ROLLOUTS}/ball"),
    ("POST", "/rollout/generate"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/get_weights_checksum"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
]


def sent(method: str, path: str, headers: Any, **settings: Any) -> tuple[httpx.Response, FakeWeights]:
    weights, archive = FakeWeights(), FakeArchive()
    router = sglang_router(archive, weights, max_num_samples=8, weights_root=None)

    async def send() -> httpx.Response:
        made = http_app(
            archive, fleet, checkpoint="tiny", settings=HttpSettings(**settings), routers=[router]
        )
        async with http_of(made) as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(send()), weights


@pytest.mark.parametrize(("method", "path"), CHANGING)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL, "content-type": "text/plain"},
        {"origin": "null"},
        {"origin": "http://app:8001"},
        {"origin": "http://app.evil.example"},
        {"origin": "http://[app"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        [("origin", "http://app"), ("origin", EVIL)],
    ],
)
def test_a_page_of_another_origin_has_nothing_done(method: str, path: str, headers: Any) -> None:
    answer, weights = sent(method, path, headers)
    problem = problem_of(answer, 403, "invalid_request")
    assert problem["field"] == "Origin" and "http.cors_origins" in problem["rule"] and problem["remedy"]
    assert weights.run == "running" and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://app"},
        {"origin": "https://APP"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
def test_curl_trainers_and_own_pages_pass(headers: dict[str, str]) -> None:
    answer, weights = sent("POST", "/release_memory_occupation", headers)
    assert answer.status_code == 200 and weights.run == "asleep"


@pytest.mark.parametrize("origins", [(EVIL,), ("*",)])
def test_pages_of_origins_that_are_named_pass_and_read_the_answer(origins: tuple[str, ...]) -> None:
    headers = {"origin": EVIL, "sec-fetch-site": "cross-site"}
    answer, _ = sent("POST", "/release_memory_occupation", headers, cors_origins=origins)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (EVIL, "*")
    other, _ = sent("POST", "/release_memory_occupation", {"origin": "null"}, cors_origins=(EVIL,))
    assert other.status_code == 403


def test_what_only_reads_passes() -> None:
    assert sent("GET", "/health", {"origin": EVIL})[0].status_code == 200


def test_pages_of_other_origins_read_nothing_unless_they_are_named() -> None:
    origin = {"origin": "https://lab.example"}
    asked = {
        **origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }

    async def script(http: httpx.AsyncClient, _: FakeArchive) -> tuple[httpx.Response, httpx.Response]:
        return await http.options(ROLLOUTS, headers=asked), await http.get("/health", headers=origin)

    allowed = "access-control-allow-origin"
    before, answer = talk(script)
    assert before.status_code == 405 and allowed not in before.headers and allowed not in answer.headers
    before, answer = talk(script, cors_origins=("https://lab.example",))
    assert before.status_code == 200 and answer.headers[allowed] == "https://lab.example"
    _, answer = talk(script, cors_origins=("https://other.example",))
    assert allowed not in answer.headers
