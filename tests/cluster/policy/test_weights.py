"""Published weights on a real cluster: sampled from everywhere, to the bit, whoever dies; or refused, and nowhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from apps import READY_S
from learning import LORA, SHORT, Learning, manifests, ratios, sampled
from safetensors.torch import save_file

from deployments.client import RolloutClient
from deployments.group import RolloutGroup
from schemas.errors import Problem
from schemas.trajectory import read_trajectory
from tests.weights import fresh, moved, trained_adapter

GROUP = {"num_samples": 4}


def publish_moved(app: Learning, seed: int) -> tuple[int, Any]:
    """Publish other full weights; returns the version and a transformer that has them."""
    version, transformer = app.next_version(), fresh()
    transformer.load_state_dict(moved(transformer, seed))
    with app.client() as client:
        acknowledged = client.publish_weights(
            version=version, tensors=transformer.state_dict(), timeout_s=READY_S
        )
    assert [state.version for state in acknowledged] == [version] * len(app.ask("Denoiser"))
    return version, transformer


def distances(one: RolloutGroup, other: RolloutGroup) -> list[float]:
    """How far each sample's last states lie apart at most, video's and audio's."""
    pairs = zip(one.samples, other.samples, strict=True)
    found = []
    for samples in pairs:
        views = [read_trajectory(ray.get(sample.trajectory)) for sample in samples]
        for modality in ("video", "audio"):
            last = [getattr(view, f"{modality}_latents")[-1] for view in views]
            found.append(float(abs(last[0] - last[1]).max()))
    return found


def test_what_was_published_is_what_is_sampled_and_replay_has_ratio_one(learning: Learning) -> None:
    version, transformer = publish_moved(learning, seed=1)
    with learning.client() as client:
        group = sampled(client, **GROUP)
        assert set(ratios(transformer, group)) == {1.0}
        assert 1.0 not in ratios(fresh(), group)
        said = manifests(group)
        fleet = client.policy_version()
    assert group.policy_version == version
    assert {m["policy_version"] for m in said} == {version} == {v for m in said for v in m["policy_versions"]}
    assert {m["weights_digest"] for m in said} == {state.weights_digest for state in fleet.replicas}
    assert {m["replica_id"] for m in said} <= {state.replica_id for state in fleet.replicas}
    with learning.http() as http:
        assert http.get("/v1/weights").json()["control"]["version"] == version


def test_a_live_adapter_has_ratio_one_too_and_a_merged_one_nearly(learning: Learning) -> None:
    version, trainer = publish_moved(learning, seed=2)
    adapter = trained_adapter(trainer, LORA, seed=3)
    with learning.client() as client:
        plain = sampled(client, **GROUP)
        client.publish_weights(
            version=version + 1, tensors=adapter, update="lora", lora_config=LORA, timeout_s=READY_S
        )
        live = sampled(client, **GROUP)
        assert set(ratios(trainer, live)) == {1.0}
        assert {m["execution_profile"]["lora"] for m in manifests(live)} == {"live"}
        client.publish_weights(
            version=version + 2,
            tensors=adapter,
            update="lora",
            lora_config=LORA,
            merge=True,
            timeout_s=READY_S,
        )
        merged = sampled(client, **GROUP)
        assert {m["execution_profile"]["lora"] for m in manifests(merged)} == {"merged"}
    # Of the states: log-probs at one's own noise know no weights.
    assert max(distances(live, merged)) < 1e-4
    assert min(distances(live, plain)) > 0.1


def test_weights_come_from_a_file_and_in_parts_from_an_iterator(learning: Learning, tmp_path: Path) -> None:
    transformer = fresh()
    state = moved(transformer, seed=5)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "policy.safetensors")
    version = learning.next_version()
    with learning.client() as client:
        from_file = client.publish_weights(
            version=version, path=tmp_path / "policy.safetensors", timeout_s=READY_S
        )
        names = list(state)
        parts = ({name: state[name] for name in names[k::3]} for k in range(3))
        in_parts = client.publish_weights(version=version + 1, tensors=parts, timeout_s=READY_S)
        assert len({s.weights_digest for s in (*from_file, *in_parts)}) == 1, "the same bytes"
        again = client.publish_weights(version=version + 1, tensors=state, timeout_s=READY_S)
        assert {s.version for s in again} == {version + 1}, "the same once more is no error"
        one_name = {names[0]: state[names[0]] + 1}
        partly = client.publish_weights(
            version=version + 2, tensors=one_name, update="partial", timeout_s=READY_S
        )
        assert {s.weights_digest for s in partly}.isdisjoint({s.weights_digest for s in in_parts})
    transformer.load_state_dict(state | one_name)
    with learning.client() as client:
        assert set(ratios(transformer, sampled(client))) == {1.0}


@pytest.mark.timeout(600)
def test_a_successor_has_the_policy_from_its_first_sample_whoever_died(learning: Learning) -> None:
    @ray.remote(num_cpus=0)
    class Trainer:
        def publish(self, app_name: str, version: int, state: dict[str, torch.Tensor]) -> None:
            with RolloutClient.connect(app_name) as client:
                client.publish_weights(version=version, tensors=state)

    version, transformer = learning.next_version(), fresh()
    transformer.load_state_dict(moved(transformer, seed=6))
    trainer = Trainer.remote()
    ray.get(trainer.publish.remote(learning.name, version, transformer.state_dict()), timeout=READY_S)
    ray.kill(trainer)
    before = learning.versions()
    assert [v for v, _ in before] == [version]
    learning.kill_denoiser(learning.ask("Denoiser")[0]["replica_id"])
    assert learning.versions() == before
    learning.deploy(3)
    assert learning.versions() == before
    with learning.client() as client:
        group = sampled(client, num_samples=9)
        assert {m["policy_version"] for m in manifests(group)} == {version}
        assert set(ratios(transformer, group)) == {1.0}
    learning.deploy(2)


def _without(state: dict[str, Any], _: Path) -> dict[str, Any]:
    return {"tensors": {name: state[name] for name in list(state)[1:]}}


def _with_another(state: dict[str, Any], _: Path) -> dict[str, Any]:
    return {"tensors": state | {"to_out.9.weight": torch.zeros(2)}}


def _misshaped(state: dict[str, Any], _: Path) -> dict[str, Any]:
    name = next(iter(state))
    return {"tensors": state | {name: state[name].flatten()[:1]}}


def _with_nan(state: dict[str, Any], _: Path) -> dict[str, Any]:
    name = list(state)[-1]
    return {"tensors": state | {name: torch.full_like(state[name], float("nan"))}}


def _of_the_connectors(state: dict[str, Any], _: Path) -> dict[str, Any]:
    return {"tensors": {"connectors.video_connector.weight": torch.zeros(2)}, "update": "partial"}


def _no_layer_matched(state: dict[str, Any], _: Path) -> dict[str, Any]:
    pair = {f"nowhere.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    return {"tensors": pair, "update": "lora", "lora_config": LORA}


def _one_layer_unmatched(state: dict[str, Any], _: Path) -> dict[str, Any]:
    adapter = trained_adapter(fresh(), LORA, seed=1)
    name = next(name for name in adapter if ".lora_A." in name)
    adapter = {
        key: value for key, value in adapter.items() if key.split(".lora_")[0] != name.split(".lora_")[0]
    }
    return {"tensors": adapter, "update": "lora", "lora_config": LORA}


def _cut_off(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    file = folder / "cut.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    file.write_bytes(file.read_bytes()[:-10])
    return {"path": file}


def _too_large(state: dict[str, Any], _: Path) -> dict[str, Any]:
    name = next(iter(state))
    return {"tensors": {name: torch.zeros(3 * 2**20)}, "update": "partial"}


def _a_part_that_lacks_names(state: dict[str, Any], _: Path) -> dict[str, Any]:
    return {"tensors": iter([{name: state[name] for name in list(state)[2:]}])}


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (_without, "1 missing"),
        (_with_another, "to_out.9.weight"),
        (_misshaped, "another shape"),
        (_with_nan, "NaN or infinity in 1"),
        (_of_the_connectors, "connectors.video_connector.weight"),
        (_no_layer_matched, "not one that does"),
        (_one_layer_unmatched, "2 missing"),
        (_cut_off, "cut.safetensors"),
        (_too_large, "another shape"),
        (_a_part_that_lacks_names, "2 missing"),
    ],
)
def test_what_does_not_fit_is_refused_in_clear_words_and_the_policy_stays(
    learning: Learning, tmp_path: Path, made: Callable[[dict[str, Any], Path], dict[str, Any]], words: str
) -> None:
    before, version = learning.versions(), learning.next_version()
    with learning.client() as client:
        with pytest.raises(ValueError) as refusal:
            client.publish_weights(
                version=version, timeout_s=READY_S, **made(moved(fresh(), seed=9), tmp_path)
            )
        assert (
            type(refusal.value) is ValueError and json.loads(str(refusal.value))["code"] == "weights_refused"
        )
        problem = Problem.of(refusal.value)
        assert problem is not None
        assert words in str(problem)
        assert learning.versions() == before and learning.next_version() == version
        # And the next one is none the worse for it.
        acknowledged = client.publish_weights(
            version=version, tensors=moved(fresh(), seed=10), timeout_s=READY_S
        )
        assert {state.version for state in acknowledged} == {version}


def test_versions_only_grow(learning: Learning) -> None:
    version, transformer = publish_moved(learning, seed=11)
    with learning.client() as client:
        for stale in (version - 1, version):
            with pytest.raises(ValueError) as refusal:
                client.publish_weights(version=stale, tensors=moved(transformer, seed=12), timeout_s=READY_S)
            problem = Problem.of(refusal.value)
            assert problem is not None and problem.field == "version"
    assert {v for v, _ in learning.versions()} == {version}


def test_a_request_waits_for_the_version_that_it_asks_for(learning: Learning) -> None:
    version = learning.next_version()
    with learning.client() as client:
        ahead = client.submit({**SHORT, "min_policy_version": version})
        never = client.submit({**SHORT, "min_policy_version": version + 100, "deadline_s": 2.0})
        client.gather([never], timeout_s=60)
        assert never.problems[0].field == "min_policy_version"
        assert not ahead.settled.done()
        publish_moved(learning, seed=13)
        client.gather([ahead], timeout_s=60)
        assert {m["policy_version"] for m in manifests(ahead)} == {version}
