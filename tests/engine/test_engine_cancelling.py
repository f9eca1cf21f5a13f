"""A sample that is cancelled is let go within one step, and nothing else is."""

import concurrent.futures

from pipeline.engine import Engine
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import Order, StillTransformer, settle


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
