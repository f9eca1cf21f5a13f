"""The GRPO example on the real graph: it learns, resumes, keeps its ratios, and outlives a denoiser."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import av
import pytest
import ray
import torch
from apps import READY_S, until
from learning import Learning

from examples.grpo.policy import Policy
from examples.grpo.rewards import redness
from examples.grpo.settings import Settings
from examples.grpo.train import train
from examples.grpo.trainer import Trainer
from schemas.media import read_media
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


def test_a_group_whose_reward_fails_is_left_out_and_a_reward_worker_that_dies_is_replaced(
    app: Learning, tmp_path: Path
) -> None:
    of_ones_own = {
        "video_reward": "tests.rewards:of_red_balls",
        "prompts": ("a red ball", "a blue door"),
        "groups_per_iteration": 2,
    }
    trainer = Trainer(settings(**of_ones_own, iterations=9, checkpoint_every=9), str(tmp_path), app.name)
    running, rows = trainer.run(), []
    for _ in range(3):
        rows.append(next(running))
        ray.kill(next(trainer.reward_workers), no_restart=False)
    running.close()  # as when it fails
    trainer.client.close()
    assert [row["left_out"] for row in rows] == [1, 1, 1]
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["updates"] == 3, (
        "what it learned is kept"
    )

    only_doors = settings(**{**of_ones_own, "prompts": ("a blue door",)})
    trainer = Trainer(only_doors, str(tmp_path), app.name)
    with pytest.raises(RuntimeError, match="a blue door is no red ball"):
        next(trainer.run())
    trainer.client.close()


def test_the_iteration_in_the_docs_is_one(app: Learning) -> None:
    page = (Path(__file__).parents[3] / "docs/trainers.md").read_text()
    code = page.partition("An iteration of GRPO in full")[2].partition("```python\n")[2].partition("```")[0]
    policy = Policy(settings())
    worker = ray.remote(num_cpus=0)(Redness).remote()
    with app.client() as client:
        version = app.next_version()
        client.publish_weights(
            version=version,
            tensors=policy.adapter(),
            update="lora",
            lora_config=policy.lora,
            timeout_s=READY_S,
        )
        before = {name: value.clone() for name, value in policy.adapter().items()}
        names: dict[str, Any] = {
            "client": client,
            "transformer": policy.transformer,
            "lora": policy.lora,
            "optimizer": policy.optimizer,
            "worker": worker,
            "prompts": ["a red ball", "a blue door"],
            "version": version,
        }
        exec(code.replace('"num_samples": 16', '"num_samples": 4, "num_inference_steps": 3'), names)
        assert client.policy_version().control.version == names["version"] == version + 1
    assert len(names["samples"]) == 8 and names["ratio"].item() == 1.0
    assert any(not torch.equal(value, before[name]) for name, value in policy.adapter().items())


class Redness:
    """A reward worker as the docs have it."""

    def score(self, media: Any) -> float:
        return redness(read_media(media))


def test_an_app_that_samples_from_other_weights_is_found_out(learning: Learning, tmp_path: Path) -> None:
    with learning.client() as client:
        others = moved(fresh(), seed=1, scale=0.05)
        client.publish_weights(version=learning.next_version(), tensors=others, timeout_s=READY_S)
    trainer = Trainer(settings(iterations=1), str(tmp_path), learning.name)
    with pytest.raises(RuntimeError, match="the app samples from other weights"):
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
