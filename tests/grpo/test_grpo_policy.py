"""A step of learning of examples/grpo, without a cluster."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from examples.grpo.policy import Policy
from examples.grpo.settings import Settings
from pipeline.engine import Engine
from pipeline.replay import log_probs_of_many
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.trajectory import TrajectoryView
from tests.engines import sample

ADVANTAGES = {"video": [1.0, -1.0], "audio": [-1.0, 1.0]}


@pytest.fixture
def sampled(order: Any, trajectory: Any, card: ModelCard) -> Callable[[Policy], list[TrajectoryView]]:
    """``sampled(policy)``: two rollouts of it."""

    def sampled(policy: Policy) -> list[TrajectoryView]:
        engine = Engine(VelocityModel(policy.transformer), card, row_buckets=(2,))
        finished = sample(engine, [order(index, num_inference_steps=3) for index in range(2)])
        return [trajectory(one, of=policy.transformer) for one in finished]

    return sampled


def extremes(row: dict[str, float]) -> set[float]:
    return {row[f"ratio_{modality}_{end}"] for modality in ("video", "audio") for end in ("min", "max")}


def total(views: Sequence[TrajectoryView], modality: str) -> list[float]:
    """Of each sample, log-probs summed over the steps."""
    return [sum(view.manifest[f"log_probs_{modality}"]) for view in views]


def test_learning_starts_at_a_ratio_of_one_and_makes_good_samples_likelier(
    sampled: Callable[[Policy], list[TrajectoryView]], condition: Any, tmp_path: Path
) -> None:
    policy = Policy(Settings(epochs=2))
    views, prompt = sampled(policy), [condition("a red ball")]
    row = policy.learn(views, prompt, ADVANTAGES)
    assert extremes(row) == {1.0} and row["clipped_video"] == row["clipped_audio"] == 0
    off = policy.learn(views, prompt, ADVANTAGES)
    assert 1.0 not in extremes(off) and off["ratio_video_min"] < 1 < off["ratio_video_max"]
    with torch.no_grad():
        moves = log_probs_of_many(policy.transformer, views, prompt)
    for modality in ("video", "audio"):
        new = [sum(float(getattr(move, modality)) for move in of_one) for of_one in moves]
        gained = [a - b for a, b in zip(new, total(views, modality), strict=True)]
        better = ADVANTAGES[modality].index(1.0)
        assert gained[better] > gained[1 - better]

    policy.save(tmp_path / "checkpoint.pt")
    other = Policy(Settings(seed=1))
    other.restore(tmp_path / "checkpoint.pt")
    assert other.updates == 2
    assert all(torch.equal(value, other.adapter()[name]) for name, value in policy.adapter().items())
    assert extremes(other.learn(sampled(policy), prompt, ADVANTAGES)) == {1.0}


def test_a_modality_of_weight_zero_moves_nothing_of_its_own(
    sampled: Callable[[Policy], list[TrajectoryView]], condition: Any
) -> None:
    with pytest.raises(ValidationError, match="must not both be 0"):
        Settings(audio_weight=0.0, video_weight=0.0)
    video = Policy(Settings(audio_weight=0.0))
    before = {name: value.clone() for name, value in video.adapter().items()}
    row = video.learn(sampled(video), [condition("a red ball")], {**ADVANTAGES, "audio": [math.nan, 0.0]})
    assert row["ratio_audio_min"] == row["ratio_audio_max"] == 1.0
    moved = {name for name, value in video.adapter().items() if not torch.equal(value, before[name])}
    assert any("proj_out" in name for name in moved)
    assert not any("audio_proj_out" in name for name in moved)


@pytest.mark.parametrize("silent", ["video", "audio"])
def test_rewards_of_a_modality_without_weight_change_no_bit(
    silent: str, sampled: Callable[[Policy], list[TrajectoryView]], condition: Any
) -> None:
    prompt, reversed_ = [condition("a red ball")], {**ADVANTAGES, silent: ADVANTAGES[silent][::-1]}

    def learned(weight: float, advantages: dict[str, list[float]]) -> dict[str, torch.Tensor]:
        policy = Policy(Settings(**{f"{silent}_weight": weight}))  # type: ignore[arg-type]
        policy.learn(sampled(policy), prompt, advantages)
        return policy.adapter()

    def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return any(not torch.equal(value, other[name]) for name, value in one.items())

    assert not differ(learned(0.0, ADVANTAGES), learned(0.0, reversed_))
    assert differ(learned(1.0, ADVANTAGES), learned(1.0, reversed_))


def test_the_distance_to_the_checkpoint_pulls_back(
    sampled: Callable[[Policy], list[TrajectoryView]], condition: Any
) -> None:
    prompt, none = [condition("a red ball")], {"video": [0.0, 0.0], "audio": [0.0, 0.0]}
    policy = Policy(Settings(kl_weight=1.0))
    assert policy.learn(sampled(policy), prompt, none)["grad_norm"] == 0
    policy.learn(sampled(policy), prompt, ADVANTAGES)
    assert policy.learn(sampled(policy), prompt, none)["grad_norm"] > 0
    row = policy.learn(sampled(policy), prompt, none)
    assert row["kl_video"] > 0 and row["kl_audio"] > 0


def test_of_a_modality_that_moves_by_ode_there_is_no_figure(
    order: Any, trajectory: Any, card: ModelCard, condition: Any
) -> None:
    policy = Policy(Settings())
    engine = Engine(VelocityModel(policy.transformer), card, row_buckets=(2,))
    by_ode = {"transition": {"audio": {"kind": "ode"}}, "num_inference_steps": 2}
    finished = sample(engine, [order(index, **by_ode) for index in range(2)])
    views = [trajectory(one, of=policy.transformer) for one in finished]
    row = policy.learn(views, [condition("a red ball")], ADVANTAGES)
    assert "ratio_video_max" in row and not any("audio" in name for name in row)


def test_a_fresh_rollout_of_other_weights_is_refused_before_it_is_learned_from(
    sampled: Callable[[Policy], list[TrajectoryView]], condition: Any
) -> None:
    policy, prompt = Policy(Settings()), [condition("a red ball")]
    views = sampled(policy)
    with torch.no_grad():
        policy.transformer.proj_out.base_layer.weight += 0.05
    before = {name: value.clone() for name, value in policy.adapter().items()}
    with pytest.raises(RuntimeError, match="the app samples from other weights than the trainer's"):
        policy.learn(views, prompt, ADVANTAGES, [0, 1])
    assert policy.updates == 0
    assert all(torch.equal(value, before[name]) for name, value in policy.adapter().items())
    policy.learn(views, prompt, ADVANTAGES, [1, 1])


def test_beside_bfloat16_weights_the_adapter_is_float32_and_ratios_begin_at_one(
    sampled: Callable[[Policy], list[TrajectoryView]], condition: Any
) -> None:
    policy = Policy(Settings(dtype="bfloat16"))
    assert {value.dtype for value in policy.adapter().values()} == {torch.float32}
    assert policy.transformer.dtype == torch.bfloat16
    for _ in range(2):
        row = policy.learn(sampled(policy), [condition("a red ball")], ADVANTAGES)
        assert extremes(row) == {1.0}
