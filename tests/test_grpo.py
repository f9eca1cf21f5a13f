"""The parts of examples/grpo that need no cluster: advantages, the clipped loss, rewards, a step of learning, the arguments."""

import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from pydantic import ValidationError
from torch.distributions import Normal, kl_divergence

from examples.grpo import train
from examples.grpo.checks import check_app
from examples.grpo.loss import advantages, clipped_loss, kl, shuffled
from examples.grpo.policy import Policy
from examples.grpo.rewards import PITCH_HZ, REWARDS, RewardWorker, loudness, named, redness
from examples.grpo.settings import Settings
from pipeline.engine import Engine
from pipeline.noise import MODALITIES
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


def test_the_distance_to_the_reference_is_that_of_gaussians_per_element() -> None:
    mean, reference = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(1))
    exact = kl_divergence(Normal(mean, 0.3), Normal(reference, 0.3)).mean()
    torch.testing.assert_close(kl(mean, reference, 0.3), exact)
    assert kl(mean, mean, 0.3) == 0


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


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5"])
def test_what_is_no_number_is_no_reward(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RewardWorker({"video": "redness", "audio": "loudness"})
    monkeypatch.setitem(worker.rewards, "audio", lambda _: value)
    tables = pack_media(np.zeros((1, 2, 2, 3), np.uint8), 24.0, np.zeros((2, 4800), np.float32), 48_000, {})
    with pytest.raises(
        ValueError, match=f"audio_reward: 'loudness' must return a finite number, got {value!r}"
    ):
        worker.score(tables)


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
        ("request", {"seed": 3}, "request.seed is the trainer's to set, got 3; leave it out"),
        ("request", {"media": False}, "request.media is the trainer's to set"),
        ("max_staleness", 0, "must be at least 1, got 0; for none, use on_policy"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(field: str, value: object, rule: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){field}.*{rule}"):
        Settings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"model": "small"}, "model must be what the app serves, 'tiny', got 'small'"),
        ({"request": {"heigth": 64}}, "did you mean height"),
        ({"prompts": ("a red ball", "")}, '"field": "prompt"'),
        ({"request": {"transition": {m: {"kind": "ode"} for m in MODALITIES}}}, "must be stochastic"),
        ({"request": {"transition": {"video": {"kind": "ode"}}}, "audio_weight": 0.0}, "must be stochastic"),
        ({"log_prob_kind": "squared_error"}, "log_prob_kind must be that of request.transition, 'density'"),
    ],
)
def test_what_the_app_cannot_give_is_refused_before_anything_is_sampled(
    settings: dict[str, Any], rule: str, card: ModelCard
) -> None:
    check_app(Settings(), card)
    with pytest.raises(ValueError, match=rule):
        check_app(Settings(**settings), card)


def test_a_copy_of_the_example_runs_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(train.__file__).parent, tmp_path / "my_grpo")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("my_grpo.train")
    assert mine.REPOSITORY == train.REPOSITORY
    for name in ("Settings", "Trainer"):
        assert getattr(mine, name).__module__.startswith("my_grpo.")
    assert sys.modules["my_grpo.policy"].clipped_loss.__module__ == "my_grpo.loss"


def test_a_folder_is_begun_once_and_resumed_where_its_checkpoint_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"resume needs a checkpoint, and there is no .*checkpoint\.pt"):
        train.begin(out, resume=True)
    assert train.begin(out, resume=False) == []
    assert train.begin(out, resume=False) == [], "of the first, nothing came"
    lines = [json.dumps({"iteration": number}) + "\n" for number in (1, 2, 3)]
    (out / "history.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match="holds a run; go on with --resume"):
        train.begin(out, resume=False)
    torch.save({"updates": 2}, out / "checkpoint.pt")
    assert train.begin(out, resume=True) == lines[:2]
    assert (out / "history.jsonl").read_text() == "".join(lines[:2])
    with pytest.raises(ValueError, match="out must be a folder, got the file"):
        train.begin(out / "history.jsonl", resume=False)


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


@pytest.mark.parametrize("changed", [{"rank": 4}, {"alpha": 8.0}, {"target_modules": r".*\.to_q"}])
def test_a_checkpoint_of_another_adapter_is_refused_by_name(changed: dict[str, Any], tmp_path: Path) -> None:
    Policy(Settings()).save(tmp_path / "checkpoint.pt")
    (name,) = changed
    with pytest.raises(ValueError, match=f"{name} must be the checkpoint's"):
        Policy(Settings(**changed)).restore(tmp_path / "checkpoint.pt")


def test_a_run_that_has_learned_enough_is_not_resumed(tmp_path: Path) -> None:
    policy = Policy(Settings())
    policy.updates = 50
    policy.save(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="iterations must be above the checkpoint's 50, got 50"):
        Policy(Settings()).restore(tmp_path / "checkpoint.pt")


def test_a_resumed_run_has_the_learning_rate_that_it_asks_for(tmp_path: Path) -> None:
    Policy(Settings()).save(tmp_path / "checkpoint.pt")
    slower = Policy(Settings(learning_rate=1e-5))
    slower.restore(tmp_path / "checkpoint.pt")
    assert [group["lr"] for group in slower.optimizer.param_groups] == [1e-5]


def test_beside_bfloat16_weights_the_adapter_is_float32_and_ratios_begin_at_one(
    sampled: Callable[[Policy], list[TrajectoryView]], condition: Any
) -> None:
    policy = Policy(Settings(dtype="bfloat16"))
    assert {value.dtype for value in policy.adapter().values()} == {torch.float32}
    assert policy.transformer.dtype == torch.bfloat16
    for _ in range(2):
        row = policy.learn(sampled(policy), [condition("a red ball")], ADVANTAGES)
        assert extremes(row) == {1.0}
