"""Methods, paths and headers at the edges: HEAD, Allow, slashes, ids, ranges, tokens, and streams that nobody reads."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Message

from tests.asgi import scope
from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, ROLLOUTS, app_of, problem_of, talk

PARTS = ("media.mp4", "audio.wav", "frames/3.png")


def asked(method: str, path: str, **options: Any) -> httpx.Response:
    """The answer of an app that has the rollout "ball"."""

    async def script(http: httpx.AsyncClient, _: FakeArchive) -> httpx.Response:
        await http.post(ROLLOUTS, json=BALL)
        return await http.request(method, path, **options)

    return talk(script)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("headers", [{}, {"range": "bytes=0-9"}])
def test_head_tells_of_a_file_what_get_does(part: str, headers: dict[str, str]) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> None:
        await http.post(ROLLOUTS, json=BALL)
        path = f"{ROLLOUTS}/ball/samples/1/{part}"
        head, whole = await http.head(path, headers=headers), await http.get(path)
        assert head.status_code == 200 and head.content == b""
        for name in ("content-length", "content-type", "etag", "accept-ranges"):
            assert head.headers[name] == whole.headers[name]
        assert (await http.head(path.replace("/1/", "/9/"))).status_code == 404

    talk(script)


def test_head_asks_for_health() -> None:
    assert asked("HEAD", "/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (f"{ROLLOUTS}/ball", "DELETE, GET"),
        (ROLLOUTS, "POST"),
        ("/health", "GET, HEAD"),
        (f"{ROLLOUTS}/ball/samples/0/media.mp4", "GET, HEAD"),
    ],
)
def test_a_method_that_is_none_is_answered_with_all_that_are(path: str, allowed: str) -> None:
    answer = asked("PUT", path)
    assert answer.headers["allow"] == allowed
    assert allowed in problem_of(answer, 405, "invalid_request")["rule"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", f"{ROLLOUTS}/"), ("GET", "/health/"), ("GET", f"{ROLLOUTS}/ball/")]
)
def test_a_slash_too_many_leads_nowhere_and_not_elsewhere(method: str, path: str) -> None:
    problem_of(asked(method, path, headers={"host": "evil.example"}), 404, "not_found")


@pytest.mark.parametrize("request_id", [".", "..", "...", ".hidden", "", "a/b", "a" * 129, "é"])
def test_an_id_that_links_cannot_lead_to_is_refused(request_id: str) -> None:
    answer = asked("POST", ROLLOUTS, json={"prompt": "x", "request_id": request_id})
    assert problem_of(answer, 422, "invalid_request")["field"] == "request_id"


@pytest.mark.parametrize("request_id", ["-", "_", "a..b", "0.", "A" * 128])
def test_the_links_of_any_other_id_lead_there(request_id: str) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> None:
        answer = await http.post(ROLLOUTS, json={"prompt": "x", "request_id": request_id})
        assert (await http.get(answer.json()["links"]["self"])).json() == answer.json()

    talk(script)


@pytest.mark.parametrize(
    ("zeros", "num_bytes"), [("bytes=-" + "0" * 30 + "5", 5), ("bytes=" + "0" * 30 + "5-9", 5)]
)
def test_leading_zeros_of_a_range_say_nothing(zeros: str, num_bytes: int) -> None:
    answer = asked("GET", f"{ROLLOUTS}/ball/samples/0/audio.wav", headers={"range": zeros})
    assert answer.status_code == 206 and len(answer.content) == num_bytes


@pytest.mark.parametrize("token", ["sécret", "a\nb", "a\x01b"])
def test_a_token_that_no_header_surely_holds_is_refused_at_the_start(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTX_TOKEN", token)
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        app_of(FakeArchive(), token_env="LTX_TOKEN")
    assert token not in str(caught.value) and token not in json.loads(str(caught.value)).values()


@pytest.mark.parametrize("num_sent", [1, 2, 3])
@pytest.mark.parametrize("how", ["cancelled", "disconnected", "broken"])
def test_a_stream_whose_reader_goes_while_it_is_written_waits_no_longer(num_sent: int, how: str) -> None:
    async def run() -> None:
        archive, gone, blocked = FakeArchive(), asyncio.Event(), asyncio.Event()
        body = json.dumps({**BALL, "prompt": "a late ball"}).encode()
        pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        left = num_sent

        async def receive() -> Message:
            if not pieces:
                await gone.wait()
            return pieces.pop() if pieces else {"type": "http.disconnect"}

        async def send(_: Message) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                blocked.set()
                if how == "broken":
                    raise OSError("gone")
                await asyncio.Event().wait()

        call_scope = scope("POST", ROLLOUTS, (b"accept", b"text/event-stream"))
        call = asyncio.ensure_future(app_of(archive)(call_scope, receive, send))
        await asyncio.wait_for(blocked.wait(), 10)
        if how == "cancelled":
            call.cancel()
        elif how == "disconnected":
            gone.set()
        await asyncio.wait([call], timeout=10)
        assert call.done() and asyncio.all_tasks() == {asyncio.current_task()}
        rollout = archive.shelf.get("ball")
        assert rollout is None or not rollout.num_waiting
        assert call.cancelled() or call.exception() or how == "disconnected"

    asyncio.run(run())
