"""The forms of a rollout over HTTP: numbers with links, events, media, and tables."""

import asyncio
import io
import json
from typing import Any

import av
import httpx
import numpy as np
import pyarrow as pa
import pytest

from deployments.http.bodies import ARROW_TYPE
from deployments.kept.api import SampleProgress
from schemas.group_stream import read_group
from tests.fake_archive import (
    FRAME_RATE,
    NUM_FRAMES,
    NUM_SOUNDS,
    SAMPLE_RATE,
    FakeArchive,
    conditioning,
    trajectory_of,
)
from tests.http_apps import BALL, ROLLOUTS, app_of, talk, talk_to


def events_of(text: str) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("event:")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


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


class StepByStep(FakeArchive):
    """A late rollout takes its next step once the one before was told, and settles after the third."""

    async def progress(
        self, id: str, group_id: str, seen: list[SampleProgress] | None
    ) -> list[SampleProgress]:
        rollout = self.shelf.find(id)
        if seen is not None and rollout.steps_done == 3:
            self.release(id)
        elif seen is not None:
            rollout.steps_done += 1
        return await super().progress(id, group_id, seen)


def test_events_tell_each_samples_steps_and_end_with_the_summary() -> None:
    async def script(http: httpx.AsyncClient, _: StepByStep) -> list[tuple[str, Any]]:
        request = {**BALL, "prompt": "a late ball"}
        answer = await http.post(ROLLOUTS, json=request, headers={"accept": "text/event-stream"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.text)

    events = talk_to(StepByStep(), script)
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
