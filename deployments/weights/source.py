"""Where a replica gets the control record and the bytes of a policy from: the weight store, through the object store.

The protocol is the seam: another way for the bytes (NCCL, Ray's direct transport) is another `layers`.
"""

from functools import partial
from typing import Any, Protocol

import ray
from ray import serve
from ray.exceptions import ActorDiedError

from configs.settings import AppConfig, WeightSettings
from deployments.weights.store import make_store
from pipeline.weights import StoredTensor
from schemas.control import Control, Distrust, ReplicaState
from schemas.weights import Publication, TensorSpec

Layers = list[tuple[Publication, dict[str, StoredTensor]]]
"""Updates in the order in which they are applied, with their bytes, read-only and shared with the object store."""

ANSWER_S = 30.0
"""Longest wait for an answer that carries no weights, beyond what the store itself may take."""


class WeightSource(Protocol):
    """All that a replica asks of whoever directs it. Each call ends by a deadline of its own."""

    def register(self, state: ReplicaState, spec: dict[str, TensorSpec]) -> Control:
        """Say how the replica is, and which tensors its transformer has; returns the record."""

    def watch(self, state: ReplicaState, seen: int) -> Control:
        """The record once its revision is above ``seen``, or after a while."""

    def report(self, state: ReplicaState) -> None:
        """Say how the replica is."""

    def layers(self, have: int, want: int) -> Layers:
        """What to apply at version ``have`` to be at ``want``. Raises RuntimeError (a Problem) when it is not there."""

    def distrust(self, found: Distrust) -> None:
        """Say that the replica's weights are not what was published."""

    def leave(self, replica_id: str) -> None:
        """Say that the replica is taken down. Does not wait."""


def source_of_this_app(config: AppConfig) -> WeightSource:
    """Inside a replica: the store of its app, made where there is none yet."""
    return StoreSource(serve.get_replica_context().app_name, config.weights)


class StoreSource:
    """A WeightSource over the weight store's actor."""

    def __init__(self, app_name: str, settings: WeightSettings) -> None:
        self._open = partial(make_store, app_name)
        self._store = self._open()
        self._settings = settings
        self._answer_s = ANSWER_S + settings.poll_s
        self._fetch_s = settings.fetch_timeout_s

    def register(self, state: ReplicaState, spec: dict[str, TensorSpec]) -> Control:
        plain = {name: tensor.model_dump() for name, tensor in spec.items()}
        call = self._store.register.remote(state.model_dump(), plain, self._settings.model_dump())
        # The store may still be reading its folder.
        return Control.model_validate(ray.get(call, timeout=self._fetch_s))

    def watch(self, state: ReplicaState, seen: int) -> Control:
        return Control.model_validate(self._ask(self._store.watch.remote(state.model_dump(), seen)))

    def report(self, state: ReplicaState) -> None:
        self._ask(self._store.report.remote(state.model_dump()))

    def layers(self, have: int, want: int) -> Layers:
        answer = self._ask(self._store.layers.remote(have, want))
        return [_layer(said, ray.get(chunks, timeout=self._fetch_s)) for said, chunks in answer]

    def distrust(self, found: Distrust) -> None:
        self._ask(self._store.distrust.remote(found.model_dump()))

    def leave(self, replica_id: str) -> None:
        self._store.leave.remote(replica_id)

    def _ask(self, ref: ray.ObjectRef) -> Any:
        try:
            return ray.get(ref, timeout=self._answer_s)
        except ActorDiedError:
            # Killed for good, by hand: the next question goes to a new one.
            self._store = self._open()
            raise


def _layer(said: dict[str, Any], chunks: list[dict[str, Any]]) -> tuple[Publication, dict[str, StoredTensor]]:
    publication = Publication.model_validate(said)
    return publication, {
        name: StoredTensor(array=array, dtype=publication.tensors[name].dtype)
        for chunk in chunks
        for name, array in chunk.items()
    }
