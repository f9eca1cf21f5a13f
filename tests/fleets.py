"""A weight store in this process and the replicas that follow it: no cluster, and the real ones but for Ray."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from configs.settings import WeightSettings
from deployments.weights.source import Layers
from deployments.weights.store import WeightStore
from pipeline.weights import StoredTensor, chunks_of, digests_of, specs_of
from schemas.card import ModelCard
from schemas.control import Control, Distrust, Fleet, ReplicaState
from schemas.weights import Publication, TensorSpec
from tests.replicas import Replica

T = TypeVar("T")
WAIT_S = 60.0
SETTINGS = WeightSettings(poll_s=0.1, silence_s=1.5, keep_versions=2)


class LocalFleet:
    """The store, on a loop of its own, and its replicas. Each call ends within WAIT_S."""

    def __init__(self, card: ModelCard, folder: Path | None = None) -> None:
        self.settings = SETTINGS.model_copy(update={"folder": None if folder is None else str(folder)})
        self.replicas: list[Replica] = []
        self._card = card
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.restart_store()

    def restart_store(self) -> None:
        """As after its process's death: what was in memory is gone."""

        async def new() -> WeightStore:
            return WeightStore("app", put=lambda arrays: arrays)

        self.store = self.ask(new())

    def add(self, name: str, base: Mapping[str, Tensor] | None = None) -> Replica:
        """A replica that is ready, of the tiny checkpoint or of other weights."""
        replica = Replica(self._card, FleetSource(self), name, base)
        replica.start()
        self.replicas.append(replica)
        return replica

    def ask(self, call: Coroutine[Any, Any, T]) -> T:
        return self.begin(call).result(WAIT_S)

    def begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def set_run(self, run: Any, when: Any = "between_samples", timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Each replica's run state by its name."""
        states = self.ask(self.store.set_run(run, when, timeout_s))
        return {state["replica_id"]: state["run"] for state in states}

    def fleet(self) -> Fleet:
        return Fleet.model_validate(self.ask(self.store.fleet()))

    def send(self, version: int, tensors: Mapping[str, Tensor], **header: Any) -> str:
        """Everything of a publication but its commit; returns its ticket."""
        whole = {"version": version, "update": "full", "merge": False, "lora_config": None, **header}
        ticket, _ = self.ask(self.store.begin(whole, None, None))
        assert ticket is not None, "is there already"
        for chunk in chunks_of(tensors):
            specs = {name: spec.model_dump() for name, spec in specs_of(chunk).items()}
            arrays = {name: tensor.array for name, tensor in chunk.items()}
            self.ask(self.store.add(ticket, specs, digests_of(chunk), arrays))
        return ticket

    def publish(
        self, version: int, tensors: Mapping[str, Tensor], *, when: Any = "between_samples", **header: Any
    ) -> list[dict[str, Any]]:
        """As a trainer does; returns each replica's state."""
        return self.ask(self.store.commit(self.send(version, tensors, **header), when, WAIT_S))

    def stop(self) -> None:
        for replica in self.replicas:
            replica.stop()


@contextmanager
def local_fleet(card: ModelCard, folder: Path | None = None) -> Iterator[LocalFleet]:
    fleet = LocalFleet(card, folder)
    try:
        yield fleet
    finally:
        fleet.stop()


class FleetSource:
    """A WeightSource over the store of this process."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet

    def register(self, state: ReplicaState, spec: dict[str, TensorSpec]) -> Control:
        plain = {name: tensor.model_dump() for name, tensor in spec.items()}
        settings = self._fleet.settings.model_dump()
        return Control.model_validate(
            self._fleet.ask(self._fleet.store.register(state.model_dump(), plain, settings))
        )

    def watch(self, state: ReplicaState, seen: int) -> Control:
        return Control.model_validate(self._fleet.ask(self._fleet.store.watch(state.model_dump(), seen)))

    def report(self, state: ReplicaState) -> None:
        self._fleet.ask(self._fleet.store.report(state.model_dump()))

    def layers(self, have: int, want: int) -> Layers:
        found: Layers = []
        for said, chunks in self._fleet.ask(self._fleet.store.layers(have, want)):
            publication = Publication.model_validate(said)
            arrays: dict[str, Any] = {}
            for chunk in chunks:
                arrays |= dict(chunk)  # type: ignore[call-overload]  # no refs here, but what they refer to
            found.append(
                (
                    publication,
                    {
                        name: StoredTensor(array=array, dtype=publication.tensors[name].dtype)
                        for name, array in arrays.items()
                    },
                )
            )
        return found

    def distrust(self, found: Distrust) -> None:
        self._fleet.ask(self._fleet.store.distrust(found.model_dump()))

    def leave(self, replica_id: str) -> None:
        self._fleet.begin(self._fleet.store.leave(replica_id))
