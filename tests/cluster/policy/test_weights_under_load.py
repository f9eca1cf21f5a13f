"""Weights change, sampling halts and replicas die while samples are on their way: none is lost, none is of two policies."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray
import torch
from apps import READY_S, until
from learning import LORA, ROWS, SHORT, Learning, manifests, ratios, sampled

from deployments.client import RolloutClient
from deployments.group import RolloutGroup
from schemas.control import ReplicaState
from schemas.errors import Problem
from tests.weights import fresh, moved, trained_adapter

NUM_VERSIONS, NUM_ADAPTERS = 20, 50
LONG = {**SHORT, "num_inference_steps": 20}
"""About two seconds, a slow denoiser's."""


@contextmanager
def steady_load(client: RolloutClient) -> Iterator[list[RolloutGroup]]:
    """Groups of three, more than the denoisers hold, one after another until the block ends; then all are done."""
    groups: list[RolloutGroup] = []
    stopping = threading.Event()

    def load() -> None:
        while not stopping.is_set():
            if sum(not group.settled.done() for group in groups) < 4:
                groups.append(client.submit({**SHORT, "num_samples": 3, "seed": len(groups)}))
                client.collect(groups[-1:])
            time.sleep(0.01)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield groups
    finally:
        stopping.set()
        thread.join()
        client.gather(groups, timeout_s=READY_S)


def runs(states: list[ReplicaState]) -> set[str]:
    return {state.run for state in states}


def fill(client: RolloutClient, app: Learning) -> RolloutGroup:
    """Samples in every slot of every denoiser, of which half run, and more that wait."""
    slots = 2 * ROWS * len(app.fleet().replicas)
    group = client.submit({**LONG, "num_samples": slots + 4})
    until(lambda: sum(sample.steps_done > 0 for sample in group.samples) == slots // 2)
    time.sleep(1.0)  # for the calls that fill the waiting rooms
    return group


@pytest.mark.timeout(600)
def test_twenty_versions_under_load_lose_no_sample_and_mix_no_group(learning: Learning) -> None:
    first = learning.next_version()
    transformer = fresh()
    policy_at: dict[int, int] = {}
    # Of each version: how many groups had been submitted when it was in place.
    with learning.client() as client:
        with steady_load(client) as groups:
            for version in range(first, first + NUM_VERSIONS):
                acknowledged = client.publish_weights(
                    version=version, tensors=moved(transformer, seed=version), timeout_s=READY_S
                )
                assert {state.version for state in acknowledged} == {version}
                policy_at[version] = len(groups)
        assert not [problem for group in groups for problem in group.problems]
        said = [manifests(group) for group in groups]
        kept = client.policy_version().kept_versions
    for group, of_group in zip(groups, said, strict=True):
        assert len(of_group) == 3
        versions = {version for m in of_group for version in m["policy_versions"]}
        assert versions == {group.policy_version}, "one group, one version, whole"
    for version, num_before in policy_at.items():
        assert all((group.policy_version or 0) >= version for group in groups[num_before:])
    assert len({group.policy_version for group in groups}) >= NUM_VERSIONS / 2
    assert len(kept) <= 2, "earlier versions were let go"


@pytest.mark.timeout(600)
def test_fifty_adapters_make_nothing_grow(learning: Learning) -> None:
    trainer = fresh()
    base = learning.next_version()
    first = base + 1
    sizes: list[list[dict[str, int]]] = []
    kept: list[int] = []
    with learning.client() as client:
        client.publish_weights(version=base, tensors=trainer.state_dict(), timeout_s=READY_S)
        for version in range(first, first + NUM_ADAPTERS):
            client.publish_weights(
                version=version,
                tensors=trained_adapter(trainer, LORA, seed=version),
                update="lora",
                lora_config=LORA,
                timeout_s=READY_S,
            )
            if version - first in (4, NUM_ADAPTERS - 1):
                sizes.append([status["sizes"] for status in learning.ask("Denoiser")])
                kept.append(client.policy_version().kept_bytes)
        assert set(ratios(trainer, sampled(client))) == {1.0}
    early, late = ([tuple(size.values()) for size in of_all] for of_all in sizes)
    assert sorted(early) == sorted(late), "modules, parameters and their bytes"
    assert kept[0] == kept[1]


def test_with_every_slot_full_publish_pause_and_sleep_act_at_the_next_boundary(learning: Learning) -> None:
    version = learning.next_version()
    with learning.client() as client:
        group = fill(client, learning)
        assert runs(client.pause(when="immediate", timeout_s=30)) == {"paused"}
        acknowledged = client.publish_weights(
            version=version, tensors=moved(fresh(), seed=1), when="immediate", timeout_s=30
        )
        assert {state.version for state in acknowledged} == {version}
        assert runs(client.sleep(when="immediate", timeout_s=30)) == {"asleep"}
        assert not any(sample.settled.done() for sample in group.samples)
        time.sleep(2.0)  # for what the client hears of steps before the halt
        steps = [sample.steps_done for sample in group.samples]
        assert any(0 < done < LONG["num_inference_steps"] for done in steps), "halted on their way"
        time.sleep(1.0)
        assert [sample.steps_done for sample in group.samples] == steps
        assert runs(client.wake(timeout_s=30)) == {"running"}
        client.gather([group], timeout_s=READY_S)
        group.raise_if_failed()
        said = manifests(group)
    versions = {v for manifest in said for v in manifest["policy_versions"]}
    assert versions == {version} == {group.policy_version}, "not all had begun, so all were made anew"


def test_when_time_is_up_the_late_are_named_and_follow_at_their_boundary(learning: Learning) -> None:
    version = learning.next_version()
    with learning.client() as client:
        group = fill(client, learning)
        with pytest.raises(TimeoutError) as late:
            client.publish_weights(version=version, tensors=moved(fresh(), seed=7), timeout_s=1.5)
        problem = Problem.of(late.value)
        assert problem is not None and "not come to their next boundary" in problem.rule
        replicas = [state.replica_id for state in client.policy_version().replicas]
        assert any(replica in problem.rule for replica in replicas)
        assert client.policy_version().control.version == version, "no sample starts on another any more"
        client.gather([group], timeout_s=READY_S)
        group.raise_if_failed()
        assert {v for m in manifests(group) for v in m["policy_versions"]} == {group.policy_version}
        until(lambda: {v for v, _ in learning.versions()} == {version})


def test_sleep_and_wake_under_load_and_what_is_published_meanwhile(learning: Learning) -> None:
    transformer = fresh()
    with learning.client() as client:
        with steady_load(client) as groups:
            until(lambda: any(group.settled.done() for group in groups))
            for _ in range(2):
                assert runs(client.sleep(timeout_s=READY_S)) == {"asleep"}
            version = learning.next_version()
            transformer.load_state_dict(moved(transformer, seed=2))
            ready = client.publish_weights(
                version=version, tensors=transformer.state_dict(), timeout_s=READY_S
            )
            identity = client.policy_version().control.identity
            assert {(state.run, state.staged) for state in ready} == {("asleep", (identity,))}
            asleep = client.submit({**SHORT, "num_samples": 2})
            time.sleep(0.5)
            assert not asleep.settled.done()
            for _ in range(2):
                assert runs(client.wake(timeout_s=READY_S)) == {"running"}
            client.gather([asleep], timeout_s=READY_S)
        assert not [problem for group in groups for problem in group.problems]
        assert {m["policy_version"] for m in manifests(asleep)} == {version}
        assert set(ratios(transformer, asleep)) == {1.0}


def test_a_replica_that_dies_in_the_middle_of_a_publication_leaves_no_mix(learning: Learning) -> None:
    version, transformer = learning.next_version(), fresh()
    transformer.load_state_dict(moved(transformer, seed=3))
    victim = learning.ask("Denoiser")[0]

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        state = transformer.state_dict()
        names = list(state)
        yield {name: state[name] for name in names[::2]}
        os.kill(victim["pid"], signal.SIGKILL)
        yield {name: state[name] for name in names[1::2]}

    with learning.client() as client:
        acknowledged = client.publish_weights(version=version, tensors=parts(), timeout_s=READY_S)
        assert victim["replica_id"] not in {state.replica_id for state in acknowledged}
        until(lambda: learning.are_replaced({victim["replica_id"]}, 2))
        assert {v for v, _ in learning.versions()} == {version}
        group = sampled(client, num_samples=6)
        assert {m["policy_version"] for m in manifests(group)} == {version}
        assert set(ratios(transformer, group)) == {1.0}


def test_a_publication_that_its_trainer_does_not_finish_leaves_nothing(learning: Learning) -> None:
    before, version = learning.versions(), learning.next_version()
    state = moved(fresh(), seed=4)

    def interrupted() -> Iterator[dict[str, torch.Tensor]]:
        yield dict(list(state.items())[:10])
        raise KeyboardInterrupt

    with learning.client() as client:
        with pytest.raises(KeyboardInterrupt):
            client.publish_weights(version=version, tensors=interrupted(), timeout_s=READY_S)
        assert learning.versions() == before
        client.publish_weights(version=version, tensors=state, timeout_s=READY_S)


def test_one_publishes_at_a_time(learning: Learning) -> None:
    version, state = learning.next_version(), moved(fresh(), seed=5)
    with learning.client() as client:

        def with_another() -> Iterator[dict[str, torch.Tensor]]:
            yield dict(list(state.items())[:10])
            with pytest.raises(ValueError) as refusal:
                client.publish_weights(version=version + 1, tensors=state, timeout_s=10)
            problem = Problem.of(refusal.value)
            assert problem is not None and f"version {version} is on its way" in problem.rule
            yield dict(list(state.items())[10:])

        client.publish_weights(version=version, tensors=with_another(), timeout_s=READY_S)


def test_a_dead_store_comes_back_from_its_folder(learning: Learning) -> None:
    before = learning.versions()
    ray.kill(learning.store(), no_restart=False)
    fleet = until(lambda: learning.fleet_if_there())
    assert {fleet.control.version} == {version for version, _ in before}
    with learning.client() as client:
        assert sampled(client, num_samples=2).policy_version == fleet.control.version
        client.publish_weights(
            version=fleet.control.version + 1, tensors=moved(fresh(), seed=6), timeout_s=READY_S
        )
