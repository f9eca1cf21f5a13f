"""A sample that fails on its way fails alone, and its neighbours' numbers stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.conditioning import Conditioning
from pipeline.engine import Engine
from pipeline.entry import Finished
from pipeline.noise import MODALITIES
from pipeline.sample import Job, token_shape
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.checks import geometry_of
from tests.engines import LARGER, NUM_STEPS, Order, RowByRow, StillTransformer, problem_of, sample, settle


def same_numbers(one: Finished, other: Finished) -> bool:
    """Whether every kept state and every log-prob is equal, to the bit."""
    return all(
        torch.equal(a.latents[modality], b.latents[modality])
        for a, b in zip(one.sample.kept, other.sample.kept, strict=True)
        for modality in MODALITIES
    ) and all(
        a is b is None or torch.equal(a, b)
        for modality in MODALITIES
        for a, b in zip(one.sample.log_probs[modality], other.sample.log_probs[modality], strict=True)
    )


def nan_latents(job: Job, card: ModelCard, *where: str) -> dict[str, Tensor]:
    """Initial latents with a NaN in the modalities ``where``."""
    latents = {m: torch.zeros(token_shape(geometry_of(job.request, card), m)) for m in MODALITIES}
    for modality in where:
        latents[modality][0, 0] = float("nan")
    return latents


@pytest.mark.parametrize("modality", MODALITIES)
def test_a_state_with_nan_is_a_failure_that_names_its_modality(
    modality: str, engine: Engine, card: ModelCard, order: Order
) -> None:
    future = engine.submit(order(job={"initial": nan_latents(order(), card, modality)}))
    settle(engine)
    problem = problem_of(future)
    assert problem.code == "non_finite" and problem.field == f"{modality}_latents"


@pytest.mark.parametrize("trouble", ["nan", "forward"])
def test_a_sample_in_trouble_fails_alone_and_its_neighbours_numbers_stay(
    trouble: str,
    transformer: LTX2VideoTransformer3DModel,
    card: ModelCard,
    order: Order,
    condition: Callable[..., Conditioning],
) -> None:
    cursed = condition("a cursed prompt")

    def before(inputs: dict[str, Any]) -> None:
        for text, sigma in zip(inputs["encoder_hidden_states"], inputs["sigma"], strict=True):
            if torch.equal(text, cursed.positive.video) and sigma < 950:
                raise RuntimeError("the kernel gave up")

    def engine() -> Engine:
        return Engine(VelocityModel(RowByRow(transformer, before)), card, row_buckets=(4,))

    bad = {
        "nan": lambda: order(job={"initial": nan_latents(order(), card, "audio")}),
        "forward": lambda: order(prompt="a cursed prompt"),
    }[trouble]()
    good = [order(1), order(2)]
    expected = sample(engine(), good)

    shared = engine()
    first, failed, second = [shared.submit(job) for job in (good[0], bad, good[1])]
    settle(shared)
    problem = problem_of(failed)
    assert problem.code == ("non_finite" if trouble == "nan" else "internal")
    if trouble == "forward":
        assert "step 1 of 6: RuntimeError: the kernel gave up" in problem.rule
    for future, alone in zip((first, second), expected, strict=True):
        assert same_numbers(future.result(timeout=0), alone)


def test_a_geometry_that_does_not_fit_in_memory_fails_alone_with_its_size(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order
) -> None:
    def before(inputs: dict[str, Any]) -> None:
        if inputs["hidden_states"].shape[1] > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine = Engine(VelocityModel(RowByRow(transformer, before)), card, row_buckets=(1, 2))
    large, fitting = engine.submit(order(**LARGER)), engine.submit(order())
    settle(engine)
    problem = problem_of(large)
    assert problem.code == "out_of_memory" and problem.value == "27 video tokens"
    assert f"step 0 of {NUM_STEPS}" in problem.rule and "row_buckets" in problem.remedy
    assert fitting.result(timeout=0).sample.done


def test_a_batch_that_fails_together_is_tried_one_by_one(
    still: StillTransformer, card: ModelCard, order: Order
) -> None:
    def before(inputs: dict[str, Any]) -> None:
        if len(inputs["hidden_states"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine = Engine(VelocityModel(RowByRow(still, before)), card, row_buckets=(1, 2, 4))
    for finished in sample(engine, [order(k) for k in range(3)]):
        assert {(place.positive.num_rows, place.positive.index) for place in finished.sample.places} == {
            (1, 0)
        }
