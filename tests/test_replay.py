"""Replay: the log-probs of stored moves come back bit for bit under the rollout's weights, and carry gradients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from peft import LoraConfig

from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.engine import Engine, Finished
from pipeline.noise import MODALITIES
from pipeline.replay import StepLogProbs, log_probs
from pipeline.sample import Job
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.trajectory import TrajectoryView
from tests.engines import sample, settle

Order = Callable[..., Job]
Trajectory = Callable[..., TrajectoryView]

LEVELS = {"sde": 0.7, "cps": 0.8, "dance": 0.3}
GUIDED = {"guidance": {"video": 3.0, "audio": 2.0}, "negative_prompt": "blurry"}
BUCKETS = (1, 2, 4, 8)


def both(kind: str, **changes: Any) -> dict[str, Any]:
    """A transition of that kind for video and audio."""
    how = {"kind": kind, "noise_level": LEVELS[kind], **changes}
    return {"video": how, "audio": how}


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """A finished sample, and what it was conditioned on."""

    finished: Finished
    conditioning: Conditioning


def roll(transformer: LTX2VideoTransformer3DModel, card: ModelCard, *jobs: Job) -> list[Rolled]:
    engine = Engine(VelocityModel(transformer), card, row_buckets=BUCKETS)
    return [
        Rolled(finished=finished, conditioning=job.conditioning)
        for finished, job in zip(sample(engine, jobs), jobs, strict=True)
    ]


@pytest.fixture(scope="module")
def mixed(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order
) -> dict[tuple[str, bool], list[Rolled]]:
    """Two samples of every kind, guided and not, that came one after the other and shared their passes."""
    engine = Engine(VelocityModel(transformer), card, row_buckets=BUCKETS)
    jobs = {
        (kind, guided): [order(k, transition=both(kind), **(GUIDED if guided else {})) for k in range(2)]
        for guided in (False, True)
        for kind in LEVELS
    }
    futures = {}
    for key, group in jobs.items():
        futures[key] = [engine.submit(job) for job in group]
        engine.tick()
    settle(engine)
    return {
        key: [
            Rolled(finished=future.result(timeout=0), conditioning=job.conditioning)
            for future, job in zip(futures[key], jobs[key], strict=True)
        ]
        for key in jobs
    }


@pytest.fixture(scope="module")
def trainable() -> LTX2VideoTransformer3DModel:
    """The same weights, of which each asks for a gradient."""
    return load("tiny", "transformer").requires_grad_(True)


@pytest.fixture
def one_sample(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, trajectory: Trajectory
) -> Callable[..., tuple[TrajectoryView, Conditioning]]:
    """``one_sample(**request)``: its trajectory and its conditioning."""

    def one_sample(**request: Any) -> tuple[TrajectoryView, Conditioning]:
        (rolled,) = roll(transformer, card, order(**request))
        return trajectory(rolled.finished), rolled.conditioning

    return one_sample


def assert_the_same_bits(scored: list[StepLogProbs], view: TrajectoryView) -> None:
    """Every stochastic step was scored, and with the manifest's numbers."""
    recorded = {modality: view.manifest[f"log_probs_{modality}"] for modality in MODALITIES}
    assert [one.step for one in scored] == [
        step
        for step in range(view.manifest["num_steps"])
        if any(recorded[m][step] is not None for m in MODALITIES)
    ]
    assert scored
    for one in scored:
        for modality in MODALITIES:
            value = getattr(one, modality)
            assert (None if value is None else value.item()) == recorded[modality][one.step], (
                one.step,
                modality,
            )


# The same bits


def test_the_mixture_has_samples_at_different_steps_in_one_pass_and_at_different_places(
    mixed: dict[tuple[str, bool], list[Rolled]],
) -> None:
    """So that what follows means something."""
    places = [
        [p.positive for p in rolled.finished.sample.places] for group in mixed.values() for rolled in group
    ]
    assert {place.num_rows for row in places for place in row} >= {2, 4, 8}
    assert max(place.index for row in places for place in row) >= 5
    assert any(before != after for row in places for before, after in pairwise(row))


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
@pytest.mark.parametrize("kind", LEVELS)
def test_replay_gives_the_log_probs_of_a_mixed_batch_bit_for_bit(
    kind: str,
    guided: bool,
    mixed: dict[tuple[str, bool], list[Rolled]],
    transformer: LTX2VideoTransformer3DModel,
    trainable: LTX2VideoTransformer3DModel,
    trajectory: Trajectory,
) -> None:
    for rolled in mixed[kind, guided]:
        view = trajectory(rolled.finished)
        num_stochastic = 5 if kind == "cps" else 6  # cps has no noise in its last step
        with torch.no_grad():
            scored = log_probs(transformer, view, rolled.conditioning)
        assert len(scored) == num_stochastic
        assert_the_same_bits(scored, view)
        assert_the_same_bits(log_probs(trainable, view, rolled.conditioning), view)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", LEVELS)
def test_so_it_does_for_states_stored_in_a_narrower_dtype(
    kind: str,
    state_dtype: str,
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]],
    trainable: LTX2VideoTransformer3DModel,
) -> None:
    view, conditioning = one_sample(transition=both(kind), state_dtype=state_dtype)
    assert view.state_dtype == state_dtype
    assert_the_same_bits(log_probs(trainable, view, conditioning), view)


@pytest.mark.parametrize("kind", LEVELS)
def test_so_it_does_for_the_squared_error(
    kind: str,
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]],
    trainable: LTX2VideoTransformer3DModel,
) -> None:
    view, conditioning = one_sample(transition=both(kind, log_prob_kind="squared_error"))
    scored = log_probs(trainable, view, conditioning)
    assert_the_same_bits(scored, view)
    assert all(one.video is not None and one.video < 0 for one in scored)


def test_so_it_does_for_a_bfloat16_transformer(card: ModelCard, order: Order, trajectory: Trajectory) -> None:
    narrow = load("tiny", "transformer", dtype="bfloat16")
    jobs = [order(k, **GUIDED) for k in range(2)] + [order(2)]
    rolled = roll(narrow, card, *jobs)
    trained = load("tiny", "transformer", dtype="bfloat16").requires_grad_(True)
    for one in rolled:
        view = trajectory(one.finished, of=narrow)
        assert view.manifest["execution_profile"]["dtype"] == "bfloat16"
        assert_the_same_bits(log_probs(trained, view, one.conditioning), view)


def test_so_it_does_for_a_live_adapter_and_only_under_one(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, trajectory: Trajectory
) -> None:
    adapted = load("tiny", "transformer")
    adapted.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    (rolled,) = roll(adapted, card, order())
    view = trajectory(rolled.finished, of=adapted)
    scored = log_probs(adapted, view, rolled.conditioning)
    assert_the_same_bits(scored, view)
    scored[0].video.backward()  # type: ignore[union-attr]
    grads = {
        name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad
    }
    assert grads and all("lora" in name for name in grads)
    assert any(grad is not None and grad.abs().max() > 0 for grad in grads.values())
    with pytest.raises(ValueError, match="lora: here 'none', rollout 'live'"):
        log_probs(transformer, view, rolled.conditioning)


def test_a_modality_that_moved_by_ode_has_no_log_prob_beside_one_that_has(
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]], transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(
        transition={"video": {"kind": "sde"}, "audio": {"kind": "ode"}}, stochastic_steps=[1, 3]
    )
    scored = log_probs(transformer, view, conditioning)
    assert [(one.step, one.audio) for one in scored] == [(1, None), (3, None)]
    assert_the_same_bits(scored, view)


def test_only_the_steps_asked_for_are_scored_in_their_order(
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]], transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(return_steps=[1, 2, 4, 5])
    scored = log_probs(transformer, view, conditioning, steps=[4, 1])
    assert [one.step for one in scored] == [4, 1]
    assert [one.video.item() for one in scored] == [view.manifest["log_probs_video"][k] for k in (4, 1)]


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_gradients_flow_to_every_parameter_and_are_finite(
    guided: bool, mixed: dict[tuple[str, bool], list[Rolled]], trajectory: Trajectory
) -> None:
    trained = load("tiny", "transformer").requires_grad_(True)
    rolled = mixed["sde", guided][0]
    scored = log_probs(trained, trajectory(rolled.finished), rolled.conditioning, steps=[0, 3])
    total = sum(getattr(one, modality) for one in scored for modality in MODALITIES)
    total.backward()
    grads = {name: parameter.grad for name, parameter in trained.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None] == []
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert [name for name, grad in grads.items() if not grad.any()] == []


def test_each_modalitys_log_prob_reaches_the_other_modalitys_branch(
    trainable: LTX2VideoTransformer3DModel, one_sample: Callable[..., tuple[TrajectoryView, Conditioning]]
) -> None:
    """Both attend to each other, so replay must feed both stored states to both."""
    view, conditioning = one_sample()
    (scored,) = log_probs(trainable, view, conditioning, steps=[2])
    for log_prob, weight in (
        (scored.video, trainable.audio_proj_in.weight),
        (scored.audio, trainable.proj_in.weight),
    ):
        (grad,) = torch.autograd.grad(log_prob, weight, retain_graph=True)
        assert grad.abs().max() > 0


def test_other_weights_give_other_log_probs(
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]], transformer: LTX2VideoTransformer3DModel
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


# Refusals


def test_another_number_of_threads_is_refused_with_both_numbers(
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]], transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        numbers = f"here {num_threads + 1}, rollout {num_threads}"
        with pytest.raises(ValueError, match=rf"num_threads: {numbers}\).*torch\.set_num_threads"):
            log_probs(transformer, view, conditioning)
    finally:
        torch.set_num_threads(num_threads)


def test_another_dtype_of_the_model_is_refused(
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]],
) -> None:
    view, conditioning = one_sample()
    with pytest.raises(ValueError, match="dtype: here 'bfloat16', rollout 'float32'"):
        log_probs(load("tiny", "transformer", dtype="bfloat16"), view, conditioning)


def test_a_step_whose_states_were_not_kept_is_refused_with_the_one_that_is_missing(
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]], transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(return_steps=[0, 1, 3])
    assert len(log_probs(transformer, view, conditioning, steps=[0])) == 1
    with pytest.raises(ValueError, match=r"state 2 was not kept, only \[0, 1, 3, 6\]"):
        log_probs(transformer, view, conditioning, steps=[1])
    with pytest.raises(ValueError, match="state 2 was not kept"):
        log_probs(transformer, view, conditioning)


@pytest.mark.parametrize("step", [0, 6, -1])
def test_a_step_without_noise_is_refused_with_those_that_have_some(
    step: int,
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]],
    transformer: LTX2VideoTransformer3DModel,
) -> None:
    view, conditioning = one_sample(stochastic_steps=[1, 4])
    with pytest.raises(ValueError, match=rf"step {step} has no log-prob.*\[1, 4\]"):
        log_probs(transformer, view, conditioning, steps=[step])


def test_another_schema_version_is_refused(
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]], transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample()
    other = replace(view, manifest=view.manifest | {"schema_version": 99})
    with pytest.raises(ValueError, match="schema_version of the trajectory must be 1, got 99"):
        log_probs(transformer, other, conditioning)


@pytest.mark.parametrize("steps", [None, [0]])
def test_a_trajectory_of_mode_generate_is_refused(
    steps: list[int] | None,
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]],
    transformer: LTX2VideoTransformer3DModel,
) -> None:
    view, conditioning = one_sample(mode="generate", num_inference_steps=2)
    with pytest.raises(ValueError, match="mode of the trajectory must be 'rollout', got 'generate'"):
        log_probs(transformer, view, conditioning, steps=steps)


@pytest.mark.parametrize("guided", [{}, GUIDED])
def test_another_conditioning_than_the_rollouts_is_refused(
    guided: dict[str, Any],
    one_sample: Callable[..., tuple[TrajectoryView, Conditioning]],
    transformer: LTX2VideoTransformer3DModel,
    condition: Callable[..., Conditioning],
) -> None:
    view, _ = one_sample(**guided)
    with pytest.raises(ValueError, match="conditioning must be the one that the trajectory was sampled with"):
        log_probs(transformer, view, condition("another prompt"))
