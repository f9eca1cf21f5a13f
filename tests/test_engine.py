"""The step engine: samples come and go between ticks, and what happens to one happens to no other."""

import concurrent.futures
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
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
from schemas.errors import Problem
from tests.engines import Clock, RowByRow, StillTransformer, sample, settle

Order = Callable[..., Job]

NUM_STEPS = 6
"""Of a tiny rollout."""
LARGER = {"height": 96, "width": 96, "num_frames": 17}
"""Another geometry than the default."""


@pytest.fixture
def still() -> StillTransformer:
    return StillTransformer()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(still: StillTransformer, card: ModelCard, clock: Clock) -> Engine:
    """Moves every sample in no time."""
    return Engine(VelocityModel(still), card, row_buckets=(1, 2, 4, 8), clock=clock)


def problem_of(future: Future[Finished]) -> Problem:
    """Why a sample failed, as another process would read it."""
    error = future.exception(timeout=0)
    assert error is not None and type(error) in (ValueError, TimeoutError, RuntimeError)
    problem = Problem.of(error)
    assert problem is not None
    return problem


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


# Batches


def test_a_sample_takes_all_its_steps_and_keeps_the_states_that_were_asked_for(
    engine: Engine, order: Order
) -> None:
    (finished,) = sample(engine, [order(return_steps=[0, 3])])
    assert finished.sample.done and len(finished.sample.places) == NUM_STEPS
    assert [state.step for state in finished.sample.kept] == [0, 3, NUM_STEPS]
    assert [len(finished.sample.log_probs[modality]) for modality in MODALITIES] == [NUM_STEPS] * 2


def test_samples_at_different_steps_share_a_pass_each_with_its_own_sigma(
    engine: Engine, still: StillTransformer, order: Order
) -> None:
    older = engine.submit(order(0))
    engine.tick()
    engine.tick()
    younger = engine.submit(order(1))
    engine.tick()
    sigmas = still.batches[-1]["sigma"]
    settle(engine)
    grid = older.result(timeout=0).sample.sigmas
    assert torch.equal(sigmas, torch.stack([grid[2], grid[0]]) * 1000)
    assert younger.result(timeout=0).sample.done


def test_a_batch_is_padded_to_a_bucket_by_repeating_a_row_and_says_where_each_row_stood(
    engine: Engine, still: StillTransformer, order: Order
) -> None:
    finished = sample(engine, [order(k) for k in range(3)])
    assert {len(batch["hidden_states"]) for batch in still.batches} == {4}
    rows = still.batches[0]["hidden_states"]
    assert torch.equal(rows[3], rows[0]) and not torch.equal(rows[2], rows[0])
    for index, one in enumerate(finished):
        assert {(p.positive.num_rows, p.positive.index, p.negative) for p in one.sample.places} == {
            (4, index, None)
        }


def test_guidance_puts_the_negative_rows_first_and_says_where_both_stood(
    engine: Engine, still: StillTransformer, order: Order, condition: Callable[..., Conditioning]
) -> None:
    guided = {"guidance": {"video": 3.0, "audio": 2.0}, "negative_prompt": "blurry"}
    finished = sample(engine, [order(k, **guided) for k in range(2)])
    contexts = condition("a red ball", "blurry")
    assert contexts.negative is not None
    texts = still.batches[0]["encoder_hidden_states"]
    expected = [contexts.negative.video] * 2 + [contexts.positive.video] * 2
    assert torch.equal(texts, torch.stack(expected))
    for k, one in enumerate(finished):
        place = one.sample.places[0]
        assert place.negative is not None
        assert (place.negative.index, place.positive.index) == (k, 2 + k)


def test_a_sample_of_more_rows_than_the_largest_bucket_takes_several_passes(
    still: StillTransformer, card: ModelCard, order: Order
) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(1,))
    guided = {"guidance": {"video": 3.0}, "negative_prompt": "blurry"}
    (finished,) = sample(engine, [order(**guided)])
    assert [len(batch["hidden_states"]) for batch in still.batches] == [1] * 2 * NUM_STEPS
    assert all(p.positive.index == 0 and p.negative.index == 0 for p in finished.sample.places)


def test_two_geometries_take_turns_and_neither_starves_under_a_stream_of_the_other(
    engine: Engine, still: StillTransformer, order: Order
) -> None:
    """The oldest sample is always in the next batch, so a rare geometry waits for the older samples at most."""
    stream = [engine.submit(order(0)), engine.submit(order(1))]
    engine.tick()
    rare = engine.submit(order(0, **LARGER))
    for tick in range(2 * NUM_STEPS):
        if tick % 2 == 0:
            stream.append(engine.submit(order(len(stream))))
        if rare.done():
            break
        engine.tick()
    assert rare.done(), "it was overtaken"
    assert not all(future.done() for future in stream)
    settle(engine)
    assert all(future.exception(timeout=0) is None for future in [rare, *stream])
    tokens = [batch["hidden_states"].shape[1] for batch in still.batches]
    turns = [size for size, _ in itertools.groupby(tokens)]
    assert len(turns) == 3 and turns[0] == turns[2] != turns[1]


# Letting go


def test_a_cancelled_sample_is_gone_within_one_step_and_its_neighbour_goes_on(
    engine: Engine, still: StillTransformer, order: Order
) -> None:
    job = order(0)
    dropped, kept = engine.submit(job), engine.submit(order(1))
    engine.tick()
    engine.tick()
    engine.cancel(job.sample_id)
    engine.tick()
    assert dropped.cancelled()
    assert [held.sample_index for held, _, _ in engine.progress()] == [1]
    assert len(still.batches[-1]["hidden_states"]) == 1
    settle(engine)
    assert kept.result(timeout=0).sample.done


def test_a_cancelled_future_wakes_those_who_wait_for_it(engine: Engine, order: Order) -> None:
    job = order()
    future = engine.submit(job)
    engine.cancel(job.sample_id)
    engine.tick()
    done, _ = concurrent.futures.wait([future], timeout=0)
    assert done == {future}


def test_a_waiting_sample_can_be_cancelled(still: StillTransformer, card: ModelCard, order: Order) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(1,))
    job = order(1)
    running, waiting = engine.submit(order(0)), engine.submit(job)
    engine.tick()
    engine.cancel(job.sample_id)
    engine.tick()
    assert waiting.cancelled() and not running.done()


def test_a_holder_who_cancels_the_future_itself_lets_the_sample_go_and_harms_no_neighbour(
    engine: Engine, order: Order
) -> None:
    dropped, kept = engine.submit(order(0)), engine.submit(order(1))
    engine.tick()
    assert dropped.cancel()
    engine.tick()
    assert [held.sample_index for held, _, _ in engine.progress()] == [1]
    settle(engine)
    assert kept.result(timeout=0).sample.done


def test_cancelling_a_sample_that_is_not_here_changes_nothing(engine: Engine, order: Order) -> None:
    future = engine.submit(order())
    engine.cancel("of another replica")
    settle(engine)
    assert future.result(timeout=0).sample.done


@pytest.mark.parametrize("steps_done", [0, 2])
def test_a_sample_whose_time_is_up_fails_with_the_step_it_had_reached(
    steps_done: int, engine: Engine, clock: Clock, order: Order
) -> None:
    late = engine.submit(order(0, deadline_s=30.0, job={"expires_at": clock.now + 30}))
    kept = engine.submit(order(1))
    for _ in range(steps_done):
        engine.tick()
    clock.now += 31
    engine.tick()
    assert isinstance(late.exception(timeout=0), TimeoutError)
    problem = problem_of(late)
    assert problem.code == "deadline_exceeded" and problem.value == 30.0
    assert f"at step {steps_done} of {NUM_STEPS}" in problem.rule
    settle(engine)
    assert kept.result(timeout=0).sample.done


def test_a_sample_expires_while_it_waits_for_its_turn(
    still: StillTransformer, card: ModelCard, clock: Clock, order: Order
) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(1,), clock=clock)
    running = engine.submit(order(0))
    waiting = engine.submit(order(1, job={"expires_at": clock.now + 1}))
    engine.tick()
    clock.now += 2
    engine.tick()
    assert f"at step 0 of {NUM_STEPS}" in problem_of(waiting).rule
    assert not running.done()


def test_samples_live_as_long_as_their_lease_is_renewed(engine: Engine, clock: Clock, order: Order) -> None:
    mine, yours = (
        engine.submit(order(k, job={"lease_id": name})) for k, name in enumerate(("mine", "yours"))
    )
    nobodys = engine.submit(order(2))
    for name in ("mine", "yours"):
        engine.extend_lease(name, 10)
    engine.tick()
    clock.now += 8
    engine.extend_lease("yours", 10)
    engine.tick()
    assert not mine.done()
    clock.now += 3
    engine.tick()
    problem = problem_of(mine)
    assert problem.code == "lease_expired" and problem.value == "mine"
    settle(engine)
    assert yours.result(timeout=0).sample.done and nobodys.result(timeout=0).sample.done


def test_a_lease_that_is_ended_drops_its_samples_at_the_next_tick(
    engine: Engine, clock: Clock, order: Order
) -> None:
    future = engine.submit(order(job={"lease_id": "mine"}))
    engine.tick()
    engine.extend_lease("mine", 0)
    clock.now += 1e-3
    engine.tick()
    assert problem_of(future).code == "lease_expired"


def test_a_lease_that_nobody_has_told_of_yet_is_taken_to_stand(engine: Engine, order: Order) -> None:
    (finished,) = sample(engine, [order(job={"lease_id": "new"})])
    assert finished.sample.done


# Failing alone


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


def test_a_guided_job_without_the_negative_prompts_contexts_is_refused_when_it_is_submitted(
    still: StillTransformer, card: ModelCard, order: Order, condition: Callable[..., Conditioning]
) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(4,))
    job = order(guidance={"video": 2.0}, job={"conditioning": condition("a red ball")})
    with pytest.raises(ValueError, match="must hold the negative prompt's contexts"):
        engine.submit(job)
    assert engine.progress() == []


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


def test_a_request_that_cannot_be_sampled_is_refused_at_submission(engine: Engine, order: Order) -> None:
    job = order()
    with pytest.raises(ValueError, match="height"):
        engine.submit(
            Job(
                sample_id="x",
                request=job.request.model_copy(update={"height": 65}),
                sample_index=0,
                conditioning=job.conditioning,
            )
        )
    assert engine.progress() == []


# The loop


def test_progress_tells_of_every_sample_held_with_its_steps(
    still: StillTransformer, card: ModelCard, order: Order
) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(1,))
    jobs = [order(0), order(1, num_inference_steps=4)]
    for job in jobs:
        engine.submit(job)
    engine.tick()
    engine.tick()
    assert engine.progress() == [(jobs[0], 2, NUM_STEPS), (jobs[1], 0, 4)]
    settle(engine)
    assert engine.progress() == []


def test_times_are_those_of_the_engines_clock(engine: Engine, clock: Clock, order: Order) -> None:
    future = engine.submit(order())
    clock.now += 3
    engine.tick()
    clock.now += 5
    settle(engine)
    finished = future.result(timeout=0)
    assert (finished.wait_s, finished.denoise_s) == (3, 5)


def test_a_tick_with_nothing_to_do_says_so(engine: Engine) -> None:
    assert engine.tick() is False


def test_the_loop_serves_threads_until_it_is_stopped(
    card: ModelCard, model: VelocityModel, order: Order
) -> None:
    engine = Engine(model, card, row_buckets=(1, 2, 4))
    loop = threading.Thread(target=engine.run, daemon=True)
    started = engine.last_beat
    loop.start()
    with concurrent.futures.ThreadPoolExecutor(4) as callers:
        futures = list(callers.map(engine.submit, [order(k, num_inference_steps=2) for k in range(6)]))
    assert all(future.result(timeout=60).sample.done for future in futures)
    assert engine.last_beat > started
    engine.stop()
    loop.join(timeout=60)
    assert not loop.is_alive()


def test_stopping_fails_what_is_held_and_takes_no_more(
    still: StillTransformer, card: ModelCard, order: Order
) -> None:
    forward_began, may_go_on = threading.Event(), threading.Event()

    def before(_: dict[str, Any]) -> None:
        forward_began.set()
        assert may_go_on.wait(timeout=60)

    engine = Engine(VelocityModel(RowByRow(still, before)), card, row_buckets=(1,))
    futures = [engine.submit(order(k)) for k in range(2)]
    loop = threading.Thread(target=engine.run, daemon=True)
    loop.start()
    assert forward_began.wait(timeout=60)
    engine.stop()
    with pytest.raises(RuntimeError, match="replica_died"):
        engine.submit(order(2))
    may_go_on.set()
    loop.join(timeout=60)
    for future in futures:
        problem = problem_of(future)
        assert problem.code == "replica_died" and "stopped" in problem.rule
    assert engine.progress() == []


def test_a_tick_that_fails_as_a_whole_fails_its_samples_and_the_loop_goes_on(
    still: StillTransformer, card: ModelCard, order: Order
) -> None:
    class Stumbling(Clock):
        """Fails once, at its call number ``fails_at``."""

        num_calls, fails_at = 0, 0

        def __call__(self) -> float:
            self.num_calls += 1
            if self.num_calls == self.fails_at:
                raise OSError("no time")
            return super().__call__()

    clock = Stumbling()
    engine = Engine(VelocityModel(still), card, row_buckets=(1,), clock=clock)
    unlucky = engine.submit(order(0))
    clock.fails_at = clock.num_calls + 2  # of the first tick: the call before it is the heartbeat
    later: list[Future[Finished]] = []

    def go_on(_: Future[Finished]) -> None:
        later.append(engine.submit(order(1)))
        later[0].add_done_callback(lambda _: engine.stop())

    unlucky.add_done_callback(go_on)
    engine.run()
    assert problem_of(unlucky).code == "internal" and "between steps" in problem_of(unlucky).rule
    assert later[0].result(timeout=0).sample.done
