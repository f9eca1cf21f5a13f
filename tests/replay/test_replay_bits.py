"""Replay of one trajectory: the log-probs of stored moves come back bit for bit under the rollout's weights."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from peft import LoraConfig

from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.replay import log_probs
from schemas.card import ModelCard
from schemas.trajectory import TrajectoryView
from tests.replay.rollouts import (
    GUIDED,
    LEVELS,
    Order,
    Rolled,
    Trajectory,
    assert_the_same_bits,
    both,
    roll,
)

OneSample = Callable[..., tuple[TrajectoryView, Conditioning]]


def test_the_mixture_has_samples_at_different_steps_in_one_pass_and_at_different_places(
    mixed: dict[tuple[str, bool], list[Rolled]],
) -> None:
    """So that what follows means something."""
    places = [
        [
            (place["positive"]["num_rows"], place["positive"]["index"])
            for place in rolled.view.manifest["places"]
        ]
        for group in mixed.values()
        for rolled in group
    ]
    assert {num_rows for row in places for num_rows, _ in row} >= {2, 4, 8}
    assert max(index for row in places for _, index in row) >= 5
    assert any(before != after for row in places for before, after in pairwise(row))


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
@pytest.mark.parametrize("kind", LEVELS)
def test_replay_gives_the_log_probs_of_a_mixed_batch_bit_for_bit(
    kind: str,
    guided: bool,
    mixed: dict[tuple[str, bool], list[Rolled]],
    transformer: LTX2VideoTransformer3DModel,
    trainable: LTX2VideoTransformer3DModel,
) -> None:
    for rolled in mixed[kind, guided]:
        num_stochastic = 5 if kind == "cps" else 6  # cps has no noise in its last step
        with torch.no_grad():
            scored = log_probs(transformer, rolled.view, rolled.conditioning)
        assert len(scored) == num_stochastic
        assert_the_same_bits(scored, rolled.view)
        assert_the_same_bits(log_probs(trainable, rolled.view, rolled.conditioning), rolled.view)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", LEVELS)
def test_so_it_does_for_states_stored_in_a_narrower_dtype(
    kind: str, state_dtype: str, one_sample: OneSample, trainable: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(transition=both(kind), state_dtype=state_dtype)
    assert view.state_dtype == state_dtype
    assert_the_same_bits(log_probs(trainable, view, conditioning), view)


@pytest.mark.parametrize("kind", LEVELS)
def test_so_it_does_for_the_squared_error(
    kind: str, one_sample: OneSample, trainable: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(transition=both(kind, log_prob_kind="squared_error"))
    scored = log_probs(trainable, view, conditioning, log_prob_kind="squared_error")
    assert_the_same_bits(scored, view)
    assert all(one.video is not None and one.video < 0 for one in scored)


def test_so_it_does_for_a_bfloat16_transformer(card: ModelCard, order: Order, trajectory: Trajectory) -> None:
    narrow = load("tiny", "transformer", dtype="bfloat16")
    jobs = [order(k, **GUIDED) for k in range(2)] + [order(2)]
    trained = load("tiny", "transformer", dtype="bfloat16").requires_grad_(True)
    for one in roll(narrow, card, trajectory, *jobs):
        assert one.view.manifest["execution_profile"]["dtype"] == "bfloat16"
        assert_the_same_bits(log_probs(trained, one.view, one.conditioning), one.view)


def test_so_it_does_for_a_live_adapter_and_only_under_one(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, trajectory: Trajectory
) -> None:
    adapted = load("tiny", "transformer")
    adapted.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    (rolled,) = roll(adapted, card, trajectory, order())
    scored = log_probs(adapted, rolled.view, rolled.conditioning)
    assert_the_same_bits(scored, rolled.view)
    scored[0].video.backward()  # type: ignore[union-attr]
    grads = {
        name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad
    }
    assert grads and all("lora" in name for name in grads)
    assert any(grad is not None and grad.abs().max() > 0 for grad in grads.values())
    with pytest.raises(ValueError, match="lora: here 'none', rollout 'live'"):
        log_probs(transformer, rolled.view, rolled.conditioning)


def test_a_disabled_adapter_scores_the_policy_without_it(
    card: ModelCard, order: Order, trajectory: Trajectory
) -> None:
    """As a trainer does for its reference policy: not the same numbers, and not refused."""
    adapted = load("tiny", "transformer")
    adapted.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    (rolled,) = roll(adapted, card, trajectory, order())
    adapted.disable_adapters()
    (without,) = log_probs(adapted, rolled.view, rolled.conditioning, steps=[2])
    adapted.enable_adapters()
    (with_it,) = log_probs(adapted, rolled.view, rolled.conditioning, steps=[2])
    assert with_it.video.item() == rolled.view.manifest["log_probs_video"][2]  # type: ignore[union-attr]
    assert without.video.item() != with_it.video.item()  # type: ignore[union-attr]


def test_so_it_does_for_a_merged_adapter_and_only_under_one(
    card: ModelCard, order: Order, trajectory: Trajectory
) -> None:
    merged, live = load("tiny", "transformer"), load("tiny", "transformer")
    for seeded in (merged, live):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            seeded.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    merged.fuse_lora()
    (rolled,) = roll(merged, card, trajectory, order())
    assert_the_same_bits(log_probs(merged, rolled.view, rolled.conditioning), rolled.view)
    with pytest.raises(ValueError, match="lora: here 'live', rollout 'merged'"):
        log_probs(live, rolled.view, rolled.conditioning)


def test_a_modality_that_moved_by_ode_has_no_log_prob_beside_one_that_has(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(
        transition={"video": {"kind": "sde"}, "audio": {"kind": "ode"}}, stochastic_steps=[1, 3]
    )
    scored = log_probs(transformer, view, conditioning)
    assert [(one.step, one.audio) for one in scored] == [(1, None), (3, None)]
    assert_the_same_bits(scored, view)


def test_only_the_steps_asked_for_are_scored_in_their_order(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(return_steps=[1, 2, 4, 5])
    scored = log_probs(transformer, view, conditioning, steps=[4, 1])
    assert [one.step for one in scored] == [4, 1]
    assert [one.video.item() for one in scored] == [view.manifest["log_probs_video"][k] for k in (4, 1)]


def test_other_weights_give_other_log_probs(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample()
    moved = load("tiny", "transformer")
    with torch.no_grad():
        moved.proj_out.weight.add_(0.01)
    for before, after in zip(
        log_probs(transformer, view, conditioning), log_probs(moved, view, conditioning), strict=True
    ):
        assert before.video.item() != after.video.item()
        assert abs(before.video.item() - after.video.item()) < 1
