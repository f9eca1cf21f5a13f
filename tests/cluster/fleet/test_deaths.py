"""What is lost when a process dies: nothing that its caller still wants, and everything that nobody waits for."""

import os
import signal
import time
from typing import Any

import pyarrow as pa
import pytest
import ray
from apps import App, until
from variants import SLOWLY, STEP_S

from deployments.client import RolloutClient
from deployments.group import RolloutGroup
from schemas.trajectory import read_trajectory

LEASE_S, PULSE_S = 4.0, 0.25
"""As the app `four` has them."""
SLACK_S = 0.5
"""A step, and a busy machine."""
MIB = 2**20


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def tables(group: RolloutGroup) -> list[pa.Table]:
    group.raise_if_failed()
    return [ray.get(sample.trajectory) for sample in group.samples]


def attempts(group: RolloutGroup) -> list[int]:
    return [read_trajectory(table).manifest["attempt"] for table in tables(group)]


def sampled(app: App, **request: Any) -> RolloutGroup:
    """An undisturbed group."""
    with app.client() as client:
        (group,) = client.gather([client.submit(request)], timeout_s=240)
    return group


def samples_of(status: dict[str, Any], group: RolloutGroup) -> set[int]:
    """Indices of the group's samples that a denoiser holds."""
    held = (sample_id.split("/") for sample_id in status["progress"])
    return {int(index) for group_id, index, _ in held if group_id == group.group_id}


def test_a_denoiser_dies_and_its_samples_are_sampled_again_with_the_same_bits(four: App) -> None:
    request = {"prompt": "a group", "num_samples": 12, "seed": 11, "num_inference_steps": 12, "media": False}
    undisturbed = sampled(four, **request)
    with four.client() as client:
        group = client.submit(request)

        def in_the_middle() -> list[dict[str, Any]] | None:
            statuses = four.ask("Denoiser")
            stepped = all(any(done > 2 for done, _ in status["progress"].values()) for status in statuses)
            return statuses if stepped else None

        victim = until(in_the_middle)[0]
        lost = samples_of(victim, group)
        kill(victim["pid"])
        client.gather([group], timeout_s=240)
    assert len(lost) == 3
    assert attempts(group) == [2 if index in lost else 1 for index in range(12)]
    assert [sample.attempt for sample in group.samples] == attempts(group)
    for before, after in zip(tables(undisturbed), tables(group), strict=True):
        assert before.equals(after)
    assert attempts(undisturbed) == [1] * 12


def test_the_text_encoder_dies_in_the_middle_of_a_call_and_the_call_is_made_again(four: App) -> None:
    request = {"prompt": f"a word is heard {SLOWLY}", "num_samples": 2, "seed": 4, "media": False}
    undisturbed = sampled(four, **request)
    (encoder,) = four.ask("TextEncoder")
    with four.client() as client:
        group = client.submit(request)
        until(lambda: four.ask("TextEncoder")[0]["num_calls"] > encoder["num_calls"])
        kill(encoder["pid"])
        client.gather([group], timeout_s=240)
    assert four.ask("TextEncoder")[0]["pid"] != encoder["pid"]
    assert attempts(group) == [1, 1]
    for before, after in zip(tables(undisturbed), tables(group), strict=True):
        assert before.equals(after)


def test_the_decoder_dies_in_the_middle_of_a_call_and_the_sample_is_still_made(four: App) -> None:
    request = {"prompt": f"a door opens {SLOWLY}", "num_samples": 2, "seed": 4}
    undisturbed = sampled(four, **request)
    (decoder,) = four.ask("AVDecoder")
    with four.client() as client:
        group = client.submit(request)
        until(lambda: four.ask("AVDecoder")[0]["num_calls"] > decoder["num_calls"])
        kill(decoder["pid"])
        client.gather([group], timeout_s=240)
    assert four.ask("AVDecoder")[0]["pid"] != decoder["pid"]
    assert attempts(group) == [1, 1], "what the denoiser had made is decoded"
    for before, after in zip(undisturbed.samples, group.samples, strict=True):
        one, other = ray.get(before.media), ray.get(after.media)
        assert one["video"].equals(other["video"]) and one["audio"].equals(other["audio"])
    for before, after in zip(tables(undisturbed), tables(group), strict=True):
        assert before.equals(after)


def test_the_lease_board_dies_and_no_sample_is_lost(four: App) -> None:
    (board,) = four.ask("LeaseBoard")
    with four.client() as client:
        group = client.submit(
            {"prompt": "unnoticed", "num_samples": 4, "num_inference_steps": 70, "media": False}
        )
        until(lambda: len(four.held()) == 4)
        kill(board["pid"])
        client.gather([group], timeout_s=240)
    assert four.ask("LeaseBoard")[0]["pid"] != board["pid"]
    assert attempts(group) == [1] * 4


@ray.remote(num_cpus=0)
class Trainer:
    """Submits, holds what is done, and says who it is."""

    def __init__(self, app_name: str) -> None:
        self.client = RolloutClient.connect(app_name)
        self.groups: list[RolloutGroup] = []

    def pid(self) -> int:
        return os.getpid()

    def submit(self, request: dict[str, Any]) -> None:
        self.groups.append(self.client.submit(request))

    def gathered_bytes(self) -> int:
        return sum(
            table.nbytes
            for group in self.client.gather(self.groups, timeout_s=240)
            for table in tables(group)
        )


def stored_bytes() -> float:
    """Bytes in use in the object store of this machine."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return float(total["object_store_memory"] - free.get("object_store_memory", 0.0))


def test_a_trainer_dies_and_its_work_ends_within_its_lease(four: App) -> None:
    large = {"height": 512, "width": 512, "num_frames": 17, "return_steps": "all"}
    kept = {"prompt": "many states", "num_samples": 4, "num_inference_steps": 5, "media": False, **large}
    slow = {"prompt": "a long way", "num_samples": 8, "num_inference_steps": 100, "media": False}
    before = stored_bytes()
    trainer = Trainer.remote("four")
    pid = ray.get(trainer.pid.remote())
    ray.get(trainer.submit.remote(kept))
    num_bytes = ray.get(trainer.gathered_bytes.remote())
    assert num_bytes > MIB
    ray.get(trainer.submit.remote(slow))
    until(lambda: stored_bytes() >= before + num_bytes)
    held = until(
        lambda: {
            key
            for key, (done, steps) in four.held().items()
            if (steps - done) * STEP_S > LEASE_S + 2 * PULSE_S + SLACK_S
        }
    )
    kill(pid)
    died_at = time.time()
    until(lambda: stored_bytes() < before + num_bytes / 2)
    assert time.time() - died_at < LEASE_S
    until(lambda: not four.held())
    ends = {key: end for status in four.ask("Denoiser") for key, end in status["failed"].items()}
    assert max(ends[key] for key in held) - died_at < LEASE_S + 2 * PULSE_S + SLACK_S


def test_a_cancelled_group_stops_within_one_step_and_what_was_queued_never_starts(four: App) -> None:
    slow = {"prompt": "a long way", "num_samples": 4, "num_inference_steps": 100, "media": False}

    def steps_of(group: RolloutGroup) -> list[int]:
        return [done for key, (done, _) in four.held().items() if key.startswith(group.group_id)]

    with four.client() as client:
        running = client.submit(slow)
        until(lambda: sum(done > 0 for done in steps_of(running)) == 4)
        queued = client.submit(slow)
        until(lambda: steps_of(queued) == [0] * 4)
        queued.cancel()
        queued.settled.result(60)
        until(lambda: not steps_of(queued))
        assert len(steps_of(running)) == 4, "whom nobody cancelled"
        running.cancel()
        running.settled.result(60)
        until(lambda: not steps_of(running))
    for group in (running, queued):
        assert [problem.code for problem in group.problems] == ["cancelled"] * 4
    stops = [stop for status in four.ask("Denoiser") for stop in status["cancelled"]]
    of_running = [stop for stop in stops if stop["sample_id"].startswith(running.group_id)]
    assert len(of_running) == 4
    assert all(stop["steps_after"] <= 1 for stop in of_running), of_running


def test_an_expired_group_says_so_and_how_far_it_came(four: App) -> None:
    with four.client() as client:
        group = client.submit(
            {
                "prompt": "too long",
                "num_samples": 5,
                "num_inference_steps": 100,
                "deadline_s": 1.5,
                "media": False,
            }
        )
        client.gather([group], timeout_s=60)
    assert len(group.problems) == 5
    for problem in group.problems:
        assert (problem.code, problem.field, problem.value) == ("deadline_exceeded", "deadline_s", 1.5)
        assert "not done in time, at step" in problem.rule and problem.remedy
    with pytest.raises(TimeoutError, match="not done in time"):
        group.raise_if_failed()
    four.idle()
