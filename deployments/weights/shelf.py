"""Which published weights are kept, and what a replica at some version must apply to reach another.

An update is a layer on the checkpoint: `full` covers all before it, `lora` the adapter before it, `partial` what it
names. A version is the layers that are not covered, in the order in which they came; a replica applies those that are
newer than its own version. It knows no Ray: what a chunk is, is the caller's to say.
"""

from dataclasses import dataclass, field
from typing import Any

from schemas.errors import Problem
from schemas.weights import Publication


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One update and its bytes."""

    publication: Publication
    chunks: tuple[Any, ...]
    """Wherever the store keeps them."""
    num_bytes: int

    @property
    def version(self) -> int:
        return self.publication.version


@dataclass(slots=True)
class WeightShelf:
    """The versions that are kept, newest first to be fetched, oldest first to go."""

    max_bytes: int
    keep_versions: int
    version: int = 0
    """The newest; 0 is the checkpoint."""
    _versions: dict[int, tuple[Layer, ...]] = field(default_factory=dict)

    @property
    def versions(self) -> tuple[int, ...]:
        """The published ones that are kept, rising."""
        return tuple(self._versions)

    @property
    def num_bytes(self) -> int:
        """Of all layers that are kept."""
        return sum(layer.num_bytes for layer in self._layers())

    def make_room(self, num_bytes: int) -> None:
        """Let earlier versions go until an update of so many bytes fits. Raises ValueError (a Problem), and lets none go,
        when it would not fit beside what is sampled from until it is in place."""
        needed = num_bytes + sum(layer.num_bytes for layer in self._versions.get(self.version, ()))
        if needed > self.max_bytes:
            raise Problem(
                code="weights_refused",
                field="tensors",
                value=f"{num_bytes} bytes",
                rule=f"must fit beside version {self.version}, which is sampled from until the update is in place: "
                f"{needed} bytes in all, and weights.max_bytes is {self.max_bytes}",
                remedy="raise weights.max_bytes and the object store with it, or publish a lora or partial update",
            ).exception()
        while self.num_bytes + num_bytes > self.max_bytes:
            self._forget_oldest()

    def with_layer(self, layer: Layer) -> tuple[Layer, ...]:
        """The version that the newest becomes by an update."""
        update, names = layer.publication.update, layer.publication.tensors.keys()
        if update == "full":
            return (layer,)
        uncovered = [
            below
            for below in self._versions.get(self.version, ())
            if below.publication.update != update
            or (update == "partial" and not below.publication.tensors.keys() <= names)
        ]
        return (*uncovered, layer)

    def add(self, layer: Layer) -> list[Layer]:
        """Make the update the newest version; returns the layers that are kept no longer."""
        return self.put(layer.version, self.with_layer(layer))

    def put(self, version: int, layers: tuple[Layer, ...]) -> list[Layer]:
        """Make a version the newest, from all its layers; returns the layers that are kept no longer."""
        before = self._layers()
        self._versions[version] = layers
        self.version = version
        while len(self._versions) > 1 and (
            len(self._versions) > self.keep_versions or self.num_bytes > self.max_bytes
        ):
            self._forget_oldest()
        kept = {layer.version for layer in self._layers()}
        return [layer for layer in before if layer.version not in kept]

    def layers_of(self, version: int) -> tuple[Layer, ...]:
        """The layers of a version that is kept. Raises KeyError for another."""
        return () if version == 0 else self._versions[version]

    def _forget_oldest(self) -> None:
        del self._versions[next(iter(self._versions))]

    def _layers(self) -> list[Layer]:
        return list({layer.version: layer for layers in self._versions.values() for layer in layers}.values())
