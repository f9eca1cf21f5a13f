"""The loop that ticks: what it tells of itself, and that it serves threads through failures until it is stopped."""

import concurrent.futures
import threading
from typing import Any

import pytest

from pipeline.engine import Engine
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import NUM_STEPS, Clock, Order, RowByRow, StillTransformer, problem_of, running, settle
from tests.patience import PATIENCE_S


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
    started = engine.last_beat
    with running(engine) as loop:
        with concurrent.futures.ThreadPoolExecutor(4) as callers:
            futures = list(callers.map(engine.submit, [order(k, num_inference_steps=2) for k in range(6)]))
        assert all(future.result(PATIENCE_S).sample.done for future in futures)
        assert engine.last_beat > started
        engine.stop()
        loop.join(PATIENCE_S)
        assert not loop.is_alive()


def test_stopping_fails_what_is_held_and_takes_no_more(
    still: StillTransformer, card: ModelCard, order: Order
) -> None:
    forward_began, may_go_on = threading.Event(), threading.Event()

    def before(_: dict[str, Any]) -> None:
        forward_began.set()
        assert may_go_on.wait(PATIENCE_S)

    engine = Engine(VelocityModel(RowByRow(still, before)), card, row_buckets=(1,))
    futures = [engine.submit(order(k)) for k in range(2)]
    with running(engine):
        try:
            assert forward_began.wait(PATIENCE_S)
            engine.stop()
            with pytest.raises(RuntimeError, match="replica_died"):
                engine.submit(order(2))
        finally:
            may_go_on.set()
    for future in futures:
        problem = problem_of(future)
        assert problem.code == "replica_died" and "stopped" in problem.rule
    assert engine.progress() == []


@pytest.mark.parametrize("when", ["before a sample moved", "after one moved"])
def test_a_tick_that_fails_as_a_whole_fails_its_samples_and_the_loop_goes_on(
    still: StillTransformer, card: ModelCard, order: Order, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(1,))
    tick = engine.tick

    def stumble() -> bool:
        """The first tick alone."""
        monkeypatch.setattr(engine, "tick", tick)
        if when == "after one moved":
            tick()
        raise OSError("no time")

    monkeypatch.setattr(engine, "tick", stumble)
    unlucky = [engine.submit(order(k)) for k in range(2)]
    with running(engine):
        for future in unlucky:
            problem = problem_of(future, PATIENCE_S)
            assert problem.code == "internal" and "between steps" in problem.rule
        assert engine.submit(order(2)).result(PATIENCE_S).sample.done
