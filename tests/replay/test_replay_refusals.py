"""What replay refuses, in words that name the field, its value, the rule and the remedy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.replay import log_probs, log_probs_of_many
from schemas.trajectory import TrajectoryView
from tests.replay.rollouts import GUIDED, both, counted_passes

OneSample = Callable[..., tuple[TrajectoryView, Conditioning]]


# Another process, another model


def test_another_number_of_threads_is_refused_with_both_numbers(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        numbers = f"here {num_threads + 1}, rollout {num_threads}"
        with pytest.raises(ValueError, match=rf"num_threads: {numbers}\).*adopt\(.*\) to set num_threads"):
            log_probs(transformer, view, conditioning)
    finally:
        torch.set_num_threads(num_threads)


def test_another_dtype_of_the_model_is_refused(one_sample: OneSample) -> None:
    view, conditioning = one_sample()
    with pytest.raises(ValueError, match=r"dtype: here 'bfloat16', rollout 'float32'\); load .*same dtype$"):
        log_probs(load("tiny", "transformer", dtype="bfloat16"), view, conditioning)


def test_another_architecture_is_refused(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample()
    other = LTX2VideoTransformer3DModel.from_config({**transformer.config, "num_layers": 1})
    with pytest.raises(ValueError, match=r"\(transformer: here '\w+', rollout '\w+'\); load the checkpoint"):
        log_probs(other, view, conditioning)


def test_another_schema_version_is_refused(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample()
    other = replace(view, manifest=view.manifest | {"schema_version": 99})
    with pytest.raises(ValueError, match="schema_version of the trajectory must be 1, got 99"):
        log_probs(transformer, other, conditioning)


# Moves without a log-prob


def test_a_step_whose_states_were_not_kept_is_refused_with_the_one_that_is_missing(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(return_steps=[0, 1, 3])
    assert len(log_probs(transformer, view, conditioning, steps=[0])) == 1
    with pytest.raises(ValueError, match=r"state 2 of the trajectory was not kept, only \[0, 1, 3, 6\]"):
        log_probs(transformer, view, conditioning, steps=[1])
    with pytest.raises(ValueError, match="state 2 of the trajectory was not kept"):
        log_probs(transformer, view, conditioning)


@pytest.mark.parametrize("step", [0, 6, -1])
def test_a_step_without_noise_is_refused_with_those_that_have_some(
    step: int, one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(stochastic_steps=[1, 4])
    with pytest.raises(ValueError, match=rf"step {step} of the trajectory has no log-prob.*\[1, 4\]"):
        log_probs(transformer, view, conditioning, steps=[step])


@pytest.mark.parametrize("steps", [None, [0]])
def test_a_trajectory_of_mode_generate_is_refused(
    steps: list[int] | None, one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(mode="generate", num_inference_steps=2)
    with pytest.raises(ValueError, match="mode of the trajectory must be 'rollout', got 'generate'"):
        log_probs(transformer, view, conditioning, steps=steps)


# What does not belong to it


@pytest.mark.parametrize("guided", [{}, GUIDED])
def test_another_conditioning_than_the_rollouts_is_refused(
    guided: dict[str, Any],
    one_sample: OneSample,
    transformer: LTX2VideoTransformer3DModel,
    condition: Callable[..., Conditioning],
) -> None:
    view, _ = one_sample(**guided)
    with pytest.raises(ValueError, match="conditioning must be the one that the trajectory was sampled with"):
        log_probs(transformer, view, condition("another prompt"))


def test_another_kind_of_log_prob_than_the_one_asked_for_is_refused(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    transitions = {**both("sde"), "audio": both("cps", log_prob_kind="squared_error")["audio"]}
    view, conditioning = one_sample(transition=transitions)
    for asked, modality, got in (
        ("density", "audio", "squared_error"),
        ("squared_error", "video", "density"),
    ):
        rule = rf"transition\.{modality}\.log_prob_kind of the trajectory must be '{asked}'.* got '{got}'; "
        with pytest.raises(ValueError, match=rule):
            log_probs(transformer, view, conditioning, log_prob_kind=asked)
    assert len(log_probs(transformer, view, conditioning, steps=[0])) == 1


def test_the_kind_of_a_modality_that_has_no_log_prob_does_not_matter(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    transitions = {**both("sde", log_prob_kind="squared_error"), "audio": {"kind": "ode"}}
    view, conditioning = one_sample(transition=transitions)
    assert log_probs(transformer, view, conditioning, [0], log_prob_kind="squared_error")


@pytest.mark.parametrize("max_rows", [0, -1])
def test_passes_without_rows_are_refused(
    max_rows: int, one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    with pytest.raises(ValueError, match=f"max_rows must be at least 1, got {max_rows}"):
        log_probs(transformer, *one_sample(), max_rows=max_rows)


# Among many


def test_of_many_the_trajectory_is_named_and_nothing_was_computed_yet(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel, condition: Callable[..., Conditioning]
) -> None:
    good, conditioning = one_sample()
    bad = {
        r"schema_version of trajectory 1 must be 1": replace(
            good, manifest=good.manifest | {"schema_version": 2}
        ),
        r"differs from that of trajectory 1,.*dtype: here 'float32', rollout 'int8'": replace(
            good,
            manifest=good.manifest
            | {"execution_profile": good.manifest["execution_profile"] | {"dtype": "int8"}},
        ),
        r"conditioning must be the one that trajectory 1 was sampled with, digest other, got": replace(
            good, manifest=good.manifest | {"conditioning_digest": "other"}
        ),
        r"mode of trajectory 1 must be": one_sample(mode="generate", num_inference_steps=2)[0],
        r"state 1 of trajectory 1 was not kept": one_sample(return_steps=[0])[0],
        r"step 0 of trajectory 1 has no log-prob": one_sample(stochastic_steps=[1])[0],
    }
    with counted_passes(transformer) as passes:
        for rule, view in bad.items():
            with pytest.raises(ValueError, match=rule):
                log_probs_of_many(transformer, [good, view], [conditioning, condition("rain")], [0])
        assert passes == []


@pytest.mark.parametrize("index", [-1, 1])
def test_steps_of_a_trajectory_that_is_not_there_are_refused(
    index: int, one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample()
    with pytest.raises(ValueError, match=rf"by the index of a trajectory, 0 to 0, got {index}"):
        log_probs_of_many(transformer, [view], [conditioning], {index: [0]})
