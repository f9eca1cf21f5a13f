"""The loop that ticks: what it tells of itself, and that it serves threads through failures until it is stopped."""

import concurrent.futures
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from pipeline.engine import Engine
from pipeline.entry import Finished
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import NUM_STEPS, Clock, Order, RowByRow, StillTransformer, problem_of, settle


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
