"""The weight store and its replicas, in one process: whose policy is whose, who halts, and what survives the store."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from deployments.weights import archive
from deployments.weights.controls import WeightControls
from deployments.weights.publishing import check_same, publish
from pipeline.sample import Job
from schemas.card import ModelCard
from schemas.control import ReplicaState
from schemas.errors import Problem
from schemas.lora import LoraSpec
from schemas.weights import PublicationHeader
from tests.fleets import SETTINGS, LocalFleet, local_fleet
from tests.weights import fresh, moved, trained_adapter

Order = Callable[..., Job]
LORA_FIELDS: dict[str, Any] = {"r": 4, "target_modules": ["to_q", "to_v"]}
LORA = LoraConfig(**LORA_FIELDS, lora_alpha=8)


@pytest.fixture
def fleet(card: ModelCard) -> Iterator[LocalFleet]:
    with local_fleet(card) as made:
        yield made


def weights(seed: int) -> dict[str, torch.Tensor]:
    return moved(fresh(), seed)


def lora_header(config: LoraConfig = LORA) -> dict[str, Any]:
    return {"update": "lora", "lora_config": LoraSpec.model_validate(config).model_dump(mode="json")}


def problem_of(error: BaseException) -> Problem:
    problem = Problem.of(error)
    assert problem is not None
    return problem


def until(holds: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "never came to be"
        time.sleep(0.02)


# Whose policy


def test_another_checkpoint_of_the_same_architecture_does_not_take_the_first_ones_policy(
    card: ModelCard, tmp_path: Path
) -> None:
    with local_fleet(card, tmp_path) as fleet:
        first = fleet.add("first")
        fleet.publish(1, trained_adapter(fresh(), LORA, seed=1), **lora_header())
        first.stop()
        other = fleet.add("other", base=weights(7))
        assert other.policy.version == 0 and other.policy.digest == other.policy.base_digest
        assert fleet.fleet().control.base_digest == other.policy.base_digest
        again = fleet.add("of the first checkpoint")
        assert again.policy.version == 1 and again.policy.digest == first.policy.digest
    assert len(list(tmp_path.iterdir())) == 2, "a folder for each"


def test_replicas_of_the_checkpoint_before_say_nothing_that_counts(fleet: LocalFleet) -> None:
    old = fleet.add("old")
    for version in (1, 2):
        fleet.publish(version, weights(version))
    new = fleet.add("new", base=weights(7))
    assert set(fleet.set_run("paused")) == {"new"}
    until(lambda: old.engine.halted)
    found = fleet.fleet()
    assert (found.control.version, [state.replica_id for state in found.replicas]) == (0, ["new"])
    assert old.policy.version == 2 and old.follower.state().problem is None
    third = fleet.add("third", base=weights(7))
    assert third.policy.version == new.policy.version == 0


def test_settings_of_a_later_start_hold_and_the_folder_stays_while_there_is_a_policy(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    fleet.add("one")
    fleet.settings = SETTINGS.model_copy(update={"keep_versions": 1, "folder": str(tmp_path)})
    fleet.add("two")  # nothing is published yet
    for version in (1, 2):
        fleet.publish(version, weights(version))
    assert fleet.fleet().kept_versions == (2,)
    assert list(tmp_path.rglob("policy.json"))
    fleet.settings = SETTINGS
    with pytest.raises(RuntimeError) as refusal:
        fleet.add("three")
    problem = problem_of(refusal.value)
    assert problem.field == "weights.folder" and "version 2" in problem.rule and str(tmp_path) in problem.rule


# Halts


def test_a_halt_that_failed_is_told_and_tried_again(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = fleet.add("one")
    move = {"sleep": replica.policy.to_host, "wake": replica.policy.to_device}

    def full() -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(replica.policy, "to_host", full)
    with pytest.raises(RuntimeError) as failure:
        fleet.set_run("asleep")
    problem = problem_of(failure.value)
    assert "replica one is paused and not asleep" in problem.rule and "no memory left" in problem.rule
    monkeypatch.setattr(replica.policy, "to_host", move["sleep"])
    until(lambda: fleet.fleet().replicas[0].run == "asleep")
    monkeypatch.setattr(replica.policy, "to_device", full)
    with pytest.raises(RuntimeError) as failure:
        fleet.set_run("running")
    assert "replica one is asleep and not running" in problem_of(failure.value).rule
    monkeypatch.setattr(replica.policy, "to_device", move["wake"])
    until(lambda: fleet.fleet().replicas[0].run == "running" and not replica.engine.halted)


def test_a_word_that_is_none_is_refused_and_the_fleet_lives_on(fleet: LocalFleet) -> None:
    replica = fleet.add("one")
    for run, when, field in (("paused", "now", "when"), ("napping", "immediate", "run")):
        with pytest.raises(ValueError) as refusal:
            fleet.set_run(run, when)
        problem = problem_of(refusal.value)
        assert (problem.field, problem.value) == (field, when if field == "when" else run)
        assert "must be" in problem.rule
    ticket = fleet.send(1, weights(1))
    with pytest.raises(ValueError) as refusal:
        fleet.ask(fleet.store.commit(ticket, "immediately", 10))  # type: ignore[arg-type]
    assert problem_of(refusal.value).field == "when"
    assert replica.policy.version == 0
    assert fleet.set_run("paused") == {"one": "paused"}


def test_a_publication_in_a_pause_is_ready_and_lands_after_the_samples_that_were_halted(
    fleet: LocalFleet, order: Order
) -> None:
    replica = fleet.add("one")
    replica.slow_down(0.01)
    running = replica.engine.submit(order(0, num_inference_steps=60, job={"policy_version": 0}))
    replica.wait_until_begun()
    fleet.set_run("paused", "immediate")
    (ready,) = fleet.publish(1, weights(1))
    assert (ready["run"], ready["version"]) == ("paused", 0)
    assert ready["staged"] == [fleet.fleet().control.identity]
    assert fleet.set_run("running") == {"one": "running"}
    assert set(running.result(60).sample.policy_versions) == {0}
    assert replica.policy.version == 1


def test_two_publications_in_sleep_are_there_after_it(fleet: LocalFleet) -> None:
    replica = fleet.add("one")
    fleet.set_run("asleep")
    for version in (1, 2):
        (ready,) = fleet.publish(version, weights(version))
        assert (ready["run"], ready["version"], ready["problem"]) == ("asleep", 0, None)
    assert fleet.set_run("running") == {"one": "running"}
    assert replica.policy.version == 2 and replica.policy.verify() == []


# The store's own death


@pytest.mark.parametrize("with_folder", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("run", ["paused", "asleep"])
def test_a_fleet_that_stands_still_does_so_after_the_stores_restart(
    run: Any, with_folder: bool, card: ModelCard, tmp_path: Path
) -> None:
    with local_fleet(card, tmp_path if with_folder else None) as fleet:
        replicas = [fleet.add(name) for name in ("one", "two")]
        fleet.set_run(run)
        fleet.restart_store()
        until(lambda: len(fleet.fleet().replicas) == 2)
        found = fleet.fleet()
        assert found.control.run == run and {state.run for state in found.replicas} == {run}
        assert all(replica.engine.halted for replica in replicas)
        assert fleet.set_run("running") == {"one": "running", "two": "running"}


def test_a_store_that_has_just_started_waits_for_the_replicas_that_live(fleet: LocalFleet) -> None:
    replica = fleet.add("one")
    fleet.publish(1, weights(1))
    fleet.restart_store()
    assert fleet.set_run("asleep") == {"one": "asleep"}
    assert replica.engine.halted
    assert fleet.fleet().control.version == 1, "not back behind what is sampled from"
    fleet.restart_store()
    with pytest.raises(TimeoutError, match="timeout_s"):
        fleet.set_run("asleep", timeout_s=0.3)


# One version, one set of bytes


def test_the_same_version_is_not_accepted_again_while_the_one_before_is_deleted(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def slowly(path: Path, **more: Any) -> None:
        if Path(path).name == "1":
            time.sleep(1.0)
        remove(path, **more)

    monkeypatch.setattr(archive.shutil, "rmtree", slowly)
    with local_fleet(card, tmp_path) as fleet:
        fleet.settings = fleet.settings.model_copy(update={"keep_versions": 1})
        replica = fleet.add("one")
        fleet.publish(1, weights(1))
        ticket = fleet.send(2, weights(2))
        committing = fleet.begin(fleet.store.commit(ticket, "between_samples", 60))
        until(lambda: fleet.store._vault.version == 2)
        assert not committing.done()
        with pytest.raises(ValueError) as refusal:
            fleet.send(2, weights(99))
        assert "greater than the newest, 2" in problem_of(refusal.value).rule
        assert [state["version"] for state in committing.result(60)] == [2]
        assert fleet.add("two").policy.digest == replica.policy.digest


def test_a_version_that_is_there_is_told_by_all_that_was_said_of_it(fleet: LocalFleet) -> None:
    fleet.add("one")
    adapter = trained_adapter(fresh(), LORA, seed=1)
    fleet.publish(1, adapter, **lora_header())
    header = {"version": 1, "merge": False, **lora_header()}
    ticket, identity = fleet.ask(fleet.store.begin(header, None, None))
    assert ticket is None and identity is not None
    check_same(identity, PublicationHeader.model_validate(header), adapter)
    others = (
        {"lora_config": lora_header(LoraConfig(**LORA_FIELDS, lora_alpha=64))["lora_config"]},
        {"merge": True},
    )
    for other in (*others, {"update": "partial", "lora_config": None}):
        with pytest.raises(ValueError) as refusal:
            check_same(identity, PublicationHeader.model_validate(header | other), adapter)
        assert "published already" in problem_of(refusal.value).rule
    with pytest.raises(ValueError):
        check_same(identity, PublicationHeader.model_validate(header), trained_adapter(fresh(), LORA, seed=2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "abc"),
        ("version", None),
        ("version", 0),
        ("update", "lorra"),
        ("when", "now"),
        ("merge", True),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_sent(field: str, value: object) -> None:
    class NoStore:
        """Fails whoever asks it."""

    arguments = {
        "version": 1,
        "tensors": weights(1),
        "path": None,
        "update": "full",
        "lora_config": None,
        "merge": False,
        "when": "between_samples",
        "timeout_s": 5.0,
    }
    with pytest.raises(ValueError) as refusal:
        publish(NoStore(), **(arguments | {field: value}))  # type: ignore[arg-type]
    problem = problem_of(refusal.value)
    assert (problem.field, problem.value) == (field, value) and problem.rule


def test_a_wrong_word_for_a_halt_is_refused_where_it_is_said() -> None:
    controls = WeightControls("no app that is there")
    for halt in (controls.pause, controls.sleep):
        with pytest.raises(ValueError) as refusal:
            halt(when="now")  # type: ignore[arg-type]
        assert (problem_of(refusal.value).field, problem_of(refusal.value).value) == ("when", "now")


def test_what_a_silent_trainer_has_sent_is_let_go(fleet: LocalFleet) -> None:
    fleet.add("one")
    fleet.send(1, weights(1))
    incoming = fleet.store._vault._incoming
    assert incoming is not None
    incoming.expires_at = 0.0
    until(lambda: fleet.store._vault._incoming is None)


def test_a_word_of_no_replica_that_has_registered_is_nothing(fleet: LocalFleet) -> None:
    stranger = ReplicaState(replica_id="x", base_digest="another", version=9, weights_digest="", run="asleep")
    fleet.add("one")
    fleet.ask(fleet.store.report(stranger.model_dump()))
    assert fleet.fleet().control.version == 0
