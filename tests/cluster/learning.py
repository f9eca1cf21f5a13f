"""An app whose policy tests publish to, and the trainer's side of it: weights, adapters and replays."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
import torch
import variants
from apps import READY_S, App, remove, until
from diffusers import LTX2VideoTransformer3DModel
from peft import LoraConfig
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from configs.settings import AppConfig
from deployments.client import RolloutClient
from deployments.graph import bind
from deployments.group import RolloutGroup
from deployments.weights.controls import WeightControls
from deployments.weights.handle import NAMESPACE, store_name
from deployments.weights.source import StoreSource
from pipeline.conditioning import read
from pipeline.policy import Policy
from pipeline.profile import adopt
from pipeline.replay import log_probs_of_many
from schemas.arrow import manifest_of
from schemas.control import Fleet, ReplicaState
from schemas.trajectory import read_trajectory
from tests.weights import fresh, moved, trained_adapter

SHORT: dict[str, Any] = {
    "prompt": "a red ball",
    "num_inference_steps": 3,
    "seed": 4,
    "media": False,
    "return_steps": "all",
}
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v"], init_lora_weights=False)
ROWS = 2
"""Rows that a denoiser holds; it takes twice as many calls."""


@dataclass(frozen=True)
class Left:
    """What an earlier app left on disk."""

    version: int
    transformer: LTX2VideoTransformer3DModel
    """With the adapter that was published."""


class Learning(App):
    """The app, which can be started again."""

    left: Left
    first: RolloutGroup
    """What it sampled as soon as it was there."""

    def __init__(self, name: str, port: int, folder: Path) -> None:
        super().__init__(name, port)
        self.folder = folder
        """Where its weights are kept."""

    @contextmanager
    def running(self, num_replicas: int = 2) -> Iterator[Self]:
        self.deploy(num_replicas)
        try:
            yield self
        finally:
            remove(self.name)

    def deploy(self, num_replicas: int) -> None:
        """Run it with so many denoisers; those that are there live on, as with `serve deploy`."""
        application = {
            "name": self.name,
            "route_prefix": f"/{self.name}",
            "import_path": "learning:build",
            "args": {"folder": str(self.folder)},
            "deployments": [{"name": "Denoiser", "num_replicas": num_replicas}],
        }
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
        until(lambda: self._is_up(num_replicas))

    def leave_on_disk(self) -> Left:
        """Publish full weights and an adapter to a store that no replica has, and end it: its folder alone is left."""
        transformer = fresh()
        policy = Policy(transformer)
        source = StoreSource(self.name, config_in(self.folder).weights)
        gone = ReplicaState(
            replica_id="gone", base_digest=policy.base_digest, version=0, weights_digest="", run="running"
        )
        source.register(gone, policy.spec)
        transformer.load_state_dict(moved(transformer, seed=21))
        controls = WeightControls(self.name)
        controls.publish_weights(version=1, tensors=transformer.state_dict())
        adapter = trained_adapter(transformer, LORA, seed=22)
        controls.publish_weights(version=2, tensors=adapter, update="lora", lora_config=LORA)
        ray.kill(self.store(), no_restart=True)
        return Left(2, transformer)

    def fleet(self) -> Fleet:
        with self.client() as client:
            return client.policy_version()

    def next_version(self) -> int:
        return self.fleet().control.version + 1

    def store(self) -> Any:
        return ray.get_actor(store_name(self.name), namespace=NAMESPACE)

    def kill_denoiser(self, replica_id: str) -> None:
        """Kill one, and wait until as many others are there."""
        before = {status["replica_id"]: status["pid"] for status in self.ask("Denoiser")}
        os.kill(before[replica_id], signal.SIGKILL)
        until(lambda: self.are_replaced({replica_id}, len(before)))

    def versions(self) -> set[tuple[int, str]]:
        """Version and digest of every replica that is there."""
        return {(s["weights"]["version"], s["weights"]["weights_digest"]) for s in self.ask("Denoiser")}

    def fleet_if_there(self) -> Fleet | None:
        """None while the store is on its way back."""
        try:
            found = Fleet.model_validate(ray.get(self.store().fleet.remote(), timeout=READY_S))
        except RayActorError:
            return None
        return found if found.replicas else None

    def are_replaced(self, replica_ids: set[str], num_replicas: int) -> bool:
        """Whether those are gone and as many are there as should be."""
        try:
            found = {status["replica_id"] for status in self.ask("Denoiser")}
        except RayActorError:  # one that was killed is still taken for alive
            return False
        return len(found) == num_replicas and not found & replica_ids

    def _is_up(self, num_replicas: int) -> bool:
        status = serve.status().applications.get(self.name)
        if status is None or status.status != "RUNNING":
            return False
        return status.deployments["Denoiser"].replica_states == {"RUNNING": num_replicas}


def config_in(folder: str | Path) -> AppConfig:
    return AppConfig(
        denoiser={"row_buckets": [1, ROWS]},
        client={"lease_s": 4.0, "pulse_s": 0.25},
        weights={"folder": str(folder), "poll_s": 0.5, "silence_s": 2.0, "max_bytes": 8 * 2**20},
    )


def build(args: dict[str, str]) -> Application:
    """The app, by its import path."""
    soon_missed = {"health_check_period_s": 1}
    return bind(
        config_in(args["folder"]),
        denoiser=variants.SlowDenoiser,
        options={
            "Denoiser": {"max_ongoing_requests": 2 * ROWS, **soon_missed},
            **{name: soon_missed for name in ("TextEncoder", "AVDecoder", "LeaseBoard")},
        },
    )


def sampled(client: RolloutClient, **changes: Any) -> RolloutGroup:
    """A group that is done."""
    (group,) = client.gather([client.submit({**SHORT, **changes})], timeout_s=240)
    group.raise_if_failed()
    return group


def manifests(group: RolloutGroup) -> list[dict[str, Any]]:
    return [manifest_of(ray.get(sample.trajectory)) for sample in group.samples]


def ratios(transformer: LTX2VideoTransformer3DModel, group: RolloutGroup) -> list[float]:
    """exp(new - old) of every stochastic move of every sample, under these weights."""
    views = [read_trajectory(ray.get(sample.trajectory)) for sample in group.samples]
    conditioning = read(ray.get(group.conditioning), torch.device("cpu"))
    assert not adopt(views[0].manifest["execution_profile"], transformer)
    with torch.no_grad():
        scored = log_probs_of_many(transformer, views, [conditioning] * len(views))
    return [
        float(torch.exp(getattr(step, modality) - view.manifest[f"log_probs_{modality}"][step.step]))
        for view, steps in zip(views, scored, strict=True)
        for step in steps
        for modality in ("video", "audio")
    ]
