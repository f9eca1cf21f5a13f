"""Every form and link of a rollout over a real HTTP client, and what is left when fifty callers have come and gone."""

import io
import json
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import av
import httpx
import numpy as np
import pyarrow as pa
import pytest
import ray
from apps import KEEP_BYTES, App, until
from ray import serve
from variants import SLOWLY

from schemas.group_stream import read_group
from schemas.media import read_media
from schemas.problem_details import ProblemDetails

ROLLOUTS = "/v1/rollouts"
ARROW = "application/vnd.apache.arrow.stream"
EVENTS = "text/event-stream"
AAC_FRAME = 1024
LARGE = {"height": 256, "width": 384, "num_frames": 33, "num_inference_steps": 2, "media": False}


def named(**changes: Any) -> dict[str, Any]:
    return {"prompt": "a red ball", "num_samples": 2, "seed": 7, "request_id": uuid4().hex, **changes}


@pytest.fixture(scope="module")
def by_handle(plain: App) -> dict[str, Any]:
    """The rollout of ``named``'s request, by handle and so without HTTP."""
    answer: dict[str, Any] = serve.get_app_handle("plain").rollout.remote(named()).result(timeout_s=120)
    return answer


@pytest.fixture(scope="module")
def summary(plain: App) -> dict[str, Any]:
    with plain.http() as http:
        answer = http.post(ROLLOUTS, json=named())
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def http(plain: App) -> Iterator[httpx.Client]:
    """To which links are paths from the host's root."""
    parts = urlsplit(plain.url)
    with httpx.Client(base_url=f"{parts.scheme}://{parts.netloc}", timeout=120) as client:
        yield client


def columns(table: pa.Table) -> pa.Table:
    """Without the manifest, which tells when and where."""
    return table.replace_schema_metadata(None)


def test_arrow_over_http_is_what_a_handle_gives(
    plain: App, http: httpx.Client, by_handle: dict[str, Any], summary: dict[str, Any]
) -> None:
    own = [ray.get(sample["trajectory"]) for sample in by_handle["samples"]]
    streamed = http.get(summary["links"]["self"], headers={"accept": ARROW})
    assert streamed.headers["content-type"] == ARROW
    tables, rollout = read_group(streamed.content)
    assert rollout["request"] == summary["request"]
    for index, sample in enumerate(summary["samples"]):
        table = pa.ipc.open_stream(http.get(sample["links"]["trajectory"]).content).read_all()
        assert table.equals(tables[index], check_metadata=True)
        # Not bit by bit: a forward pass rounds by its size, and these samples were batched with others.
        for column in ("video_latents", "audio_latents"):
            mine, other = (each.column(column).chunk(0).to_numpy_ndarray() for each in (table, own[index]))
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
        assert table.schema.equals(own[index].schema, check_metadata=False)
        assert json.loads(table.schema.metadata[b"manifest"])["log_probs_video"] == sample["log_probs_video"]
    contexts = pa.ipc.open_stream(http.get(summary["links"]["conditioning"]).content).read_all()
    assert columns(contexts).equals(columns(ray.get(by_handle["conditioning"])))


def test_the_same_rollout_by_handle_and_over_http_is_equal_bit_by_bit(plain: App, http: httpx.Client) -> None:
    """Under one request_id both callers are given the same tables."""
    request = named()
    by_handle = serve.get_app_handle("plain").rollout.remote(request).result(timeout_s=120)
    tables, _ = read_group(http.post(f"/plain{ROLLOUTS}", json=request, headers={"accept": ARROW}).content)
    for sample in by_handle["samples"]:
        assert tables[sample["sample_index"]].equals(ray.get(sample["trajectory"]), check_metadata=True)


def test_media_come_back_whole(http: httpx.Client, summary: dict[str, Any], plain: App) -> None:
    request = named(media=True)
    by_handle = serve.get_app_handle("plain").rollout.remote(request).result(timeout_s=120)
    media = read_media(ray.get(by_handle["samples"][1]["media"]))
    found = http.get(f"/plain{ROLLOUTS}/{request['request_id']}").json()["samples"][1]
    with av.open(io.BytesIO(http.get(found["links"]["mp4"]).content)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
        assert float(video.average_rate) == media.frame_rate
        assert float(video.duration * video.time_base) == pytest.approx(9 / 24, abs=1e-3)
        seconds = media.waveform.shape[1] / media.sample_rate
        assert float(audio.duration * audio.time_base) == pytest.approx(seconds, abs=2e-3)
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        container.seek(0)
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert len(pictures) == found["num_frames"] == 9
    assert 0 <= sound.shape[1] - media.waveform.shape[1] < AAC_FRAME
    with av.open(io.BytesIO(http.get(found["links"]["wav"]).content)) as container:
        exact = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert np.array_equal(exact.reshape(-1, 2).T, media.waveform)
    for index in (0, 8):
        with av.open(io.BytesIO(http.get(found["links"]["frames"].format(frame=index)).content)) as container:
            (picture,) = container.decode(video=0)
        assert np.array_equal(picture.to_ndarray(format="rgb24"), media.frames[index])


def test_a_player_can_seek(http: httpx.Client, summary: dict[str, Any]) -> None:
    link = summary["samples"][0]["links"]["mp4"]
    whole = http.get(link)
    tail = http.get(link, headers={"range": "bytes=-100", "if-range": whole.headers["etag"]})
    assert tail.status_code == 206 and tail.content == whole.content[-100:]
    outside = http.get(link, headers={"range": f"bytes={len(whole.content)}-"})
    assert outside.status_code == 416 and outside.headers["content-range"] == f"bytes */{len(whole.content)}"
    posted = http.post(f"/plain{ROLLOUTS}", json=named(), headers={"accept": "video/mp4"})
    assert posted.status_code == 200 and b"ftyp" in posted.content[:16]


def test_events_tell_steps_while_they_are_done(plain: App) -> None:
    request = named(num_inference_steps=100, media=False)
    events: list[tuple[float, str, Any]] = []
    with (
        plain.http() as http,
        http.stream("POST", ROLLOUTS, json=request, headers={"accept": EVENTS}) as answer,
    ):
        assert answer.headers["content-type"].startswith(EVENTS)
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                events.append((time.monotonic(), name, json.loads(line.removeprefix("data: "))))
    assert [name for _, name, _ in (events[0], events[-1])] == ["started", "summary"]
    for index in (0, 1):
        steps = [
            told["steps_done"]
            for _, name, told in events
            if name == "progress" and told["sample_index"] == index
        ]
        assert steps[-1] == 100 and steps == sorted(steps)
        assert any(0 < step < 100 for step in steps), "told on the way"
    assert events[-1][0] - events[0][0] > 0.2, "as it happened, not at the end"


def test_one_request_id_is_one_rollout_until_it_is_deleted(plain: App) -> None:
    request = named(prompt=f"one for all, {SLOWLY}", media=False)
    (before,) = plain.ask("Denoiser")
    with plain.http() as http, ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(lambda _: http.post(ROLLOUTS, json=request), range(4)))
        assert len({answer.text for answer in answers}) == 1 and answers[0].status_code == 200
        (after,) = plain.ask("Denoiser")
        assert after["num_calls"] - before["num_calls"] == 2, "a call for each sample"
        other = http.post(ROLLOUTS, json={**request, "seed": 8})
        assert ProblemDetails.model_validate(other.json()).code == "conflict" and other.status_code == 409
        url = f"{ROLLOUTS}/{request['request_id']}"
        assert http.delete(url).status_code == 204
        for gone in (http.get(url), http.delete(url), http.get(f"{url}/samples/0/trajectory")):
            assert gone.status_code == 410 and gone.json()["code"] == "gone"
        assert http.get(f"{ROLLOUTS}/never").status_code == 404


def test_a_rollout_stops_when_it_is_deleted_or_when_the_last_who_waits_hangs_up(plain: App) -> None:
    # Two samples: a burst of four can be more than the denoiser's queue takes.
    request = named(**{**LARGE, "num_inference_steps": 100})
    url = f"{ROLLOUTS}/{request['request_id']}"

    def hold(
        method: str, path: str, holding: threading.Event, let_go: threading.Event, **kwargs: Any
    ) -> None:
        with plain.http() as http, http.stream(method, path, headers={"accept": EVENTS}, **kwargs) as answer:
            chunks = answer.iter_raw()  # which hangs up when it is dropped
            next(chunks)
            holding.set()
            let_go.wait(60)

    with plain.http() as http, ThreadPoolExecutor(3) as callers:
        events = [threading.Event() for _ in range(4)]
        first = callers.submit(hold, "POST", ROLLOUTS, events[0], events[1], json=request)
        assert events[0].wait(60)
        second = callers.submit(hold, "GET", url, events[2], events[3])
        assert events[2].wait(60)
        until(plain.held)
        events[1].set()
        first.result()
        time.sleep(0.3)
        assert plain.held(), "somebody still waits"
        events[3].set()
        second.result()
        plain.idle()
        assert http.get(url).status_code == 410

        third = callers.submit(http.post, ROLLOUTS, json=request)
        until(plain.held)
        assert http.delete(url).status_code == 204
        assert third.result().status_code == 410
    plain.idle()


def test_what_is_too_much_makes_way(plain: App) -> None:
    big = {**LARGE, "num_inference_steps": 40}
    with plain.http() as http:
        found = [http.post(ROLLOUTS, json=named(**big)).json() for _ in range(4)]
        sizes = [sum(sample["trajectory_bytes"] for sample in each["samples"]) for each in found]
        assert max(sizes) < KEEP_BYTES < sum(sizes)
        (archive,) = plain.ask("RolloutArchive")
        assert sizes[-1] <= archive["kept_bytes"] <= KEEP_BYTES
        links = [each["links"]["self"].removeprefix("/plain") for each in found]
        assert [http.get(link).status_code for link in (links[0], links[-1])] == [410, 200]


# Many at once

NUM_CALLERS = 50
TRIES = 200


def one(**changes: Any) -> dict[str, Any]:
    return named(num_samples=1, **changes)


def rude(plain: App) -> str:
    """Asks, and hangs up."""
    with connected(plain, one(num_inference_steps=100), "application/json"):
        time.sleep(0.3)
    return "hung up"


def rude_later(plain: App) -> str:
    """Asks, reads a little of a large answer, and hangs up."""
    with connected(plain, one(**LARGE), ARROW) as connection:
        connection.recv(1000)
    return "hung up"


def slow(plain: App) -> str:
    """Reads the trajectories in dribs and drabs, through a small window."""
    for _ in range(TRIES):
        answer = b""
        with connected(plain, one(**LARGE), ARROW) as connection:
            while piece := connection.recv(16_384):
                answer += piece
                time.sleep(0.01)
        head, body = answer.split(b"\r\n\r\n", 1)
        if b" 503 " not in head.split(b"\r\n")[0]:
            tables, _ = read_group(body)
            assert tables.keys() == {0} and tables[0].num_rows == 3
            return "read slowly"
        time.sleep(0.2)
    return "full"


def plainly(plain: App) -> str:
    """Takes the numbers, then the video."""
    with plain.http() as http:
        request = one()
        answer = accepted(http, request, "application/json")
        found = answer.json()
        assert found["request_id"] == request["request_id"] and found["request"]["seed"] == 7
        (sample,) = found["samples"]
        assert sample["problem"] is None and len(sample["log_probs_video"]) == 6
        video = http.get(f"{ROLLOUTS}/{request['request_id']}/samples/0/media.mp4")
        assert video.status_code == 200 and b"ftyp" in video.content[:16]
        return "read"


def in_events(plain: App) -> str:
    """Follows a rollout."""
    with plain.http() as http:
        answer = accepted(http, one(media=False), EVENTS)
    return answer.text.rsplit("event: ", 1)[1].split("\n")[0]


def accepted(http: httpx.Client, request: dict[str, Any], accept: str) -> httpx.Response:
    """The answer once there is room."""
    for _ in range(TRIES):
        answer = http.post(ROLLOUTS, json=request, headers={"accept": accept})
        if answer.status_code != 503 and "queue_full" not in answer.text:
            assert answer.status_code == 200, answer.text
            return answer
        time.sleep(0.2)
    raise TimeoutError("never any room")


@contextmanager
def connected(plain: App, request: dict[str, Any], accept: str) -> Iterator[socket.socket]:
    """A connection through a small window, on which the request was sent."""
    parts, body = urlsplit(plain.url), json.dumps(request).encode()
    head = (
        f"POST {parts.path}{ROLLOUTS} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\naccept: {accept}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(120)
        connection.connect((parts.hostname, parts.port))
        connection.sendall(head.encode() + body)
        yield connection


def grown(before: dict[str, tuple[int, ...]], now: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What is more than it was. It may be less: what went before the callers came can still have been there."""
    return {
        name: (before[name], counts)
        for name, counts in now.items()
        if any(count > earlier for count, earlier in zip(counts, before[name], strict=True))
    }


def held(plain: App) -> dict[str, tuple[int, ...]]:
    """What could pile up in the processes on the way, and on disk."""
    (archive,), (ingress,) = plain.ask("RolloutArchive"), plain.ask("Ingress")
    return {
        "rollouts": (archive["running"], archive["waiting"]),
        "refs": (archive["refs"], ingress["refs"]),
        "tasks": (archive["tasks"], ingress["tasks"]),
        "files": (len(list(Path(tempfile.gettempdir()).glob("ltx-mp4-*"))),),
    }


def test_fifty_callers_who_read_slowly_or_hang_up_leave_nothing_behind(plain: App) -> None:
    plainly(plain)
    with plain.http() as http:
        forgotten = forget_all(plain, http)
        until(lambda: held(plain) == held(plain))
        before = held(plain)
        callers = [(rude, rude_later, slow, plainly, in_events)[index % 5] for index in range(NUM_CALLERS)]
        with ThreadPoolExecutor(NUM_CALLERS) as threads:
            outcomes = Counter(threads.map(lambda caller: caller(plain), callers))
        assert outcomes == {"hung up": 20, "read slowly": 10, "read": 10, "summary": 10}
        plain.idle()
        assert forget_all(plain, http) > forgotten
    try:
        until(lambda: not grown(before, held(plain)), 30)
    except TimeoutError:
        assert not grown(before, held(plain))


def forget_all(plain: App, http: httpx.Client) -> int:
    """Delete what the archive keeps; returns how many it has kept so far."""
    (archive,) = plain.ask("RolloutArchive")
    for id in archive["ids"]:
        http.delete(f"{ROLLOUTS}/{id}")
    return int(archive["num_kept"])
