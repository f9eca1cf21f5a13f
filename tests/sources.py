"""A weight source in this process: what a replica follows where there is no cluster."""

import threading
from collections.abc import Mapping

from torch import Tensor

from deployments.weights.source import Layers
from pipeline.weights import chunks_of, digests_of, specs_of
from schemas.control import Control, Distrust, ReplicaState, Staged
from schemas.errors import Problem
from schemas.weights import Publication, TensorSpec


class LocalSource:
    """Directs one replica, and remembers what it said."""

    def __init__(self, poll_s: float = 0.05) -> None:
        self.control = Control(revision=1)
        self.published: dict[int, Layers] = {0: []}
        """What each version is made of."""
        self.said: list[ReplicaState] = []
        self.distrusted: list[Distrust] = []
        self.left: list[str] = []
        self._poll_s = poll_s
        self._changed = threading.Condition()

    def publish(self, version: int, tensors: Mapping[str, Tensor], **publication: object) -> None:
        """Add a version; a full one stands alone, others lie on the newest."""
        (chunk,) = chunks_of(tensors)
        said = Publication.model_validate(
            {
                "version": version,
                "update": "full",
                "tensors": {name: spec.model_dump() for name, spec in specs_of(chunk).items()},
                "digests": digests_of(chunk),
                **publication,
            }
        )
        below = [] if said.update == "full" else self.published[max(self.published)]
        self.published[version] = [*below, (said, chunk)]

    def change(self, *, staged: int | None = None, **changes: object) -> int:
        """Change the record; returns its revision. A version's identity comes along."""
        if staged is not None:
            changes["staged"] = Staged(version=staged, identity=self.identity(staged))
        elif self.control.staged is not None:
            changes["staged"] = None
        if "version" in changes:
            changes["identity"] = self.identity(int(str(changes["version"])))
        with self._changed:
            revision = self.control.revision + 1
            fields = {**self.control.model_dump(), **changes, "revision": revision}
            self.control = Control.model_validate(fields)
            self._changed.notify_all()
        return revision

    def identity(self, version: int) -> str:
        """Of the publication that makes the version; empty where there is none."""
        return self.published[version][-1][0].identity if self.published.get(version) else ""

    def register(self, state: ReplicaState, spec: dict[str, TensorSpec]) -> Control:
        self.control = self.control.model_copy(update={"base_digest": state.base_digest})
        return self.control

    def watch(self, state: ReplicaState, seen: int) -> Control:
        self.said.append(state)
        with self._changed:
            self._changed.wait_for(lambda: self.control.revision > seen, self._poll_s)
            return self.control

    def report(self, state: ReplicaState) -> None:
        self.said.append(state)

    def layers(self, have: int, want: int) -> Layers:
        if want not in self.published:
            raise Problem(
                code="internal", field="version", value=want, rule="is not here", remedy="publish it"
            ).exception()
        return [layer for layer in self.published[want] if layer[0].version > have]

    def distrust(self, found: Distrust) -> None:
        self.distrusted.append(found)

    def leave(self, replica_id: str) -> None:
        self.left.append(replica_id)
