"""The one place where the policy lives: published weights, the control record, and what every replica says of itself.

A detached, named actor beside the app. It re-puts what is published, so that the objects are its own and neither the
trainer's nor a replica's death loses them; with a folder it writes them to disk as well. Replicas long-poll the control
record and report here from side threads: neither a publication nor a halt ever needs a request slot of a denoiser.

Its policies are those of one checkpoint, told by the digest of its weights: that of the replica which started last. It
knows none until a replica has registered, and what replicas of another checkpoint say is nothing to it.

A publication is begun, brought in chunks, and committed. Until all replicas have fetched it and found it to fit, nothing
has changed anywhere; then the record names it, and every replica changes at its next boundary.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from configs.settings import WeightSettings
from deployments.weights import troubles
from deployments.weights.handle import NAMESPACE, store_name
from deployments.weights.record import ControlRecord
from deployments.weights.roster import Roster
from deployments.weights.vault import WeightVault
from schemas.control import Distrust, Fleet, ReplicaState, RunOrder, RunState, Staged, When
from schemas.validation import validated
from schemas.weights import Publication, PublicationHeader, TensorSpec

logger = logging.getLogger(__name__)

MAX_DISTRUSTED = 100
STILLNESS: tuple[RunState, ...] = ("running", "paused", "asleep")
"""Rising."""


def make_store(app_name: str) -> ActorHandle:
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
        .remote(app_name)
    )


class WeightStore:
    """Keeps the policy of one app and directs its replicas. All methods take and return plain values."""

    def __init__(self, app_name: str, put: Callable[[Any], Any] = ray.put) -> None:
        self._app_name, self._put = app_name, put
        self._settings = WeightSettings()
        self._record = ControlRecord()
        self._roster = Roster(self._settings.silence_s)
        self._vault = WeightVault(self._settings, put)
        self._spec: dict[str, TensorSpec] = {}
        self._distrusted: list[Distrust] = []
        self._opening = asyncio.Lock()
        self._adopts_until = 0.0

    # For replicas

    async def register(
        self, state: dict[str, Any], spec: dict[str, Any], settings: dict[str, Any]
    ) -> dict[str, Any]:
        """A replica starts, or the store has: how it is, which tensors its transformer has, and the settings that are
        to hold. Returns the control record to be in line with. Raises RuntimeError (a Problem) for settings that cannot
        hold here, and ValueError (a Problem) for a folder that cannot be read whole."""
        known, wanted = ReplicaState.model_validate(state), WeightSettings.model_validate(settings)
        async with self._opening:
            now = self._record.now
            is_same = known.base_digest == now.base_digest
            if is_same and wanted.folder != self._settings.folder and max(now.version, known.version):
                raise troubles.other_folder(self._settings.folder, wanted.folder, now.version).exception()
            if not is_same or wanted.folder != self._settings.folder:
                await self._open(known.base_digest, wanted)
            self._settings, self._roster.silence_s = wanted, wanted.silence_s
            self._vault.limit(wanted)
            self._spec = _read(spec)
        await self._hear(known)
        return self._record.now.model_dump()

    async def watch(self, state: dict[str, Any], seen: int) -> dict[str, Any]:
        """The control record, as soon as it is newer than ``seen``, or after a while."""
        await self.report(state)
        with suppress(TimeoutError):
            await self._record.wait(lambda now: now.revision > seen, self._settings.poll_s)
        return {**self._record.now.model_dump(), "wants_spec": not self._spec}

    async def report(self, state: dict[str, Any]) -> None:
        """A replica says how it is."""
        known = ReplicaState.model_validate(state)
        self._vault.forget_silent()
        if known.base_digest == self._record.now.base_digest:
            await self._hear(known)
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
        return [
            (layer.publication.model_dump(), list(layer.chunks)) for layer in self._vault.layers(have, want)
        ]

    # For publishers

    async def begin(
        self, header: dict[str, Any], specs: dict[str, Any] | None, num_bytes: int | None
    ) -> tuple[str | None, str | None]:
        """Start a publication. ``specs`` and ``num_bytes`` of all its tensors where they are known beforehand.

        Returns the ticket that its parts come under; or the identity of that version when it is in place already, and
        no ticket. Raises ValueError (a Problem) for what cannot be published; nothing was sent then.
        """
        said, newest = validated(PublicationHeader, header), self._vault.newest()
        if newest is not None and said.version == newest.version == self._record.now.version:
            return None, newest.identity
        self._refuse_out_of_turn(said.version, said.update)
        tensors = None if specs is None else _read(specs)
        return self._vault.begin(header, self._spec, tensors, num_bytes), None

    async def add(
        self, ticket: str, specs: dict[str, Any], digests: dict[str, str], arrays: dict[str, Any]
    ) -> None:
        """One part of the publication. Its bytes are copied: they are the store's from then on."""
        await self._vault.add(ticket, _read(specs), digests, arrays)

    async def give_up(self, ticket: str) -> None:
        """Forget a publication that is on its way."""
        self._vault.give_up(ticket)

    async def commit(self, ticket: str, when: When, timeout_s: float) -> list[dict[str, Any]]:
        """Put the publication in place; returns every replica's state once it samples from it.

        Raises ValueError or RuntimeError (a Problem) when it does not fit, and TimeoutError when a replica has not
        fetched it in time: the version before it is then in place everywhere. Raises TimeoutError, too, when a replica
        has fetched it and did not come to its boundary in time: it is then the policy, no sample starts on another,
        and the error names who still finishes samples of the version before.
        """
        end = time.monotonic() + timeout_s
        try:
            swap_when = validated(RunOrder, {"run": "running", "when": when}).when
            publication = await self._vault.complete(ticket, timeout_s)
            await self._stage(publication, timeout_s)
            await self._vault.put_in_place(ticket)
        except BaseException:
            self._vault.give_up(ticket)
            await self._record.change(staged=None)
            raise
        await self._record.change(**self._in_place(), staged=None, swap_when=swap_when)
        return await self.acknowledged(publication.version, end - time.monotonic())

    async def acknowledged(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Every replica's state once all have ``version`` or a newer one in place, or stand still and will sample from
        nothing else when they go on. Raises TimeoutError (a Problem)."""

        def settled(state: ReplicaState) -> bool:
            now = self._record.now
            waits = state.run == "asleep" or (state.run == "paused" and now.swap_when == "between_samples")
            return state.version >= version or (waits and now.identity in state.staged)

        return _plain(await self._acknowledged(settled, timeout_s))

    # For all

    async def current(self, at_least: int, timeout_s: float) -> int:
        """The policy's version, once it is ``at_least``. Raises TimeoutError when it is not by then."""
        now = await self._record.wait(
            lambda now: bool(now.base_digest) and now.version >= at_least, timeout_s
        )
        return now.version

    async def set_run(self, run: RunState, when: When, timeout_s: float) -> list[dict[str, Any]]:
        """Let all replicas run, pause or sleep; returns their states once they do. Raises TimeoutError (a Problem), and
        RuntimeError (a Problem) when a replica cannot, which goes on trying."""
        order, end = validated(RunOrder, {"run": run, "when": when}), time.monotonic() + timeout_s
        try:
            await self._record.wait(lambda now: bool(now.base_digest), timeout_s)
        except TimeoutError:
            raise troubles.nobody_yet(timeout_s).exception() from None
        async with self._opening:
            await asyncio.to_thread(self._vault.keep_run, order)
            self._adopts_until = 0.0
            revision = await self._record.change(run=run, run_when=when)
        states = await self._acknowledged(lambda state: state.revision >= revision, end - time.monotonic())
        for state in states:
            if state.run != run:
                raise troubles.not_followed(state, run, self._record.now.run).exception()
        return _plain(states)

    async def fleet(self) -> dict[str, Any]:
        """The record, the replicas and the versions that are kept."""
        return Fleet(
            control=self._record.now,
            replicas=tuple(self._roster.states()),
            distrusted=tuple(self._distrusted),
            kept_versions=self._vault.versions,
            kept_bytes=self._vault.num_bytes,
        ).model_dump(mode="json")

    async def _open(self, base_digest: str, settings: WeightSettings) -> None:
        """Go on with the policies of a checkpoint that are on disk, or with none."""
        before, root = self._record.now, settings.folder
        folder = None
        if root is not None:
            folder = Path(root).expanduser() / f"{self._app_name}-{base_digest[:12]}"
        vault = await asyncio.to_thread(WeightVault, settings, self._put, folder)
        run = RunOrder(run=before.run, when=before.run_when)
        if before.base_digest:
            logger.warning("the app serves other weights now; their policies begin, the earlier ones end")
            await asyncio.to_thread(vault.keep_run, run)
        else:
            kept = await asyncio.to_thread(vault.run)
            run = kept or run
            self._adopts_until = 0.0 if kept else time.monotonic() + settings.silence_s
        self._vault, self._spec = vault, {}
        self._roster.start(settings.silence_s)
        await self._record.change(
            base_digest=base_digest, staged=None, run=run.run, run_when=run.when, **self._in_place()
        )

    async def _hear(self, known: ReplicaState) -> None:
        """What an earlier store had told a replica and this one does not know: it does not go back behind it."""
        now = self._record.now
        if known.version > now.version:
            # This store is newer than the policy and has no folder: it cannot hand it on.
            logger.error("version %d is sampled from and is not here any more; publish again", known.version)
            await self._record.change(version=known.version, identity="")
        is_stiller = STILLNESS.index(known.run) > STILLNESS.index(now.run)
        if is_stiller and time.monotonic() < self._adopts_until:
            await self._record.change(run=known.run)

    async def _stage(self, publication: Publication, timeout_s: float) -> None:
        """Have every replica fetch the publication and compare it with its own transformer."""
        identity = publication.identity
        revision = await self._record.change(staged=Staged(version=publication.version, identity=identity))
        try:
            states = await self._roster.wait(
                lambda state: identity in state.staged or state.revision >= revision, timeout_s
            )
        except TimeoutError:
            late = [state.replica_id for state in self._roster.states() if identity not in state.staged]
            rule = f"had not fetched version {publication.version}; the one before it stays"
            raise troubles.late(late, timeout_s, rule).exception() from None
        for state in states:
            if identity not in state.staged:
                raise troubles.not_staged(state).exception()

    async def _acknowledged(
        self, settled: Callable[[ReplicaState], bool], timeout_s: float
    ) -> list[ReplicaState]:
        try:
            return await self._roster.wait(settled, max(0.0, timeout_s))
        except TimeoutError:
            late = [state.replica_id for state in self._roster.states() if not settled(state)]
            rule = "had not come to their next boundary; they will follow there, and start nothing before"
            raise troubles.late(late, timeout_s, rule).exception() from None

    def _refuse_out_of_turn(self, version: int, update: str) -> None:
        """Raise ValueError (a Problem) for a version that is no newer, or when it cannot be published now."""
        newest, on_its_way = max(self._record.now.version, self._vault.version), self._vault.incoming_version
        if version <= newest:
            raise troubles.not_newer(version, newest).exception()
        if not self._spec:
            raise troubles.nothing_served(version).exception()
        if on_its_way is not None:
            raise troubles.on_its_way(version, on_its_way).exception()
        if self._vault.version < newest and update != "full":
            raise troubles.nothing_below(update, newest).exception()

    def _in_place(self) -> dict[str, Any]:
        """What the record says of the policy that is in place."""
        newest = self._vault.newest()
        return {"version": self._vault.version, "identity": newest.identity if newest else ""}


def _read(specs: dict[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.model_validate(spec) for name, spec in specs.items()}


def _plain(states: list[ReplicaState]) -> list[dict[str, Any]]:
    return [state.model_dump(mode="json") for state in states]
