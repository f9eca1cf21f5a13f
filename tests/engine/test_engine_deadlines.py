"""Deadlines and leases: whose time is up fails with where it stood, and the others go on."""

import pytest

from pipeline.engine import Engine
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import NUM_STEPS, Clock, Order, StillTransformer, problem_of, sample, settle


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
