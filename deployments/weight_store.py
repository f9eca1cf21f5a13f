"""The one place where the policy lives: published weights, the control record, and what every replica says of itself.

A detached, named actor beside the app. It re-puts what is published, so that the objects are its own and neither the
trainer's nor a replica's death loses them; with a folder it writes them to disk as well. Replicas long-poll the control
record and report here from side threads: neither a publication nor a halt ever needs a request slot of a denoiser.

A publication is begun, brought in chunks, and committed. Until all replicas have fetched it and found it to fit, nothing
has changed anywhere; then the record names it, and every replica changes at its next boundary.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from configs.settings import WeightSettings
from deployments.roster import Roster
from deployments.store_handle import NAMESPACE, store_name
from deployments.weight_archive import WeightArchive
from deployments.weight_shelf import Layer, WeightShelf
from schemas.control import Control, Distrust, Fleet, ReplicaState, RunState, When
from schemas.errors import Problem, validated
from schemas.lora import LoraSpec
from schemas.weights import Publication, TensorSpec
from schemas.weights_check import check_names, refused

logger = logging.getLogger(__name__)

MAX_DISTRUSTED = 100


def make_store(app_name: str, settings: WeightSettings, checkpoint_digest: str) -> ActorHandle:
    """The app's store; it is made by the first replica that asks, and outlives all of them."""
    return (
        ray.remote(WeightStore)
        .options(
            name=store_name(app_name),
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=10_000,
        )
        .remote(app_name, settings.model_dump(), checkpoint_digest)
    )


@dataclass(slots=True)
class _Incoming:
    """A publication on its way."""

    header: dict[str, Any]
    """version, update, merge and lora_config."""
    expires_at: float
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    chunks: list[ray.ObjectRef] = field(default_factory=list)
    num_bytes: int = 0

    def publication(self) -> Publication:
        return validated(Publication, {**self.header, "tensors": self.tensors, "digests": self.digests})


class WeightStore:
    """Keeps the policy of one app and directs its replicas. All methods take and return plain values."""

    def __init__(self, app_name: str, settings: dict[str, Any], checkpoint_digest: str) -> None:
        self._app_name = app_name
        self._settings = WeightSettings.model_validate(settings)
        # From the clock, so that a replica that followed an earlier store takes this one's records for newer.
        self._control = Control(revision=int(time.time() * 1000))
        self._changed = asyncio.Condition()
        self._roster = Roster(self._settings.silence_s)
        self._incoming: _Incoming | None = None
        self._spec: dict[str, TensorSpec] = {}
        self._distrusted: list[Distrust] = []
        self._start(checkpoint_digest)

    def _start(self, checkpoint_digest: str) -> None:
        """With the policies of a checkpoint that are on disk, or none."""
        self._checkpoint_digest = checkpoint_digest
        settings = self._settings
        self._shelf = WeightShelf(max_bytes=settings.max_bytes, keep_versions=settings.keep_versions)
        self._archive: WeightArchive | None = None
        if settings.folder is None:
            return
        folder = Path(settings.folder).expanduser() / f"{self._app_name}-{checkpoint_digest[:12]}"
        self._archive = WeightArchive(folder)
        layers: dict[int, Layer] = {}
        for version, names in self._archive.versions().items():
            for name in names:
                if name not in layers:
                    layers[name] = self._read(self._archive, name)
            self._shelf.put(version, tuple(layers[name] for name in names))
        self._control = self._control.model_copy(update={"version": self._shelf.version})
        logger.info("policy version %d was found in %s", self._shelf.version, folder)

    # For replicas

    async def register(self, checkpoint_digest: str, spec: dict[str, Any]) -> dict[str, Any]:
        """A replica starts: which tensors its transformer has. Returns the control record to be in line with."""
        if checkpoint_digest != self._checkpoint_digest:
            logger.warning("the app serves another checkpoint now; its policies start anew")
            self._start(checkpoint_digest)
            await self._change(version=self._shelf.version, staged=None)
        self._spec = {name: TensorSpec.model_validate(tensor) for name, tensor in spec.items()}
        return self._control.model_dump()

    async def watch(self, state: dict[str, Any], seen: int) -> dict[str, Any]:
        """The control record, as soon as it is newer than ``seen``, or after a while."""
        await self.report(state)
        try:
            async with asyncio.timeout(self._settings.poll_s), self._changed:
                await self._changed.wait_for(lambda: self._control.revision > seen)
        except TimeoutError:
            pass
        return self._control.model_copy(update={"wants_spec": not self._spec}).model_dump()

    async def report(self, state: dict[str, Any]) -> None:
        """A replica says how it is."""
        known = ReplicaState.model_validate(state)
        if known.version > self._control.version:
            # This store is newer than the policy and has no folder: it cannot hand it on, but will not go back.
            logger.error("version %d is sampled from and is not here any more; publish again", known.version)
            await self._change(version=known.version)
        await self._roster.note(known)

    async def leave(self, replica_id: str) -> None:
        """A replica is taken down."""
        await self._roster.leave(replica_id)

    async def distrust(self, distrust: dict[str, Any]) -> None:
        """A replica found that its weights are not what was published, and goes."""
        found = Distrust.model_validate(distrust)
        logger.error("replica %s sampled from other weights than version %d", found.replica_id, found.version)
        self._distrusted = [*self._distrusted, found][-MAX_DISTRUSTED:]
        await self._roster.leave(found.replica_id)

    async def layers(self, have: int, want: int) -> list[tuple[dict[str, Any], list[ray.ObjectRef]]]:
        """What a replica at version ``have`` applies, in order, to be at ``want``: publications, and refs of their
        chunks. Raises RuntimeError (a Problem) for a version that is not here."""
        incoming = self._incoming
        if incoming is not None and want == incoming.header["version"]:
            layers = self._shelf.with_layer(_layer_of(incoming))
        else:
            try:
                layers = self._shelf.layers_of(want)
            except KeyError:
                raise Problem(
                    code="internal",
                    field="version",
                    value=want,
                    rule="is not in the weight store any more, which was started anew without a folder",
                    remedy="publish the policy again, and set weights.folder to keep it over the store's death",
                ).exception() from None
        return [
            (layer.publication.model_dump(), list(layer.chunks)) for layer in layers if layer.version > have
        ]

    # For publishers

    async def begin(
        self, header: dict[str, Any], specs: dict[str, Any] | None, num_bytes: int | None, timeout_s: float
    ) -> dict[str, str] | None:
        """Start a publication. ``specs`` and ``num_bytes`` of all its tensors where they are known beforehand.

        Returns None, or the digests of that version when it is there already: then nothing needs to be sent if they
        are equal. Raises ValueError or RuntimeError (a Problem) for what cannot be published; nothing was sent then.
        """
        version = int(header["version"])
        if version == self._shelf.version and version in self._shelf.versions:
            return self._shelf.layers_of(version)[-1].publication.digests
        newest = max(self._shelf.version, self._control.version)
        if version <= newest:
            rule = f"must be greater than the newest, {newest}: versions only grow"
            raise Problem(
                code="weights_refused", field="version", value=version, rule=rule, remedy=f"use {newest + 1}"
            ).exception()
        if self._shelf.version < self._control.version and header["update"] != "full":
            raise Problem(
                code="weights_refused",
                field="update",
                value=header["update"],
                rule=f"must be full, since version {self._control.version}, on which it would lie, is lost: this weight "
                "store was started anew without a folder",
                remedy="publish the full weights, and set weights.folder",
            ).exception()
        if self._incoming is not None and time.monotonic() < self._incoming.expires_at:
            raise Problem(
                code="weights_refused",
                field="version",
                value=version,
                rule=f"cannot be published while version {self._incoming.header['version']} is on its way",
                remedy="one trainer publishes at a time; try again when that is done",
            ).exception()
        if not self._spec:
            raise Problem(
                code="weights_refused",
                rule="there is no denoiser yet that said which tensors it has",
                remedy="publish when the app is running",
            ).exception()
        if specs is not None:
            tensors = {name: TensorSpec.model_validate(spec) for name, spec in specs.items()}
            # With digests that stand in, so that all but the bytes is checked now.
            whole = validated(
                Publication, {**header, "tensors": tensors, "digests": dict.fromkeys(tensors, "0" * 32)}
            )
            check_names(whole.update, tensors, self._spec, whole.lora_config)
        if num_bytes is not None:
            self._shelf.make_room(num_bytes)
        self._incoming = _Incoming(header=header, expires_at=time.monotonic() + timeout_s)
        return None

    async def add(
        self, version: int, specs: dict[str, Any], digests: dict[str, str], arrays: dict[str, Any]
    ) -> None:
        """One chunk of the publication. Its bytes are copied: they are the store's from then on."""
        incoming = self._on_its_way(version)
        tensors = {name: TensorSpec.model_validate(spec) for name, spec in specs.items()}
        twice = sorted(tensors.keys() & incoming.tensors.keys())
        if twice:
            raise refused(f"must name each tensor once, got {twice[0]} twice", "send it once").exception()
        update, config = incoming.header["update"], incoming.header["lora_config"]
        lora_config = None if config is None else validated(LoraSpec, config)
        check_names(update, tensors, self._spec, lora_config, complete=False)
        num_bytes = sum(array.nbytes for array in arrays.values())
        self._shelf.make_room(incoming.num_bytes + num_bytes)
        index = len(incoming.chunks)
        incoming.tensors |= tensors
        incoming.digests |= digests
        incoming.num_bytes += num_bytes
        incoming.chunks.append(await asyncio.to_thread(ray.put, arrays))
        if self._archive is not None:
            await asyncio.to_thread(self._archive.write_chunk, version, index, arrays, tensors)

    async def abort(self, version: int) -> None:
        """Forget a publication that is on its way."""
        if self._incoming is not None and self._incoming.header["version"] == version:
            self._incoming = None

    async def commit(self, version: int, when: When, timeout_s: float) -> list[dict[str, Any]]:
        """Put the publication in place; returns every replica's state once it samples from it.

        Raises ValueError or RuntimeError (a Problem) when it does not fit, and TimeoutError when a replica has not
        fetched it in time: the version before it is then in place everywhere. Raises TimeoutError, too, when a replica
        has fetched it and did not come to its boundary in time: it is then the policy, no sample starts on another,
        and the error names who still finishes samples of the version before.
        """
        end = time.monotonic() + timeout_s
        incoming = self._on_its_way(version)
        incoming.expires_at = max(incoming.expires_at, end)
        try:
            await self._stage(incoming, timeout_s)
        except BaseException:
            await self.abort(version)
            await self._change(staged=None)
            raise
        dropped = self._shelf.add(_layer_of(incoming))
        self._incoming = None
        logger.info("version %d is the policy; %d layers are kept no longer", version, len(dropped))
        await self._change(version=version, staged=None, when=when)
        return await self.acknowledged(version, end - time.monotonic())

    async def acknowledged(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Every replica's state once all sample from ``version`` or a newer one, or will when they wake. Raises
        TimeoutError (a Problem)."""
        return await self._acknowledged(
            lambda state: state.version >= version or (state.run == "asleep" and state.staged == version),
            timeout_s,
        )

    # For all

    async def current(self, at_least: int, timeout_s: float) -> int:
        """The policy's version, once it is ``at_least``. Raises TimeoutError when it is not by then."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self._control.version >= at_least)
        return self._control.version

    async def set_run(self, run: RunState, when: When, timeout_s: float) -> list[dict[str, Any]]:
        """Let all replicas run, pause or sleep; returns their states once they do. Raises TimeoutError (a Problem)."""
        await self._change(run=run, when=when)
        revision = self._control.revision
        return await self._acknowledged(lambda state: state.revision >= revision, timeout_s)

    async def fleet(self) -> dict[str, Any]:
        """The record, the replicas and the versions that are kept."""
        return Fleet(
            control=self._control,
            replicas=tuple(self._roster.states()),
            distrusted=tuple(self._distrusted),
            kept_versions=self._shelf.versions,
            kept_bytes=self._shelf.num_bytes,
        ).model_dump(mode="json")

    async def _stage(self, incoming: _Incoming, timeout_s: float) -> None:
        """Have every replica fetch the publication and compare it with its own transformer."""
        publication = incoming.publication()
        version = publication.version
        check_names(publication.update, publication.tensors, self._spec, publication.lora_config)
        if self._archive is not None:
            await asyncio.to_thread(self._archive.seal, publication)
        await self._change(staged=version)
        revision = self._control.revision
        try:
            states = await self._roster.wait(
                lambda state: state.staged == version or state.revision >= revision, timeout_s
            )
        except TimeoutError:
            late = [state.replica_id for state in self._roster.states() if state.staged != version]
            raise _late(
                late, timeout_s, f"had not fetched version {version}; the one before it stays"
            ).exception() from None
        for state in states:
            if state.staged != version and state.problem is not None:
                raise Problem(**state.problem).exception()
        if self._archive is not None:
            versions = {
                v: tuple(layer.version for layer in self._shelf.layers_of(v)) for v in self._shelf.versions
            }
            layers = tuple(layer.version for layer in self._shelf.with_layer(_layer_of(incoming)))
            await asyncio.to_thread(self._archive.keep, {**versions, version: layers})

    async def _acknowledged(
        self, settled: Callable[[ReplicaState], bool], timeout_s: float
    ) -> list[dict[str, Any]]:
        try:
            states = await self._roster.wait(settled, max(0.0, timeout_s))
        except TimeoutError:
            late = [state.replica_id for state in self._roster.states() if not settled(state)]
            rule = "had not come to their next boundary; they will follow there, and start nothing before"
            raise _late(late, timeout_s, rule).exception() from None
        return [state.model_dump(mode="json") for state in states]

    def _on_its_way(self, version: int) -> _Incoming:
        incoming = self._incoming
        if incoming is None or incoming.header["version"] != version:
            raise Problem(
                code="weights_refused",
                field="version",
                value=version,
                rule="is not being published: it was given up, or took longer than its time",
                remedy="publish it again",
            ).exception()
        return incoming

    async def _change(self, **changes: Any) -> None:
        async with self._changed:
            revision = self._control.revision + 1
            self._control = self._control.model_copy(update={**changes, "revision": revision})
            self._changed.notify_all()

    def _read(self, archive: WeightArchive, name: int) -> Layer:
        chunks, num_bytes = [], 0
        for arrays in archive.chunks(name):
            num_bytes += sum(array.nbytes for array in arrays.values())
            chunks.append(ray.put(arrays))
        return Layer(publication=archive.publication(name), chunks=tuple(chunks), num_bytes=num_bytes)


def _layer_of(incoming: _Incoming) -> Layer:
    return Layer(
        publication=incoming.publication(), chunks=tuple(incoming.chunks), num_bytes=incoming.num_bytes
    )


def _late(replicas: list[str], timeout_s: float, rule: str) -> Problem:
    return Problem(
        code="deadline_exceeded",
        field="timeout_s",
        value=timeout_s,
        rule=f"{len(replicas)} replicas ({', '.join(replicas[:5])}) {rule}",
        remedy="allow more time, or look at the fleet's state for what holds them up",
    )
