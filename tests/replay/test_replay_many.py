"""Replay of many trajectories: shared forward passes, the same bits, and memory for one pass at a time."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.checkpoint import load
from pipeline.noise import MODALITIES
from pipeline.replay import StepLogProbs, log_probs, log_probs_of_many, micro_batches
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
    counted_passes,
    roll,
)

LARGER: dict[str, Any] = {"height": 96, "width": 96, "num_frames": 17}

NewGroup = Callable[..., list[Rolled]]


@pytest.fixture(scope="module")
def rolled(mixed: dict[tuple[str, bool], list[Rolled]]) -> list[Rolled]:
    """The mixture, guided and unguided, of all kinds."""
    return [one for group in mixed.values() for one in group]


@pytest.fixture
def new_group(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, trajectory: Trajectory
) -> NewGroup:
    """``new_group(n, row_buckets, **request)``: n samples that were submitted together."""

    def new_group(num_samples: int, *row_buckets: int, **request: Any) -> list[Rolled]:
        jobs = [order(k, **request) for k in range(num_samples)]
        return roll(transformer, card, trajectory, *jobs, row_buckets=row_buckets)

    return new_group


def parts(rolled: list[Rolled]) -> tuple[list[TrajectoryView], list[Any]]:
    """Trajectories, and their conditionings."""
    return [one.view for one in rolled], [one.conditioning for one in rolled]


def key(one: StepLogProbs) -> tuple[int, int, float, float]:
    assert one.video is not None and one.audio is not None
    return one.trajectory, one.step, one.video.item(), one.audio.item()


# The same bits


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_mixture_of_everything_comes_back_bit_for_bit(
    with_gradients: bool,
    rolled: list[Rolled],
    transformer: LTX2VideoTransformer3DModel,
    trainable: LTX2VideoTransformer3DModel,
) -> None:
    model = trainable if with_gradients else transformer
    with counted_passes(model) as passes:
        scored = log_probs_of_many(model, *parts(rolled))
    assert len(scored) == len(rolled)
    for index, (own, one) in enumerate(zip(scored, rolled, strict=True)):
        assert {step.trajectory for step in own} == {index}
        assert_the_same_bits(own, one.view)
        assert all(step.video is not None and step.video.requires_grad == with_gradients for step in own)
    assert len(passes) < sum(len(own) for own in scored) / 2
    assert set(passes) <= {1, 2, 4, 8}


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_a_group_takes_as_many_passes_as_the_rollout_did(
    guided: bool, new_group: NewGroup, transformer: LTX2VideoTransformer3DModel
) -> None:
    group = new_group(4, 8, **(GUIDED if guided else {}))
    with counted_passes(transformer) as passes:
        scored = log_probs_of_many(transformer, *parts(group))
    assert passes == [8] * 6
    for own, one in zip(scored, group, strict=True):
        assert_the_same_bits(own, one.view)


def test_rows_of_different_trajectories_and_steps_share_a_pass(
    new_group: NewGroup, transformer: LTX2VideoTransformer3DModel
) -> None:
    group = new_group(4, 4)
    steps = {0: [1], 1: [5], 2: [0], 3: [3]}
    with counted_passes(transformer) as passes:
        scored = log_probs_of_many(transformer, *parts(group), steps)
    assert passes == [4]
    for index, (own,) in enumerate(scored):
        (step,) = steps[index]
        recorded = (group[index].view.manifest[f"log_probs_{modality}"][step] for modality in MODALITIES)
        assert key(own) == (index, step, *recorded)


def test_moves_of_other_sizes_prompts_and_state_dtypes_keep_their_bits(
    new_group: NewGroup, transformer: LTX2VideoTransformer3DModel
) -> None:
    rolled = [
        *new_group(2, 4),
        *new_group(2, 4, **LARGER),
        *new_group(2, 4, state_dtype="bfloat16", prompt="rain on a tin roof"),
        *new_group(3, 4, transition=both("cps"), num_inference_steps=3),
    ]
    views, conditionings = parts(rolled)
    for own, view in zip(log_probs_of_many(transformer, views, conditionings[::-1]), views, strict=True):
        assert_the_same_bits(own, view)


def test_a_guided_move_whose_rows_cannot_share_a_pass_keeps_its_bits(
    new_group: NewGroup, transformer: LTX2VideoTransformer3DModel
) -> None:
    (one,) = new_group(1, 1, **GUIDED)
    with counted_passes(transformer) as passes:
        assert_the_same_bits(log_probs(transformer, one.view, one.conditioning), one.view)
    assert passes == [1] * 12


def test_trajectories_of_several_policy_versions_are_scored_together(
    new_group: NewGroup, transformer: LTX2VideoTransformer3DModel
) -> None:
    views, conditionings = parts(new_group(2, 2))
    views[1] = replace(views[1], manifest=views[1].manifest | {"policy_version": 7})
    for own, view in zip(log_probs_of_many(transformer, views, conditionings), views, strict=True):
        assert_the_same_bits(own, view)


# Which steps


def test_steps_are_the_same_for_all_or_told_by_trajectory(
    new_group: NewGroup, transformer: LTX2VideoTransformer3DModel
) -> None:
    arguments = transformer, *parts(new_group(3, 4))
    same = log_probs_of_many(*arguments, [4, 1])
    assert [[one.step for one in own] for own in same] == [[4, 1]] * 3
    apart = log_probs_of_many(*arguments, {2: [0, 5], 0: [1, 1]})
    assert [[one.step for one in own] for own in apart] == [[1, 1], [], [0, 5]]
    assert key(apart[0][0]) == key(apart[0][1]) == key(same[0][1])
    assert log_probs_of_many(*arguments, []) == [[], [], []]
    assert log_probs_of_many(transformer, [], []) == []


# Micro-batches


def test_micro_batches_give_every_move_once_with_the_same_bits_and_a_pass_each(
    rolled: list[Rolled], transformer: LTX2VideoTransformer3DModel
) -> None:
    rolled = [one for one in rolled if one.view.manifest["log_probs_video"][-1] is not None]
    whole = {key(one) for own in log_probs_of_many(transformer, *parts(rolled)) for one in own}
    with counted_passes(transformer) as passes:
        seen: list[Any] = []
        for num_batches, batch in enumerate(micro_batches(transformer, *parts(rolled)), start=1):
            assert len(passes) == num_batches and batch
            seen += [key(one) for one in batch]
    assert len(seen) == len(set(seen)) == 6 * len(rolled) and set(seen) == whole


@pytest.mark.parametrize("row_buckets", [(8,), (1,)])
def test_gradients_added_up_over_micro_batches_are_those_of_the_whole(
    row_buckets: tuple[int, ...], new_group: NewGroup
) -> None:
    """Each has a graph of its own, also where the rows of a guided move cannot share a pass."""
    group = new_group(3, *row_buckets, **GUIDED)
    trained = load("tiny", "transformer").requires_grad_(True)

    def gradients() -> dict[str, Tensor]:
        taken = {name: parameter.grad.clone() for name, parameter in trained.named_parameters()}
        trained.zero_grad()
        return taken

    total = sum(
        one.video + one.audio for own in log_probs_of_many(trained, *parts(group), [0, 3]) for one in own
    )
    total.backward()
    whole = gradients()
    for batch in micro_batches(trained, *parts(group), [0, 3]):
        sum(one.video + one.audio for one in batch).backward()
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-5, msg=name)
    assert any(gradient.abs().max() > 0.1 for gradient in whole.values())


def test_nothing_is_computed_before_the_first_is_asked_for_but_refusals_come_at_the_call(
    new_group: NewGroup, transformer: LTX2VideoTransformer3DModel
) -> None:
    views, conditionings = parts(new_group(2, 2))
    with counted_passes(transformer) as passes:
        batches = micro_batches(transformer, views, conditionings)
        with pytest.raises(ValueError, match="step 6 of trajectory 0 has no log-prob"):
            micro_batches(transformer, views, conditionings, [2, 6])
        assert passes == []
        next(batches)
        assert passes == [2]


@pytest.mark.parametrize("with_gradients", [False, True])
def test_between_micro_batches_no_tensor_is_held(
    with_gradients: bool,
    new_group: NewGroup,
    transformer: LTX2VideoTransformer3DModel,
    trainable: LTX2VideoTransformer3DModel,
) -> None:
    group = new_group(2, 2)
    model = trainable if with_gradients else transformer
    shape = group[0].view.video_latents.shape[1:]

    def held() -> int:
        """States and velocities of the video."""
        gc.collect()
        return sum(type(one) is Tensor and one.shape[-2:] == shape for one in gc.get_objects())

    before = held()
    for batch in micro_batches(model, *parts(group), [0, 1, 2]):
        if with_gradients:
            torch.autograd.grad(sum(one.video for one in batch), model.proj_in.weight)
        del batch
        assert held() == before


# Smaller passes


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_passes_of_at_most_max_rows_differ_by_rounding_alone(
    max_rows: int, rolled: list[Rolled], transformer: LTX2VideoTransformer3DModel
) -> None:
    with counted_passes(transformer) as passes:
        scored = log_probs_of_many(transformer, *parts(rolled), max_rows=max_rows)
    assert set(passes) <= {1, 2, max_rows}
    for own, one in zip(scored, rolled, strict=True):
        assert len(own) in (5, 6)
        for step in own:
            for modality in MODALITIES:
                recorded = one.view.manifest[f"log_probs_{modality}"][step.step]
                assert getattr(step, modality).item() == pytest.approx(recorded, abs=1e-5)


def test_a_max_rows_that_the_rollout_kept_to_changes_no_bit(
    rolled: list[Rolled], transformer: LTX2VideoTransformer3DModel
) -> None:
    for own, one in zip(log_probs_of_many(transformer, *parts(rolled), max_rows=8), rolled, strict=True):
        assert_the_same_bits(own, one.view)


def test_the_kinds_in_the_mixture_are_all_of_them(rolled: list[Rolled]) -> None:
    """So that the above means something."""
    kinds = {one.view.manifest["request"]["transition"]["video"]["kind"] for one in rolled}
    assert kinds == set(LEVELS)
