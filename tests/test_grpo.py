"""The parts of examples/grpo that need no cluster: advantages, the clipped loss, rewards, a step of learning, the arguments."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from pydantic import ValidationError

from examples.grpo.loss import advantages, clipped_loss, kl, shuffled
from examples.grpo.policy import Policy
from examples.grpo.rewards import PITCH_HZ, REWARDS, RewardWorker, loudness, named, redness
from examples.grpo.settings import Settings
from pipeline.engine import Engine
from pipeline.replay import log_probs_of_many
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.media import MediaView, pack_media, read_media
from schemas.trajectory import TrajectoryView
from tests.engines import sample

SAMPLE_RATE = 48_000


def media(color: tuple[int, int, int] = (0, 0, 0), *tones: tuple[float, float]) -> MediaView:
    """A picture of one color, and a sum of tones (frequency, amplitude) in both channels."""
    time = np.arange(SAMPLE_RATE // 3) / SAMPLE_RATE
    sound = sum(amplitude * np.sin(2 * np.pi * frequency * time) for frequency, amplitude in tones)
    waveform = np.broadcast_to(np.float32(sound), (2, len(time))).copy()
    frames = np.broadcast_to(np.uint8(color), (3, 4, 6, 3)).copy()
    return read_media(pack_media(frames, 24.0, waveform, SAMPLE_RATE, {}))


def test_advantages_compare_a_sample_with_its_own_group_alone() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [101.0, 102.0, 103.0, 106.0]])
    found = advantages(rewards)
    torch.testing.assert_close(found.mean(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std(dim=1, unbiased=False), torch.ones(2))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)
    assert found.argmax(dim=1).tolist() == [3, 3]


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert not advantages(torch.full((1, 5), 0.3)).any()


def test_shuffled_advantages_stay_in_their_group() -> None:
    values = torch.arange(12.0).reshape(2, 6)
    found = shuffled(values, torch.Generator().manual_seed(1))
    assert torch.equal(found.sort(dim=1).values, values) and not torch.equal(found, values)
    assert not torch.equal(found[0].argsort(), found[1].argsort())


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_on_policy_the_ratio_is_one_and_the_gradient_the_advantage(advantage: float) -> None:
    log_prob = torch.tensor(-0.9, requires_grad=True)
    loss, ratio = clipped_loss(log_prob, float(log_prob.detach()), advantage, 0.01)
    loss.backward()
    assert ratio == 1.0 and loss.item() == -advantage
    assert log_prob.grad is not None and log_prob.grad.item() == -advantage


@pytest.mark.parametrize(
    ("moved", "advantage", "has_gradient"),
    [(0.05, 1.0, False), (0.05, -1.0, True), (-0.05, -1.0, False), (-0.05, 1.0, True)],
)
def test_past_the_clip_range_only_the_way_back_has_a_gradient(
    moved: float, advantage: float, has_gradient: bool
) -> None:
    log_prob = torch.tensor(-0.9 + moved, requires_grad=True)
    loss, ratio = clipped_loss(log_prob, -0.9, advantage, 0.01)
    loss.backward()
    assert ratio == pytest.approx(math.exp(moved), rel=1e-5)
    assert log_prob.grad is not None and bool(log_prob.grad) is has_gradient


def test_the_distance_to_the_reference_is_zero_at_it_and_positive_elsewhere() -> None:
    reference = torch.tensor([-1.0, -1.0, -1.0])
    found = kl(torch.tensor([-1.1, -1.0, -0.9]), reference)
    assert found[1] == 0 and (found[[0, 2]] > 0).all()


def test_redness_is_that_of_the_color() -> None:
    assert redness(media((255, 0, 0))) == 1.0
    assert redness(media((0, 255, 0))) == -0.5
    assert redness(media((90, 90, 90))) == pytest.approx(0)


def test_loudness_is_the_level_at_the_pitch_and_nowhere_else() -> None:
    assert loudness(media((0, 0, 0), (PITCH_HZ, 1.0))) == pytest.approx(0, abs=0.3)
    half = loudness(media((0, 0, 0), (PITCH_HZ, 0.5), (3 * PITCH_HZ, 0.9)))
    assert half == pytest.approx(20 * math.log10(0.5), abs=0.3)
    assert loudness(media((0, 0, 0), (2 * PITCH_HZ, 1.0))) < -50
    assert loudness(media()) == pytest.approx(-120)


def test_a_reward_of_ones_own_is_named_by_its_module() -> None:
    assert named("redness") is REWARDS["redness"]
    assert named("examples.grpo.rewards:loudness") is loudness
    with pytest.raises(ValueError, match=r"redness, loudness or .*, got 'blueness'"):
        named("blueness")


def test_a_worker_gives_each_modality_its_reward() -> None:
    tables = pack_media(
        np.full((1, 2, 2, 3), 50, np.uint8), 24.0, np.zeros((2, 4800), np.float32), 48_000, {}
    )
    worker = RewardWorker({"video": "redness", "audio": "loudness"})
    assert worker.score(tables) == {"video": 0.0, "audio": pytest.approx(-120)}


def given(*words: str) -> Settings:
    """The settings that train.py makes of its arguments."""
    return tyro.cli(Settings, args=words)


def test_every_setting_is_an_argument_and_keeps_its_default() -> None:
    assert given() == Settings()
    words = ["--on-policy", "--seed", "3", "--prompts", "a, b", "c", "--request", '{"height": 64}']
    assert given(*words, "--max-rows", "2") == Settings(
        on_policy=True, seed=3, prompts=("a, b", "c"), request={"height": 64}, max_rows=2
    )


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("group_size", 1, "greater than or equal to 2"),
        ("prompts", (), "at least 1 item"),
        ("audio_weight", -1.0, "greater than or equal to 0"),
        ("clip_range", math.nan, "greater than 0"),
        ("log_prob_kind", "mean", "'density' or 'squared_error'"),
        ("video_reward", "blueness", "redness, loudness or .*, got 'blueness'"),
        ("video_reward", "no.such:thing", "redness, loudness or .*, got 'no.such:thing'"),
        ("audio_reward", "math:pi", "redness, loudness or .*, got 'math:pi'"),
        ("audio_reward", "math:nothing", "redness, loudness or .*, got 'math:nothing'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(field: str, value: object, rule: str) -> None:
    with pytest.raises(ValidationError, match=f"{field}\n  .*{rule}"):
        Settings(**{field: value})  # type: ignore[arg-type]


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


def test_a_modality_of_weight_zero_moves_nothing(
    sampled: Callable[[Policy], list[TrajectoryView]], condition: Any
) -> None:
    both = Policy(Settings(audio_weight=0.0, video_weight=0.0))
    before = {name: value.clone() for name, value in both.adapter().items()}
    row = both.learn(sampled(both), [condition("a red ball")], ADVANTAGES)
    assert row["grad_norm"] == 0
    assert all(torch.equal(value, before[name]) for name, value in both.adapter().items())
    video = Policy(Settings(audio_weight=0.0))
    video.learn(sampled(video), [condition("a red ball")], ADVANTAGES)
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
