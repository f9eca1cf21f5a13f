"""A sample's numbers are its own: (seed, k) gives the same ones whoever shares its forward passes.

To the bit where every pass has one row, or where a row's bits do not depend on its place; else to rounding.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from pipeline.checkpoint import load
from pipeline.engine import Engine
from pipeline.noise import MODALITIES, draw, noise_key
from pipeline.sample import Job, Sample
from pipeline.transitions import transition
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.trajectory import read_trajectory
from tests.engines import RowByRow, StillTransformer, sample, settle

Order = Callable[..., Job]
Table = Callable[..., pa.Table]
NewEngine = Callable[[], Engine]

GUIDED: dict[str, Any] = {
    "prompt": "a blue dog",
    "guidance": {"video": 3.0, "audio": 2.0},
    "negative_prompt": "blurry",
}
LARGER: dict[str, Any] = {"height": 96, "width": 96, "num_frames": 17}
OTHER_NOISE: dict[str, Any] = {"transition": {"video": {"kind": "cps"}, "audio": {"kind": "dance"}}}


@pytest.fixture(params=["one row in a pass", "rows without a place"])
def new_engine(
    request: pytest.FixtureRequest, transformer: LTX2VideoTransformer3DModel, card: ModelCard
) -> NewEngine:
    """Engines in which a sample's bits must not depend on the others: one never lets them share a pass, and in the
    other they do, over a model that computes each row by itself."""
    if request.param == "one row in a pass":
        return lambda: Engine(VelocityModel(transformer), card, row_buckets=(1,))
    return lambda: Engine(VelocityModel(RowByRow(transformer)), card, row_buckets=(1, 2, 4, 8))


@pytest.fixture
def alone(new_engine: NewEngine, order: Order, table: Table) -> Table:
    """``alone(k, **request)``: the table of sample k, with an engine to itself."""

    def alone(sample_index: int, **request: Any) -> pa.Table:
        return table(sample(new_engine(), [order(sample_index, **request)])[0])

    return alone


def test_a_sample_is_the_same_in_a_group_as_alone(
    new_engine: NewEngine, order: Order, table: Table, alone: Table
) -> None:
    group = sample(new_engine(), [order(k) for k in range(4)])
    for k, finished in enumerate(group):
        assert table(finished).equals(alone(k))
    assert not table(group[0]).equals(table(group[1]))


def test_a_sample_is_the_same_among_others_of_any_kind_at_any_step(
    new_engine: NewEngine, order: Order, table: Table, alone: Table
) -> None:
    engine = new_engine()
    kinds: list[dict[str, Any]] = [{}, GUIDED, LARGER, OTHER_NOISE, {"num_inference_steps": 3}]
    futures = []
    for k, kind in enumerate(kinds):
        futures.append(engine.submit(order(k, **kind)))
        engine.tick()
    settle(engine)
    for k, (future, kind) in enumerate(zip(futures, kinds, strict=True)):
        assert table(future.result(timeout=0)).equals(alone(k, **kind)), kind


def test_a_sample_is_the_same_after_its_neighbour_was_cancelled(
    new_engine: NewEngine, order: Order, table: Table, alone: Table
) -> None:
    engine = new_engine()
    neighbour = order(0)
    dropped, kept = engine.submit(neighbour), engine.submit(order(1))
    engine.tick()
    engine.tick()
    engine.cancel(neighbour.sample_id)
    settle(engine)
    assert dropped.cancelled()
    assert table(kept.result(timeout=0)).equals(alone(1))


def test_a_sample_is_the_same_from_another_replica_at_another_attempt(
    card: ModelCard, order: Order, table: Table, transformer: LTX2VideoTransformer3DModel
) -> None:
    engines = [
        Engine(VelocityModel(model), card, row_buckets=(1,))
        for model in (transformer, load("tiny", "transformer"))
    ]
    first, second = (
        table(sample(engine, [order(2, job={"attempt": attempt})])[0])
        for attempt, engine in enumerate(engines, start=1)
    )
    assert first.equals(second)
    assert [read_trajectory(one).manifest["attempt"] for one in (first, second)] == [1, 2]


def test_in_passes_of_several_sizes_a_sample_differs_by_rounding_alone(
    model: VelocityModel, card: ModelCard, order: Order, table: Table
) -> None:
    kinds: list[dict[str, Any]] = [{}, GUIDED, LARGER, OTHER_NOISE]
    jobs = [order(k, **kind) for kind in kinds for k in range(3)]
    mixed = sample(Engine(model, card, row_buckets=(1, 2, 4, 8)), jobs)
    for job, finished in zip(jobs, mixed, strict=True):
        (expected,) = sample(Engine(model, card, row_buckets=(1,)), [job])
        one, other = read_trajectory(table(finished)), read_trajectory(table(expected))
        for modality in MODALITIES:
            states = [getattr(view, f"{modality}_latents") for view in (one, other)]
            assert np.abs(states[0] - states[1]).max() < 1e-4
            scores = [view.manifest[f"log_probs_{modality}"] for view in (one, other)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("index", [0, 2])
def test_at_one_place_a_samples_bits_do_not_depend_on_what_the_other_rows_hold(
    index: int, model: VelocityModel, card: ModelCard, order: Order, table: Table
) -> None:
    def among(*others: Job) -> pa.Table:
        jobs = [*others[:index], order(7), *others[index:]]
        finished = sample(Engine(model, card, row_buckets=(4,)), jobs)[index]
        assert {place.positive.index for place in finished.sample.places} == {index}
        return table(finished)

    group = among(order(0), order(1), order(2))
    strangers = among(
        *(
            order(k, prompt="rain on a tin roof", seed=99, sigmas=[0.9, 0.8, 0.5, 0.4, 0.3, 0.1])
            for k in range(3)
        )
    )
    padded = among(*(order(k) for k in range(index)))
    assert group.equals(strangers) and group.equals(padded)


def test_guided_samples_keep_their_bits_at_one_place_too(
    model: VelocityModel, card: ModelCard, order: Order, table: Table
) -> None:
    def beside(neighbour: Job) -> pa.Table:
        return table(sample(Engine(model, card, row_buckets=(4,)), [order(7, **GUIDED), neighbour])[0])

    one = beside(order(0, **GUIDED))
    assert one.equals(beside(order(1, **{**GUIDED, "prompt": "rain", "negative_prompt": "fog", "seed": 99})))


# Noise


def test_which_steps_are_stochastic_changes_the_noise_of_no_other_step(card: ModelCard, order: Order) -> None:
    """At velocity 0 a state follows from the one before it and from the step's noise alone."""
    still = VelocityModel(StillTransformer())

    def noise_of(one: Sample, modality: Any, step: int) -> torch.Tensor:
        """The noise that moved the state away from ``step``, as the states tell."""
        before, after = (one.kept[k].latents[modality].unsqueeze(0) for k in (step, step + 1))
        move = transition(
            "sde",
            before,
            torch.zeros_like(before),
            sigma=one.sigmas[step],
            sigma_next=one.sigmas[step + 1],
            sigma_1=one.sigmas[1],
            noise_level=0.7,
            next_sample=after,
        )
        return (after - move.mean)[0] / move.std

    jobs = [order(3), order(3, stochastic_steps=[4, 1]), order(3, stochastic_steps=[1])]
    all_steps, two_steps, one_step = (
        finished.sample for finished in sample(Engine(still, card, row_buckets=(1,)), jobs)
    )
    for modality in MODALITIES:
        for one, steps in ((all_steps, range(6)), (two_steps, (1, 4)), (one_step, (1,))):
            assert [value is not None for value in one.log_probs[modality]] == [k in steps for k in range(6)]
            for step in steps:
                drawn = draw(noise_key(5, 3, modality, step), tuple(one.latents[modality].shape))
                torch.testing.assert_close(noise_of(one, modality, step), drawn, rtol=1e-4, atol=1e-4)
        for step in (0, 2, 3, 5):  # by ode at velocity 0 the state stays
            before, after = (two_steps.kept[k].latents[modality] for k in (step, step + 1))
            assert torch.equal(before, after)


def test_the_initial_noise_is_shared_where_it_was_asked_for_and_only_there(
    card: ModelCard, order: Order
) -> None:
    engine = Engine(VelocityModel(StillTransformer()), card, row_buckets=(4,))
    own = [one.sample for one in sample(engine, [order(k) for k in range(2)])]
    shared = [one.sample for one in sample(engine, [order(k, shared_initial_noise=True) for k in range(2)])]
    for modality in MODALITIES:
        first, second = (one.kept[0].latents[modality] for one in shared)
        assert torch.equal(first, second)
        assert torch.equal(first, draw(noise_key(5, "shared", modality, "init"), tuple(first.shape)))
        assert not torch.equal(shared[0].latents[modality], shared[1].latents[modality])
        for k, one in enumerate(own):
            expected = draw(noise_key(5, k, modality, "init"), tuple(first.shape))
            assert torch.equal(one.kept[0].latents[modality], expected)


def test_sampling_leaves_the_global_generator_alone(
    model: VelocityModel, card: ModelCard, order: Order
) -> None:
    before = torch.get_rng_state()
    sample(Engine(model, card, row_buckets=(1,)), [order(num_inference_steps=2)])
    assert torch.equal(before, torch.get_rng_state())
