"""A replica follows the control record: what it samples from, when it changes that, and what it says. No cluster."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from pipeline.entry import PolicyStamp
from pipeline.sample import Job
from schemas.card import ModelCard
from schemas.control import ReplicaState
from tests.replicas import Replica
from tests.sources import LocalSource

Order = Callable[..., Job]


@pytest.fixture
def source() -> LocalSource:
    return LocalSource()


@pytest.fixture
def replica(card: ModelCard, source: LocalSource) -> Iterator[Replica]:
    made = Replica(card, source)
    yield made
    made.stop()


@pytest.fixture
def weights(replica: Replica) -> Callable[[int], dict[str, torch.Tensor]]:
    """Other full weights by version."""
    base = {name: tensor.clone() for name, tensor in replica.transformer.state_dict().items()}

    def of(version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in base.items()
        }

    return of


def heard(source: LocalSource, holds: Callable[[ReplicaState], bool], timeout_s: float = 30) -> ReplicaState:
    """The first state that the replica reports from now on of which it holds."""
    start, end = len(source.said), time.monotonic() + timeout_s
    while time.monotonic() < end:
        for state in source.said[start:]:
            if holds(state):
                return state
        time.sleep(0.01)
    raise TimeoutError(f"never said; last {source.said[-1:]}")


def holds_weights(replica: Replica, expected: dict[str, torch.Tensor]) -> bool:
    own = replica.transformer.state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in expected.items())


def test_a_replica_has_the_policy_before_it_is_ready(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    source.publish(3, weights(3))
    source.change(version=3)
    replica.follower.catch_up()
    assert holds_weights(replica, weights(3))
    assert replica.engine.stamp == PolicyStamp(version=3, digest=replica.policy.digest)


def test_a_replica_that_cannot_get_the_policy_does_not_become_ready_and_says_why(
    replica: Replica, source: LocalSource
) -> None:
    source.change(version=3)
    with pytest.raises(RuntimeError, match="is not here"):
        replica.follower.catch_up()


def test_a_published_version_is_staged_then_sampled_from(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]], order: Order
) -> None:
    replica.start()
    first = replica.engine.submit(order(0, num_inference_steps=3, job={"policy_version": 0}))
    assert first.result(30).stamp.version == 0
    source.publish(1, weights(1))
    source.change(staged=1)
    staged = heard(source, lambda state: source.identity(1) in state.staged)
    assert staged.version == 0, "only fetched and checked"
    source.change(version=1)
    swapped = heard(source, lambda state: state.version == 1)
    assert swapped.weights_digest == replica.policy.digest and swapped.problem is None
    assert holds_weights(replica, weights(1))
    second = replica.engine.submit(order(1, num_inference_steps=3, job={"policy_version": 1}))
    assert second.result(30).stamp == PolicyStamp(version=1, digest=replica.policy.digest)


def test_weights_that_do_not_fit_are_told_so_and_the_old_ones_are_sampled_from(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]], order: Order
) -> None:
    replica.start()
    lacking = weights(1)
    name = next(iter(lacking))
    del lacking[name]
    source.publish(1, lacking)
    revision = source.change(staged=1)
    told = heard(source, lambda state: state.revision == revision)
    assert told.staged == () and told.version == 0
    assert told.problem is not None and told.problem["code"] == "weights_refused"
    assert name in told.problem["rule"]
    source.change()
    assert heard(source, lambda state: state.problem is None).version == 0
    assert replica.engine.submit(order(0, num_inference_steps=2)).result(30).stamp.version == 0


def test_a_version_that_is_tried_again_with_other_weights_is_fetched_again(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    replica.start()
    source.publish(1, weights(1))
    source.change(staged=1)
    heard(source, lambda state: source.identity(1) in state.staged)
    given_up = source.identity(1)
    source.publish(1, weights(2))  # before the replica hears that the first try was given up
    assert source.identity(1) != given_up
    source.change(staged=1)
    heard(source, lambda state: source.identity(1) in state.staged)
    source.change(version=1)
    heard(source, lambda state: state.version == 1)
    assert holds_weights(replica, weights(2))


def test_what_cannot_be_had_now_is_tried_again(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    replica.start()
    source.change(version=1)
    assert heard(source, lambda state: state.problem is not None).version == 0
    source.publish(1, weights(1))
    assert heard(source, lambda state: state.version == 1 and state.problem is None)


def test_pause_sleep_and_wake_are_said_and_idempotent(
    replica: Replica, source: LocalSource, order: Order
) -> None:
    replica.start()
    for run in ("paused", "paused", "asleep", "asleep", "paused", "asleep"):
        revision = source.change(run=run)
        assert heard(source, lambda state, wanted=revision: state.revision == wanted).run == run
        assert replica.engine.halted
    waiting = replica.engine.submit(order(0, num_inference_steps=2))
    time.sleep(0.2)
    assert not waiting.done()
    for _ in range(2):
        revision = source.change(run="running")
        assert heard(source, lambda state, wanted=revision: state.revision == wanted).run == "running"
    assert waiting.result(30)


def test_what_is_published_in_sleep_is_there_before_the_first_sample_after_it(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]], order: Order
) -> None:
    replica.start()
    revision = source.change(run="asleep")
    heard(source, lambda state: state.revision == revision)
    waiting = replica.engine.submit(order(0, num_inference_steps=2))
    source.publish(1, weights(1))
    source.change(version=1)
    ready = heard(source, lambda state: source.identity(1) in state.staged)
    assert (ready.run, ready.version) == ("asleep", 0)
    source.change(run="running")
    assert waiting.result(30).sample.policy_versions == [1, 1]
    assert holds_weights(replica, weights(1))


def test_an_immediate_pause_halts_first_and_leaves_the_swap_waiting(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]], order: Order
) -> None:
    replica.slow_down(0.01)
    replica.start()
    running = replica.engine.submit(order(0, num_inference_steps=60, job={"policy_version": 0}))
    replica.wait_until_begun()
    source.publish(1, weights(1))
    source.change(version=1, swap_when="between_samples")
    time.sleep(0.15)
    revision = source.change(run="paused", run_when="immediate")
    paused = heard(source, lambda state: state.revision == revision)
    assert (paused.run, paused.version, paused.staged) == ("paused", 0, (source.identity(1),))
    late = replica.engine.submit(order(1, num_inference_steps=2, job={"policy_version": 0}))
    anyone = replica.engine.submit(order(2, num_inference_steps=2))
    source.change(run="running")
    assert running.result(60).sample.policy_versions == [0] * 60, "to its end on the version it began with"
    assert anyone.result(60).sample.policy_versions == [1, 1]
    assert "policy_version_gone" in str(late.exception(60)), "none begins on the version before"


def test_an_immediate_swap_changes_a_halted_samples_weights(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]], order: Order
) -> None:
    replica.slow_down(0.01)
    replica.start()
    running = replica.engine.submit(order(0, num_inference_steps=30, job={"policy_version": 0}))
    replica.wait_until_begun()
    source.change(run="paused", run_when="immediate")
    heard(source, lambda state: state.run == "paused")
    source.publish(1, weights(1))
    revision = source.change(version=1, swap_when="immediate")
    assert heard(source, lambda state: state.revision == revision).version == 1
    source.change(run="running")
    versions = running.result(60).sample.policy_versions
    assert versions == sorted(versions) and set(versions) == {0, 1}


def test_what_is_published_in_a_pause_is_there_at_once_where_no_sample_was_halted(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]], order: Order
) -> None:
    replica.start()
    source.change(run="paused")
    heard(source, lambda state: state.run == "paused")
    bound = replica.engine.submit(order(0, num_inference_steps=2, job={"policy_version": 0}))
    source.publish(1, weights(1))
    revision = source.change(version=1)
    assert heard(source, lambda state: state.revision == revision).version == 1
    source.change(run="running")
    assert "policy_version_gone" in str(bound.exception(30))


def test_the_second_version_that_is_published_in_sleep_is_fetched_beside_the_first(
    replica: Replica, source: LocalSource, weights: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    replica.start()
    source.change(run="asleep")
    heard(source, lambda state: state.run == "asleep")
    for version in (1, 2):
        source.publish(version, weights(version))
        revision = source.change(staged=version)
        heard(source, lambda state, wanted=revision: state.revision == wanted)
        revision = source.change(version=version)
        ready = heard(source, lambda state, wanted=revision: state.revision == wanted)
        assert (ready.version, ready.staged, ready.problem) == (0, (source.identity(version),), None)
    source.change(run="running")
    heard(source, lambda state: state.version == 2)
    assert holds_weights(replica, weights(2))


def test_what_cannot_be_fetched_keeps_no_replica_from_halting(replica: Replica, source: LocalSource) -> None:
    replica.start()
    revision = source.change(run="paused", staged=1)
    told = heard(source, lambda state: state.revision == revision)
    assert told.run == "paused" and told.problem is not None and replica.engine.halted


def test_a_wake_that_fails_is_tried_again(
    replica: Replica, source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica.start()
    source.change(run="asleep")
    heard(source, lambda state: state.run == "asleep")
    to_device, tries = replica.policy.to_device, iter(range(2))

    def full_at_first() -> None:
        if next(tries, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        to_device()

    monkeypatch.setattr(replica.policy, "to_device", full_at_first)
    revision = source.change(run="running")
    told = heard(source, lambda state: state.revision == revision)
    assert told.run == "asleep" and told.problem is not None and "out of memory" in told.problem["rule"]
    assert heard(source, lambda state: state.run == "running" and state.problem is None)
    assert not replica.engine.halted


def test_of_another_checkpoints_policy_only_its_halts_concern_a_replica(
    replica: Replica, source: LocalSource
) -> None:
    replica.start()
    revision = source.change(base_digest="another", version=7, staged=None)
    told = heard(source, lambda state: state.revision == revision)
    assert (told.version, told.problem, replica.follower.version_lag) == (0, None, 0)
    source.change(run="paused")
    assert heard(source, lambda state: state.run == "paused")


def test_a_replica_that_starts_while_the_fleet_is_paused_samples_nothing(
    replica: Replica, source: LocalSource, order: Order
) -> None:
    source.change(run="paused")
    replica.start()
    waiting = replica.engine.submit(order(0, num_inference_steps=2))
    assert heard(source, lambda state: state.run == "paused")
    time.sleep(0.1)
    assert not waiting.done()
    source.change(run="running")
    assert waiting.result(30)


def test_weights_that_are_not_what_was_published_take_the_replica_out_and_name_its_samples(
    replica: Replica,
    source: LocalSource,
    weights: Callable[[int], dict[str, torch.Tensor]],
    order: Order,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica.start()
    replica.follower.sampled("made before", 0)
    verify = replica.policy.verify

    def late_and_wrong() -> list[str]:
        parameter = next(replica.transformer.parameters())
        with torch.no_grad():
            parameter.view(-1)[0] += 1.0
        replica.follower.sampled("made with it", 1)
        return verify()

    monkeypatch.setattr(replica.policy, "verify", late_and_wrong)
    source.publish(1, weights(1))
    source.change(version=1)
    heard(source, lambda state: state.problem is not None)
    (found,) = source.distrusted
    assert (found.replica_id, found.version, found.sample_ids) == ("me", 1, ("made with it",))
    assert found.tensors == (next(iter(replica.transformer.state_dict())),)
    assert replica.follower.fatal is not None
    with pytest.raises(RuntimeError, match="replica_died"):
        replica.engine.submit(order(0))


def test_a_silent_store_changes_nothing(
    replica: Replica, source: LocalSource, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica.start()

    def no_answer(*_: object) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(source, "watch", no_answer)
    monkeypatch.setattr(source, "report", no_answer)
    time.sleep(0.1)
    assert replica.engine.submit(order(0, num_inference_steps=2)).result(30).stamp.version == 0
    assert replica.follower.fatal is None
