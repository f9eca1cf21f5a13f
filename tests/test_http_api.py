"""The HTTP app over an archive without a cluster: every form and link, and every refusal in the same words."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import av
import httpx
import numpy as np
import pyarrow as pa
import pytest
from fake_archive import (
    FRAME_RATE,
    NUM_FRAMES,
    NUM_SOUNDS,
    SAMPLE_RATE,
    FakeArchive,
    conditioning,
    trajectory_of,
)
from fastapi import FastAPI

from configs.settings import HttpSettings
from deployments.http.api import http_app
from deployments.http.bodies import ARROW_TYPE
from schemas.control import Fleet
from schemas.group_stream import read_group
from schemas.problem_details import ProblemDetails
from schemas.request import RolloutRequest

ROLLOUTS = "/v1/rollouts"
BALL = {"prompt": "a red ball", "num_samples": 2, "seed": 7, "request_id": "ball"}
PROBLEM = "application/problem+json"

T = TypeVar("T")


async def fleet() -> Fleet:
    return Fleet.model_validate({"control": {}, "replicas": (), "kept_versions": (), "kept_bytes": 0})


def app_of(archive: FakeArchive, **settings: Any) -> FastAPI:
    return http_app(archive, fleet, checkpoint="tiny", settings=HttpSettings(**settings))


def http_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://app")


def talk(script: Callable[[httpx.AsyncClient, FakeArchive], Awaitable[T]], **settings: Any) -> T:
    """Run a caller's script against a fresh app."""

    async def run() -> T:
        archive = FakeArchive()
        async with http_of(app_of(archive, **settings)) as http:
            return await script(http, archive)

    return asyncio.run(run())


def events_of(text: str) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("event:")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def problem_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.headers["content-type"] == PROBLEM
    problem = ProblemDetails.model_validate(answer.json())
    assert (answer.status_code, problem.status, problem.code) == (status, status, code)
    assert problem.title and problem.rule in problem.detail and problem.type.endswith(code)
    return problem.model_dump()


# Forms


def test_a_summary_has_numbers_and_links_that_lead_to_its_parts() -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> None:
        answer = await http.post(ROLLOUTS, json=BALL)
        assert answer.status_code == 200 and answer.headers["content-location"] == f"{ROLLOUTS}/ball"
        summary = answer.json()
        assert summary["request_id"] == "ball" and summary["request"]["num_inference_steps"] == 6
        assert [sample["policy_version"] for sample in summary["samples"]] == [3, 3]
        again = await http.get(summary["links"]["self"])
        assert again.json() == summary
        assert (await http.get(summary["links"]["conditioning"])).headers["content-type"] == ARROW_TYPE
        for sample in summary["samples"]:
            links = sample["links"]
            kinds = {"trajectory": ARROW_TYPE, "mp4": "video/mp4", "wav": "audio/wav"}
            for link, media_type in kinds.items():
                part = await http.get(links[link])
                assert (part.status_code, part.headers["content-type"]) == (200, media_type)
                assert int(part.headers["content-length"]) == len(part.content)
            frame = await http.get(links["frames"].format(frame=sample["num_frames"] - 1))
            assert frame.headers["content-type"] == "image/png"

    talk(script)


def test_links_lead_through_the_path_that_the_app_is_under() -> None:
    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(app_of(FakeArchive()), root_path="/under")
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
            summary: dict[str, Any] = (await http.post(f"/under{ROLLOUTS}", json=BALL)).json()
            assert (await http.get(summary["links"]["self"])).status_code == 200
            return summary

    assert asyncio.run(ask())["links"]["self"] == f"/under{ROLLOUTS}/ball"


def test_events_tell_each_samples_steps_and_end_with_the_summary() -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> list[tuple[str, Any]]:
        request = {**BALL, "prompt": "a late ball"}
        call = asyncio.create_task(http.post(ROLLOUTS, json=request, headers={"accept": "text/event-stream"}))
        while archive.shelf.get("ball") is None:
            await asyncio.sleep(0.001)
        for step in range(1, 4):
            archive.shelf.find("ball").steps_done = step
            await asyncio.sleep(0.02)
        archive.release("ball")
        answer = await call
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.text)

    events = talk(script)
    assert events[0][0] == "started" and events[0][1]["request"]["seed"] == 7
    assert events[-1][0] == "summary" and len(events[-1][1]["samples"]) == 2
    told = [event for name, event in events if name == "progress"]
    for index in (0, 1):
        mine = [(event["steps_done"], event["state"]) for event in told if event["sample_index"] == index]
        assert mine == [(0, "running"), (1, "running"), (2, "running"), (3, "running"), (6, "done")]


def test_events_of_a_rollout_that_fails_end_with_the_problem() -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> list[tuple[str, Any]]:
        request = {**BALL, "prompt": "it fails"}
        return events_of(
            (await http.post(ROLLOUTS, json=request, headers={"accept": "text/event-stream"})).text
        )

    name, problem = talk(script)[-1]
    assert name == "problem" and (problem["code"], problem["status"]) == ("deadline_exceeded", 504)


def test_an_mp4_is_sample_0_and_a_wav_its_waveform() -> None:
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> tuple[bytes, bytes, bytes]:
        video = await http.post(ROLLOUTS, json=BALL, headers={"accept": "video/mp4"})
        sample = f"{ROLLOUTS}/ball/samples/0"
        assert (await http.get(f"{sample}/media.mp4")).content == video.content
        wav, frame = await http.get(f"{sample}/audio.wav"), await http.get(f"{sample}/frames/4.png")
        return video.content, wav.content, frame.content

    mp4, wav, png = talk(script)
    with av.open(io.BytesIO(mp4)) as container:
        assert len(list(container.decode(video=0))) == NUM_FRAMES
        assert float(container.streams.video[0].average_rate) == FRAME_RATE
    with av.open(io.BytesIO(wav)) as container:
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        assert container.streams.audio[0].rate == SAMPLE_RATE
    tone = np.sin(np.arange(NUM_SOUNDS) * 0.05).astype(np.float32) * 0.5
    assert np.array_equal(sound.reshape(-1, 2).T, np.stack([tone, -tone]))
    with av.open(io.BytesIO(png)) as container:
        (picture,) = container.decode(video=0)
    assert picture.to_ndarray(format="rgb24").shape == (64, 96, 3)
    assert np.all(picture.to_ndarray(format="rgb24") == 80)


def test_trajectories_of_a_group_come_in_one_stream_and_come_apart_as_they_were() -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> tuple[bytes, bytes, bytes, Any]:
        request = {**BALL, "prompt": "partly a ball", "num_samples": 3}
        group = await http.post(ROLLOUTS, json=request, headers={"accept": ARROW_TYPE})
        single = await http.get(f"{ROLLOUTS}/ball/samples/2/trajectory")
        contexts = await http.get(f"{ROLLOUTS}/ball/conditioning")
        return group.content, single.content, contexts.content, archive.shelf.find("ball").request

    group, single, contexts, request = talk(script)
    tables, rollout = read_group(group)
    assert tables.keys() == {0, 2}
    for index, table in tables.items():
        assert table.equals(trajectory_of(request, index), check_metadata=True)
    assert tables[2].equals(pa.ipc.open_stream(single).read_all(), check_metadata=True)
    assert rollout["request_id"] == "ball"
    assert rollout["samples"][1]["problem"]["code"] == "non_finite"
    # And with pyarrow alone.
    whole = pa.ipc.open_stream(group).read_all()
    assert set(whole.column("sample_index").to_pylist()) == {0, 2}
    assert pa.ipc.open_stream(contexts).read_all().equals(conditioning(), check_metadata=True)


def test_a_stream_of_something_else_is_no_group() -> None:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, conditioning().schema) as writer:
        writer.write_table(conditioning())
    with pytest.raises(ValueError, match="must have a rollout"):
        read_group(sink.getvalue())


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


# Ranges


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
    async def script(http: httpx.AsyncClient, _: FakeArchive) -> httpx.Response:
        await http.post(ROLLOUTS, json=BALL)
        return await http.get(f"{ROLLOUTS}/ball/samples/1/audio.wav", headers={"range": asked})

    assert talk(script).status_code == 200


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


# Ids


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


@pytest.mark.parametrize(("accept", "field"), [("video/mp4", "media"), (ARROW_TYPE, "trajectory")])
def test_a_form_without_its_part_is_refused_before_anything_is_sampled(accept: str, field: str) -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> tuple[httpx.Response, int]:
        answer = await http.post(ROLLOUTS, json={"prompt": "a", field: False}, headers={"accept": accept})
        return answer, archive.num_sampled

    answer, num_sampled = talk(script)
    assert problem_of(answer, 422, "invalid_request")["field"] == field and num_sampled == 0


# Refusals


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


def test_a_caller_who_hangs_up_waits_no_longer() -> None:
    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> None:
        for accept in ("application/json", "text/event-stream"):
            request = {**BALL, "prompt": "a late ball"}
            call = asyncio.create_task(http.post(ROLLOUTS, json=request, headers={"accept": accept}))
            while not (rollout := archive.shelf.get("ball")) or not rollout.num_waiting:
                await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert rollout.num_waiting == 0 and archive.shelf.get("ball") is None

    talk(script)


# The door


def test_without_the_token_only_health_answers(tmp_path: Path) -> None:
    place = tmp_path / "token"
    place.write_text("s3cret\n")

    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> None:
        assert (await http.get("/health")).status_code == 200
        wrong: list[Mapping[str, str]] = [
            {},
            {"authorization": "Bearer s3cre"},
            {"authorization": "Basic s3cret"},
            {"authorization": "s3cret"},
        ]
        for headers in wrong:
            for method, path in (
                ("POST", ROLLOUTS),
                ("GET", "/v1/weights"),
                ("GET", "/openapi.json"),
                ("GET", "/x"),
            ):
                refused = await http.request(method, path, headers=headers)
                problem_of(refused, 401, "invalid_request")
                assert refused.headers["www-authenticate"] == "Bearer" and "s3cret" not in refused.text
        assert archive.num_sampled == 0
        answer = await http.post(ROLLOUTS, json=BALL, headers={"authorization": "bearer s3cret"})
        assert answer.status_code == 200

    talk(script, token_file=str(place))


def test_an_app_that_is_to_ask_for_a_token_does_not_start_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_text("\n")
    monkeypatch.delenv("LTX_TOKEN", raising=False)
    for settings in (
        {"token_env": "LTX_TOKEN"},
        {"token_file": str(tmp_path / "none")},
        {"token_file": str(tmp_path / "empty")},
    ):
        with pytest.raises(ValueError, match="must lead to a token"):
            app_of(FakeArchive(), **settings)
    monkeypatch.setenv("LTX_TOKEN", "s3cret")
    assert app_of(FakeArchive(), token_env="LTX_TOKEN")
    with pytest.raises(ValueError, match="cannot both be given"):
        HttpSettings(token_env="A", token_file="b")


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


def test_every_field_of_a_request_is_in_the_document() -> None:
    document = app_of(FakeArchive()).openapi()
    schemas = document["components"]["schemas"]
    assert schemas["RolloutRequest"]["properties"].keys() == RolloutRequest.model_fields.keys()
    assert schemas["ProblemDetails"]["properties"].keys() == ProblemDetails.model_fields.keys()
    assert "HTTPValidationError" not in schemas
