"""Media come in ranges of bytes: one outside is refused, and one that makes no sense is none."""

import httpx
import pytest

from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, ROLLOUTS, problem_of, talk


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=100-199", 100, 199),
        ("bytes=100-", 100, None),
        ("bytes=-100", -100, None),
        ("bytes=100-99999999999999999999999999", 100, None),
        ("bytes=-99999999", 0, None),
    ],
)
def test_media_come_in_ranges(asked: str, first: int, last: int | None) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> tuple[httpx.Response, httpx.Response]:
        await http.post(ROLLOUTS, json=BALL)
        url = f"{ROLLOUTS}/ball/samples/1/media.mp4"
        return await http.get(url), await http.get(url, headers={"range": asked})

    whole, part = talk(script)
    size = len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes" and "content-range" not in whole.headers
    assert part.status_code == 206 and part.headers["etag"] == whole.headers["etag"]
    expected = whole.content[first:] if last is None else whole.content[first : last + 1]
    assert part.content == expected
    begin = first % size
    assert part.headers["content-range"] == f"bytes {begin}-{begin + len(expected) - 1}/{size}"


@pytest.mark.parametrize(
    "asked", ["bytes=5-4", "bytes=-", "bytes=0-1,5-6", "lines=1-2", "bytes", "bytes=a-b"]
)
def test_a_range_that_makes_no_sense_is_no_range(asked: str) -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> tuple[httpx.Response, httpx.Response]:
        await http.post(ROLLOUTS, json=BALL)
        url = f"{ROLLOUTS}/ball/samples/1/audio.wav"
        return await http.get(url), await http.get(url, headers={"range": asked})

    whole, answer = talk(script)
    assert answer.status_code == 200 and "content-range" not in answer.headers
    assert answer.content == whole.content and len(whole.content) > 100


def test_a_range_outside_is_refused_and_one_of_an_earlier_file_is_the_whole() -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> None:
        await http.post(ROLLOUTS, json=BALL)
        url = f"{ROLLOUTS}/ball/samples/1/audio.wav"
        size = len((await http.get(url)).content)
        for asked in (f"bytes={size}-", "bytes=-0", "bytes=99999999999999999999999999-"):
            outside = await http.get(url, headers={"range": asked})
            assert problem_of(outside, 416, "invalid_request")["field"] == "Range"
            assert outside.headers["content-range"] == f"bytes */{size}"
        stale = await http.get(url, headers={"range": "bytes=0-9", "if-range": '"another"'})
        assert stale.status_code == 200 and len(stale.content) == size
        posted = await http.post(ROLLOUTS, json=BALL, headers={"accept": "video/mp4", "range": "bytes=0-9"})
        assert posted.status_code == 200

    talk(script)
