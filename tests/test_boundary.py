"""Work at the engine's boundaries: when it is done, who waits for it, and what its samples say of their weights."""

from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from pipeline.engine import Engine
from pipeline.entry import PolicyStamp
from pipeline.sample import Job
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.errors import Problem
from tests.engines import StillTransformer, settle

Order = Callable[..., Job]
STEPS = 4


@pytest.fixture
def engine(card: ModelCard) -> Engine:
    """Two rows at a time."""
    return Engine(VelocityModel(StillTransformer()), card, row_buckets=(1, 2))


def bound(order: Order, index: int, version: int | None, **job: object) -> Job:
    return order(index, num_inference_steps=STEPS, job={"policy_version": version, **job})


def moved_to(engine: Engine, version: int) -> Callable[[], None]:
    def work() -> None:
        engine.stamp = PolicyStamp(version=version, digest=f"of {version}")

    return work


def code_of(error: BaseException | None) -> str:
    problem = Problem.of(error) if error is not None else None
    assert problem is not None
    return problem.code


def test_between_samples_the_running_end_on_the_version_they_began_with(engine: Engine, order: Order) -> None:
    running = [engine.submit(bound(order, k, 0)) for k in range(2)]
    engine.tick()
    swapped = engine.at_boundary("sample", moved_to(engine, 1))
    later = engine.submit(bound(order, 2, 1))
    for _ in range(STEPS - 1):
        engine.tick()
        assert not swapped.done(), "samples were still on their way"
    settle(engine)
    assert [future.result(timeout=0).stamp.version for future in running] == [0, 0]
    assert all(f.result(timeout=0).sample.policy_versions == [0] * STEPS for f in running)
    assert swapped.result(timeout=0) is None
    finished = later.result(timeout=0)
    assert finished.sample.policy_versions == [1] * STEPS
    assert finished.stamp == PolicyStamp(version=1, digest="of 1")


def test_what_was_submitted_before_for_the_old_version_is_still_sampled_with_it(
    engine: Engine, order: Order
) -> None:
    before = [engine.submit(bound(order, k, 0)) for k in range(5)]
    engine.tick()
    swapped = engine.at_boundary("sample", moved_to(engine, 1))
    settle(engine)
    assert swapped.done()
    assert [future.result(timeout=0).stamp.version for future in before] == [0] * 5


def test_what_comes_later_for_the_old_version_is_told_that_it_is_gone(engine: Engine, order: Order) -> None:
    engine.submit(bound(order, 0, 0))
    engine.tick()
    engine.at_boundary("sample", moved_to(engine, 1))
    late = engine.submit(bound(order, 1, 0))
    settle(engine)
    assert code_of(late.exception(timeout=0)) == "policy_version_gone"
    problem = Problem.of(late.exception(timeout=0))
    assert problem is not None and problem.value == 1, "the version to go on with"


def test_immediately_a_sample_goes_on_with_the_new_weights_and_says_so_step_by_step(
    engine: Engine, order: Order
) -> None:
    running = engine.submit(bound(order, 0, 0))
    engine.tick()
    engine.at_boundary("step", moved_to(engine, 1))
    settle(engine)
    assert running.result(timeout=0).sample.policy_versions == [0, 1, 1, 1]


@pytest.mark.parametrize("job", [{"policy_version": 3}, {"policy_version": None, "min_policy_version": 3}])
def test_a_sample_waits_for_the_version_that_it_needs_and_others_pass_it(
    engine: Engine, order: Order, job: dict[str, int | None]
) -> None:
    ahead = engine.submit(order(0, num_inference_steps=STEPS, job=job))
    other = engine.submit(bound(order, 1, 0))
    settle(engine)
    assert other.done() and not ahead.done()
    engine.at_boundary("sample", moved_to(engine, 3))
    settle(engine)
    assert ahead.result(timeout=0).sample.policy_versions == [3] * STEPS


def test_a_sample_that_takes_any_version_does_not_hold_a_swap_up(engine: Engine, order: Order) -> None:
    engine.submit(bound(order, 0, 0))
    engine.tick()
    anyone = engine.submit(bound(order, 1, None))
    engine.at_boundary("sample", moved_to(engine, 1))
    settle(engine)
    assert anyone.result(timeout=0).sample.policy_versions == [1] * STEPS


def test_a_halted_engine_moves_nothing_but_still_drops_and_crosses(engine: Engine, order: Order) -> None:
    running = [engine.submit(bound(order, k, 0)) for k in range(2)]
    engine.tick()
    halted = engine.at_boundary("step", engine.halt)
    assert not engine.tick() and halted.done() and engine.halted
    assert settle(engine) == 0 and not any(future.done() for future in running)
    running[0].cancel()
    engine.tick()
    assert [steps for _, steps, _ in engine.progress()] == [1]
    swapped = engine.at_boundary("step", moved_to(engine, 1))
    engine.tick()
    assert swapped.done()
    engine.resume()
    settle(engine)
    assert running[1].result(timeout=0).sample.policy_versions == [0, 1, 1, 1]


def test_work_that_fails_tells_so_and_the_loop_goes_on(engine: Engine, order: Order) -> None:
    def broken() -> None:
        raise ValueError("no such weights")

    failed = engine.at_boundary("sample", broken)
    sampled = engine.submit(bound(order, 0, 0))
    settle(engine)
    assert str(failed.exception(timeout=0)) == "no such weights"
    assert sampled.done()


def test_work_that_was_taken_back_is_not_done_and_holds_nobody_up(engine: Engine, order: Order) -> None:
    engine.submit(bound(order, 0, 0))
    engine.tick()
    swapped = engine.at_boundary("sample", moved_to(engine, 1))
    assert swapped.cancel()
    at_once = engine.at_boundary("step", lambda: None)
    engine.tick()
    assert at_once.done(), "not behind what was taken back"
    late = engine.submit(bound(order, 1, 0))
    settle(engine)
    assert late.result(timeout=0).stamp.version == 0
    with pytest.raises(CancelledError):
        swapped.result(timeout=0)


def test_work_in_a_row_is_done_in_its_order(engine: Engine, order: Order) -> None:
    engine.submit(bound(order, 0, 0))
    engine.tick()
    done: list[str] = []
    engine.at_boundary("sample", lambda: done.append("first"))
    engine.at_boundary("step", lambda: done.append("second"))
    settle(engine)
    assert done == ["first", "second"]


def test_the_totals_count_what_was_done_at_boundaries(engine: Engine) -> None:
    engine.at_boundary("sample", lambda: None)
    engine.at_boundary("step", lambda: None)
    engine.tick()
    assert engine.stats.swaps == 2
    assert engine.stats.swap_s >= 0


def test_a_probe_sees_each_finished_sample_before_the_weights_change(engine: Engine, order: Order) -> None:
    seen: list[tuple[int, int]] = []
    engine.probe = lambda finished: seen.append((finished.sample.job.sample_index, engine.stamp.version))
    engine.submit(bound(order, 0, 0))
    engine.tick()
    engine.at_boundary("sample", moved_to(engine, 1))
    engine.submit(bound(order, 1, 1))
    settle(engine)
    assert seen == [(0, 0), (1, 1)]
