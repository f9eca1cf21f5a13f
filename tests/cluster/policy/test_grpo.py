"""The GRPO example on the real graph: it learns, resumes, keeps its ratios, and outlives a denoiser."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from apps import READY_S, until
from learning import Learning

from examples.grpo.settings import Settings
from examples.grpo.train import train
from examples.grpo.trainer import Trainer
from tests.weights import fresh, moved

RATIOS = [f"ratio_{modality}_{end}" for modality in ("video", "audio") for end in ("min", "max")]


def settings(**changes: Any) -> Settings:
    request = {"num_inference_steps": 3, "height": 32, "width": 32}
    return Settings(
        **{"group_size": 4, "iterations": 3, "checkpoint_every": 1, "request": request, **changes}
    )


@pytest.fixture
def app(learning: Learning) -> Learning:
    """The app with the checkpoint's own weights."""
    with learning.client() as client:
        client.publish_weights(
            version=learning.next_version(), tensors=fresh().state_dict(), timeout_s=READY_S
        )
    return learning


def test_on_policy_every_first_ratio_is_one_and_all_is_written(app: Learning, tmp_path: Path) -> None:
    rows = train(settings(on_policy=True), tmp_path, app.name)
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert {row[name] for row in rows for name in RATIOS} == {1.0}
    assert {row["staleness"] for row in rows} == {0} and all(row["grad_norm"] > 0 for row in rows)
    assert [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()] == rows
    assert list(tmp_path.glob("events.out.tfevents.*")) and (tmp_path / "checkpoint.pt").exists()
    for name in ("before", "after"):
        with av.open(str(tmp_path / f"{name}-0.mp4")) as container:
            assert sum(1 for _ in container.decode(video=0)) == 9


def test_one_step_off_it_is_not_and_a_checkpoint_goes_on_where_it_was(app: Learning, tmp_path: Path) -> None:
    trainer = Trainer(settings(), str(tmp_path), app.name)
    rows = list(trainer.run())
    trainer.client.close()
    assert [row["staleness"] for row in rows] == [0, 1, 1]
    assert {rows[0][name] for name in RATIOS} == {1.0}
    assert not any(row[name] == 1.0 for row in rows[1:] for name in RATIOS)

    resumed = Trainer(settings(iterations=4), str(tmp_path), app.name, resume=True)
    assert resumed.policy.updates == 3
    pairs = zip(trainer.policy.parameters, resumed.policy.parameters, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    before, after = (t.policy.optimizer.state_dict()["state"] for t in (trainer, resumed))
    assert all(torch.equal(before[key]["exp_avg"], after[key]["exp_avg"]) for key in before)
    (row,) = resumed.run()
    resumed.client.close()
    assert (row["iteration"], row["staleness"]) == (4, 0) and {row[name] for name in RATIOS} == {1.0}


def test_rollouts_that_are_too_old_are_left_out(app: Learning, tmp_path: Path) -> None:
    trainer = Trainer(settings(), str(tmp_path), app.name)
    groups, rewards = trainer.collect(trainer.submit(0))
    trainer.policy.updates += 2
    with pytest.raises(RuntimeError, match="all groups are 2 updates old or more, 1 are allowed"):
        trainer.learn(groups, rewards)
    trainer.client.close()


def test_an_app_that_samples_from_other_weights_is_found_out(learning: Learning, tmp_path: Path) -> None:
    with learning.client() as client:
        others = moved(fresh(), seed=1, scale=0.05)
        client.publish_weights(version=learning.next_version(), tensors=others, timeout_s=READY_S)
    trainer = Trainer(settings(iterations=1), str(tmp_path), learning.name)
    with pytest.raises(RuntimeError, match="beyond the clip range"):
        list(trainer.run())
    trainer.client.close()


def test_a_denoiser_that_is_killed_in_the_middle_costs_time_alone(app: Learning, tmp_path: Path) -> None:
    trainer = Trainer(settings(request={"num_inference_steps": 6}), str(tmp_path), app.name)
    killed: list[str] = []

    def kill_one_at_work() -> None:
        at_work = until(lambda: [status for status in app.ask("Denoiser") if status["progress"]])
        os.kill(at_work[0]["pid"], signal.SIGKILL)
        killed.append(at_work[0]["replica_id"])

    killer = threading.Thread(target=kill_one_at_work)
    killer.start()
    rows = list(trainer.run())
    killer.join()
    trainer.client.close()
    until(lambda: app.are_replaced({killed[0]}, 2))
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert all(row["staleness"] <= 1 and row["left_out"] == 0 for row in rows)
    assert {rows[0][name] for name in RATIOS} == {1.0}
