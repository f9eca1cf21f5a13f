"""A trainer's way: RolloutClient over handles. What it gets, what it does not ask for, and how its client ends."""

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import ray
from apps import ROOM_OF_PLAIN, App, until

from schemas.conditioning import read_conditioning
from schemas.errors import Problem
from schemas.media import read_media
from schemas.trajectory import read_trajectory

COLUMNS = ["step", "sigma", "video_latents", "audio_latents", "log_prob_video", "log_prob_audio"]


def test_gathered_groups_hold_trajectories_media_and_conditioning(plain: App) -> None:
    requests = [
        {"prompt": "a red ball", "num_samples": 3, "seed": 7, "metadata": {"row": 1}},
        {"prompt": "rain on tin", "num_samples": 2, "seed": 8, "guidance": {"video": 3.0, "audio": 2.0}},
    ]
    with plain.client() as client:
        groups = client.gather([client.submit(request) for request in requests], timeout_s=120, progress=True)
    for group, asked in zip(groups, requests, strict=True):
        group.raise_if_failed()
        assert [sample.sample_index for sample in group.samples] == list(range(asked["num_samples"]))
        conditioning = read_conditioning(ray.get(group.conditioning))
        assert (conditioning.negative_video_context is not None) == ("guidance" in asked)
        for sample in group.samples:
            assert sample.done and sample.attempt == 1 and sample.steps_done == 6
            table = ray.get(sample.trajectory)
            assert table.column_names == COLUMNS
            trajectory = read_trajectory(table)
            manifest = trajectory.manifest
            assert trajectory.steps.tolist() == list(range(7))
            assert (trajectory.sigmas[0], trajectory.sigmas[-1]) == (1.0, 0.0)
            assert None not in trajectory.log_prob_video[:6] and trajectory.log_prob_video[6] is None
            assert None not in trajectory.log_prob_audio[:6] and trajectory.log_prob_audio[6] is None
            assert manifest["request"] == group.request.model_dump(mode="json")
            assert manifest["request"]["metadata"] == asked.get("metadata")
            assert (manifest["seed"], manifest["sample_index"]) == (asked["seed"], sample.sample_index)
            assert (manifest["attempt"], manifest["policy_version"]) == (1, 0)
            assert manifest["conditioning_digest"] == conditioning.manifest["digest"]
            assert manifest["timings"].keys() >= {"encode_s", "wait_s", "denoise_s"}
            media = read_media(ray.get(sample.media))
            assert media.frames.shape == (9, 64, 96, 3) and media.frame_rate == 24
            assert media.waveform.shape[0] == 2 and media.waveform.shape[1] > 0
            assert media.manifest["sample_index"] == sample.sample_index


def test_samples_come_as_they_are_completed(plain: App) -> None:
    with plain.client() as client:
        long = client.submit({"prompt": "a long way", "num_inference_steps": 60, "media": False})
        short = client.submit({"prompt": "a short way", "num_samples": 2, "media": False})
        came = list(client.as_completed([long, short], timeout_s=120, progress=True))
    assert [sample.group_id for sample in came] == [short.group_id, short.group_id, long.group_id]
    assert all(sample.done for sample in came)


def test_a_failed_sample_is_a_value_beside_samples_that_are_done(plain: App) -> None:
    prompt = "word " * 1000  # within the characters that are allowed, beyond the tokens
    with plain.client() as client:
        failed, done = client.gather(
            [client.submit({"prompt": prompt}), client.submit({"prompt": "a word"})], timeout_s=120
        )
    (problem,) = failed.problems
    assert (problem.code, problem.field) == ("invalid_request", "prompt")
    assert problem.rule and problem.remedy
    sample = failed.samples[0]
    assert not sample.done and sample.trajectory is None and sample.media is None
    with pytest.raises(ValueError, match="tokens"):
        failed.raise_if_failed()
    assert not done.problems and done.samples[0].done


def test_a_request_that_cannot_be_sampled_is_refused_before_anything_is_sent(plain: App) -> None:
    with plain.client() as client, pytest.raises(ValueError) as refused:
        client.submit({"prompt": "a red ball", "num_frames": 120})
    problem = Problem.of(refused.value)
    assert problem is not None and problem.field == "num_frames" and problem.value == 120


def test_what_a_group_holds_is_freed_when_it_is_dropped(plain: App) -> None:
    request = {"prompt": "a red ball", "num_samples": 2, "seed": 7}
    gc.collect()
    gc.disable()  # a cycle of references would otherwise be found sooner or later
    try:
        with plain.client() as client:
            (gathered,) = client.gather([client.submit(request)], timeout_s=120)
            streamed = client.submit(request)
            for sample in client.as_completed([streamed], timeout_s=120):
                assert sample.done
            cancelled = client.submit(request | {"num_inference_steps": 100})
            until(plain.held)
            cancelled.cancel()
            client.gather([cancelled], timeout_s=120)
            kept = [weakref.ref(group) for group in (gathered, streamed, cancelled)]
            kept += [
                weakref.ref(sample) for group in (gathered, streamed, cancelled) for sample in group.samples
            ]
            del gathered, streamed, cancelled, sample
            until(lambda: not any(held() for held in kept), timeout_s=20)
    finally:
        gc.enable()


def test_without_media_the_decoder_is_not_called(plain: App) -> None:
    (before,) = plain.ask("AVDecoder")
    with plain.client() as client:
        group = client.submit({"prompt": "a red ball", "num_samples": 4, "media": False})
        client.gather([group], timeout_s=120)
        (after,) = plain.ask("AVDecoder")
        assert all(sample.done and sample.media is None for sample in group.samples)
        assert after["num_calls"] == before["num_calls"]

        client.gather([client.submit({"prompt": "a red ball", "num_samples": 4})], timeout_s=120)
        (after,) = plain.ask("AVDecoder")
        assert after["num_calls"] == before["num_calls"] + 4


def test_without_trajectory_only_media_are_kept_and_they_are_the_same(plain: App) -> None:
    request = {"prompt": "a red ball", "seed": 3}
    with plain.client() as client:
        both = client.submit(request)
        client.gather([both], timeout_s=120)
        only = client.submit(request | {"trajectory": False})
        client.gather([only], timeout_s=120)
    assert only.samples[0].done and only.samples[0].trajectory is None
    shown, alone = ray.get(both.samples[0].media), ray.get(only.samples[0].media)
    assert shown["video"].equals(alone["video"]) and shown["audio"].equals(alone["audio"])


FOREIGN_CALLER = """
import json, sys
import ray
from ray import serve

ray.init(sys.argv[1], log_to_driver=False)
handle = serve.get_app_handle("plain")
answer = handle.rollout.remote({"prompt": "a red ball", "num_samples": 2, "seed": 7}).result(timeout_s=120)
told = []
for sample in answer["samples"]:
    table = ray.get(sample["trajectory"])
    media = ray.get(sample["media"])
    latents = table.column("video_latents").chunk(0).to_numpy_ndarray()
    told.append({
        "columns": table.column_names,
        "shape": latents.shape,
        "total": float(latents.astype("float64").sum()),
        "log_probs": table.column("log_prob_video").to_pylist(),
        "manifest": json.loads(table.schema.metadata[b"manifest"]),
        "frames": media["video"].num_rows,
        "problem": sample["problem"],
    })
try:
    handle.rollout.remote({"prompt": "a red ball", "num_frame": 9}).result(timeout_s=120)
except ValueError as error:
    refusal = str(error)
project = {"configs", "deployments", "pipeline", "schemas"} & set(sys.modules)
print(json.dumps({"samples": told, "refusal": refusal, "seed": answer["request"]["seed"], "project": sorted(project)}))
"""


def test_a_foreign_caller_reads_trajectories_with_ray_and_pyarrow_alone(plain: App, tmp_path: Any) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    caller = subprocess.run(
        [sys.executable, "-c", FOREIGN_CALLER, ray.get_runtime_context().gcs_address],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert caller.returncode == 0, caller.stderr[-2000:]
    told = json.loads(caller.stdout.splitlines()[-1])
    assert told["project"] == [] and told["seed"] == 7
    refused = Problem.of(ValueError(told["refusal"]))
    assert refused is not None and refused.field == "num_frame" and "num_frames" in refused.remedy

    with plain.client() as client:
        group = client.submit({"prompt": "a red ball", "num_samples": 2, "seed": 7})
        client.gather([group], timeout_s=120)
    for sample, seen in zip(group.samples, told["samples"], strict=True):
        trajectory = read_trajectory(ray.get(sample.trajectory))
        assert seen["columns"] == COLUMNS and seen["problem"] is None and seen["frames"] == 9
        assert tuple(seen["shape"]) == trajectory.video_latents.shape
        assert seen["total"] == pytest.approx(
            float(trajectory.video_latents.astype("float64").sum()), abs=1e-3
        )
        assert seen["log_probs"][:6] == pytest.approx(trajectory.log_prob_video[:6], abs=1e-4)
        assert seen["manifest"]["sample_index"] == sample.sample_index


def test_a_full_queue_is_waited_for(plain: App) -> None:
    room = sum(ROOM_OF_PLAIN.values())
    with plain.client() as client:
        group = client.submit({"prompt": "a crowd", "num_samples": 3 * room, "media": False})
        client.gather([group], timeout_s=120)
    assert not group.problems
    manifests = [read_trajectory(ray.get(sample.trajectory)).manifest for sample in group.samples]
    assert [manifest["attempt"] for manifest in manifests] == [1] * 3 * room


def test_a_sample_of_more_bytes_than_may_be_in_flight_is_refused_at_submit(plain: App) -> None:
    with plain.client(max_bytes_in_flight=1000) as client, pytest.raises(ValueError) as refused:
        client.submit({"prompt": "a red ball"})
    problem = Problem.of(refused.value)
    assert problem is not None and problem.code == "invalid_request"
    assert "max_bytes_in_flight of 1000" in problem.rule


def test_no_more_bytes_run_or_wait_to_be_collected_than_are_allowed(plain: App) -> None:
    with plain.client() as client:
        of_one = client.submit({"prompt": "one", "media": False})
        client.gather([of_one], timeout_s=120)
        num_bytes = ray.get(of_one.samples[0].trajectory).nbytes
    # Room for two samples, and most of a third.
    with plain.client(max_bytes_in_flight=int(2.9 * num_bytes)) as client:
        groups = [
            client.submit({"prompt": f"number {i}", "num_samples": 2, "media": False}) for i in range(6)
        ]
        samples = [sample for group in groups for sample in group.samples]
        until(lambda: sum(sample.done for sample in samples) == 2)

        def in_flight() -> int:
            return len(plain.held()) + sum(sample.settled.done() for sample in samples)

        assert [in_flight() for _ in range(20)] == [2] * 20, "two are done, nobody took them"
        # Somebody waits for the last, and it is behind ten others.
        client.gather(groups[-1:], timeout_s=120)
        assert not groups[-1].problems
        # The others are done once they are collected.
        client.gather(groups, timeout_s=120)
        assert not any(group.problems for group in groups)


def test_what_a_cancelled_group_had_done_no_longer_counts(plain: App) -> None:
    with plain.client() as client:
        of_one = client.submit({"prompt": "one", "media": False})
        client.gather([of_one], timeout_s=120)
        num_bytes = ray.get(of_one.samples[0].trajectory).nbytes
    with plain.client(max_bytes_in_flight=int(1.9 * num_bytes)) as client:
        # Else the one that is done would be handed over when the other has begun.
        given_up = client.submit(
            {"prompt": "given up", "num_samples": 2, "media": False, "allow_mixed_versions": True}
        )
        given_up.samples[0].settled.result(120)
        given_up.cancel()
        given_up.settled.result(120)
        assert [sample.done for sample in given_up.samples] == [True, False]
        other = client.submit({"prompt": "another", "media": False})
        other.settled.result(120)
        assert other.samples[0].done


def test_a_group_that_is_cancelled_as_soon_as_it_is_submitted_settles(plain: App) -> None:
    with plain.client() as client:
        groups = [client.submit({"prompt": "never", "num_samples": 4}) for _ in range(20)]
        for group in groups:
            group.cancel()
        groups.append(client.submit({"prompt": "never either"}))
        groups[-1].cancel()
        client.gather(groups, timeout_s=60)
    assert {problem.code for group in groups for problem in group.problems} == {"cancelled"}
    plain.idle()


def test_closing_leaves_no_thread_and_settles_every_group(plain: App) -> None:
    before = set(threading.enumerate())
    client = plain.client()
    group = client.submit({"prompt": "a long way", "num_inference_steps": 100, "num_samples": 8})
    until(plain.held)
    own = {thread for thread in set(threading.enumerate()) - before if thread.name == "rollout-client"}
    assert len(own) == 1
    client.close()
    assert not any(thread.is_alive() for thread in own)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-client"]
    assert [problem.code for problem in group.problems] == ["cancelled"] * 8
    assert isinstance(group.settled, Future) and group.settled.done()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.submit({"prompt": "too late"})
    plain.idle()
