"""The weights of an app's policies: what was published, what is on its way, and what of it is on disk.

It knows no replica. Chunks are put where the caller says, and their handles are handed out again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from configs.settings import WeightSettings
from deployments.weights.archive import WeightArchive
from deployments.weights.incoming import Incoming
from deployments.weights.shelf import Layer, WeightShelf
from schemas.control import RunOrder
from schemas.errors import Problem
from schemas.weights import Publication, TensorSpec

logger = logging.getLogger(__name__)

PART_DEADLINE_S = 120.0
"""Longest time between two parts of a publication: after it, its trainer is taken for dead."""


class WeightVault:
    """The policies of one app and checkpoint. Confined to one event loop."""

    def __init__(
        self, settings: WeightSettings, put: Callable[[Any], Any], folder: Path | None = None
    ) -> None:
        """With what is in ``folder``. Raises ValueError (a Problem) when that cannot be read whole."""
        self._shelf = WeightShelf(max_bytes=settings.max_bytes, keep_versions=settings.keep_versions)
        self._put = put
        self._archive = None if folder is None else WeightArchive(folder)
        self._incoming: Incoming | None = None
        if self._archive is not None:
            self._restore(self._archive)

    def limit(self, settings: WeightSettings) -> None:
        """Keep so much from the next publication on."""
        self._shelf.max_bytes, self._shelf.keep_versions = settings.max_bytes, settings.keep_versions

    def keep_run(self, order: RunOrder) -> None:
        """Write down whether the fleet samples, where there is a folder."""
        if self._archive is not None:
            self._archive.keep_run(order)

    def run(self) -> RunOrder | None:
        """What was written down last; None where there is nothing."""
        return None if self._archive is None else self._archive.run()

    @property
    def version(self) -> int:
        """The newest that is in place."""
        return self._shelf.version

    @property
    def versions(self) -> tuple[int, ...]:
        """Those whose weights are here, rising."""
        return self._shelf.versions

    @property
    def num_bytes(self) -> int:
        """Of their weights."""
        return self._shelf.num_bytes

    @property
    def incoming_version(self) -> int | None:
        """The version that is on its way, while its trainer sends."""
        self.forget_silent()
        return self._incoming.version if self._incoming is not None else None

    def forget_silent(self) -> None:
        """Let go of what a trainer that is taken for dead has sent."""
        incoming = self._incoming
        if incoming is not None and not incoming.is_landing and time.monotonic() > incoming.expires_at:
            self._incoming = None

    def newest(self) -> Publication | None:
        """The update that made the newest version; None for the checkpoint."""
        layers = self._shelf.layers_of(self.version)
        return layers[-1].publication if layers else None

    def begin(
        self,
        header: dict[str, Any],
        target: dict[str, TensorSpec],
        specs: dict[str, TensorSpec] | None,
        num_bytes: int | None,
    ) -> str:
        """Start a publication for a transformer ``target``; returns the ticket that its parts come under.

        Raises ValueError (a Problem) for what will not fit, as far as that is known.
        """
        expires_at = time.monotonic() + PART_DEADLINE_S
        incoming = Incoming(header, target, ticket=uuid4().hex, expires_at=expires_at)
        if specs is not None:
            incoming.check_beforehand(specs)
        if num_bytes is not None:
            self._shelf.make_room(num_bytes)
        self._incoming = incoming
        return incoming.ticket

    async def add(
        self, ticket: str, tensors: dict[str, TensorSpec], digests: dict[str, str], arrays: dict[str, Any]
    ) -> None:
        """One part. Raises ValueError (a Problem) for what does not fit."""
        incoming = self._under(ticket)
        incoming.check_part(tensors)
        num_bytes = sum(array.nbytes for array in arrays.values())
        self._shelf.make_room(incoming.num_bytes + num_bytes)
        index = len(incoming.chunks)
        incoming.take(tensors, digests, await asyncio.to_thread(self._put, arrays), num_bytes)
        if self._archive is not None:
            await asyncio.to_thread(self._archive.write_chunk, incoming.version, index, arrays, tensors)
        incoming.expires_at = time.monotonic() + PART_DEADLINE_S

    async def complete(self, ticket: str, timeout_s: float) -> Publication:
        """All parts have come; the publication then waits to be put in place for at most so long. Raises ValueError (a
        Problem) when something is missing."""
        incoming = self._under(ticket)
        publication = incoming.check_whole()
        incoming.expires_at = time.monotonic() + timeout_s + PART_DEADLINE_S
        if self._archive is not None:
            await asyncio.to_thread(self._archive.seal, publication)
        return publication

    async def put_in_place(self, ticket: str) -> None:
        """Make the publication the newest version, on disk first. From then on it is the policy, whatever dies."""
        incoming = self._under(ticket)
        layer = incoming.layer()
        incoming.is_landing = True
        try:
            if self._archive is not None:
                names = {**self._names(), layer.version: _names_of(self._shelf.with_layer(layer))}
                await asyncio.to_thread(self._archive.keep, names)
            dropped = self._shelf.add(layer)
            logger.info("version %d is the policy; %d layers are kept no longer", layer.version, len(dropped))
            if self._archive is not None and dropped:
                await self._delete_dropped(self._archive)
        finally:
            self._incoming = None

    def give_up(self, ticket: str) -> None:
        """Forget a publication that is on its way; not one that is being put in place, which ends by itself."""
        incoming = self._incoming
        if incoming is not None and incoming.ticket == ticket and not incoming.is_landing:
            self._incoming = None

    def layers(self, have: int, want: int) -> list[Layer]:
        """What to apply, in order, at version ``have`` to be at ``want``. Raises RuntimeError (a Problem) for a version
        that is neither here nor on its way."""
        if want == 0 or want in self._shelf.versions:
            layers = self._shelf.layers_of(want)
        elif self._incoming is not None and want == self._incoming.version:
            layers = self._shelf.with_layer(self._incoming.layer())
        else:
            raise Problem(
                code="internal",
                field="version",
                value=want,
                rule="is not in the weight store any more: it was let go, or lost with a store that had no folder",
                remedy="publish the policy again, and set weights.folder to keep it over the store's death",
            ).exception()
        return [layer for layer in layers if layer.version > have]

    def _under(self, ticket: str) -> Incoming:
        if self._incoming is None or self._incoming.ticket != ticket:
            raise Problem(
                code="weights_refused",
                field="version",
                rule="is not being published any more: it was given up, or its parts took too long",
                remedy="publish it again",
            ).exception()
        return self._incoming

    async def _delete_dropped(self, archive: WeightArchive) -> None:
        """The policy is in place whether or not this is done; the next publication deletes what is left."""
        try:
            await asyncio.to_thread(archive.keep, self._names())
        except OSError as error:
            logger.warning("versions that are kept no longer are still on disk: %s", error)

    def _names(self) -> dict[int, tuple[int, ...]]:
        return {version: _names_of(self._shelf.layers_of(version)) for version in self._shelf.versions}

    def _restore(self, archive: WeightArchive) -> None:
        layers: dict[int, Layer] = {}
        for version, names in archive.versions().items():
            for name in names:
                if name not in layers:
                    layers[name] = self._read(archive, name)
            self._shelf.put(version, tuple(layers[name] for name in names))
        logger.info("policy version %d was found on disk", self._shelf.version)

    def _read(self, archive: WeightArchive, name: int) -> Layer:
        chunks, num_bytes = [], 0
        for arrays in archive.chunks(name):
            num_bytes += sum(array.nbytes for array in arrays.values())
            chunks.append(self._put(arrays))
        return Layer(publication=archive.publication(name), chunks=tuple(chunks), num_bytes=num_bytes)


def _names_of(layers: Sequence[Layer]) -> tuple[int, ...]:
    return tuple(layer.version for layer in layers)
