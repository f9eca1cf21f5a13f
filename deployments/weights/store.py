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
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from configs.settings import WeightSettings
from deployments.weights.handle import NAMESPACE, store_name
from deployments.weights.roster import Roster
from deployments.weights.vault import WeightVault
from schemas.control import Control, Distrust, Fleet, ReplicaState, RunState, Staged, When
from schemas.errors import Problem
from schemas.weights import Publication, TensorSpec

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


class WeightStore:
    """Keeps the policy of one app and directs its replicas. All methods take and return plain values."""

    def __init__(self, app_name: str, settings: dict[str, Any], checkpoint_digest: str) -> None:
        self._app_name = app_name
        self._settings = WeightSettings.model_validate(settings)
        # From the clock, so that a replica that followed an earlier store takes this one's records for newer.
        self._control = Control(revision=int(time.time() * 1000))
        self._changed = asyncio.Condition()
        self._roster = Roster(self._settings.silence_s)
        self._spec: dict[str, TensorSpec] = {}
        self._distrusted: list[Distrust] = []
        self._open(checkpoint_digest)

    def _open(self, checkpoint_digest: str) -> None:
        """With the policies of a checkpoint that are on disk, or none."""
        self._checkpoint_digest, root = checkpoint_digest, self._settings.folder
        name = f"{self._app_name}-{checkpoint_digest[:12]}"
        folder = None if root is None else Path(root).expanduser() / name
        self._vault = WeightVault(self._settings, ray.put, folder)
        self._control = self._control.model_copy(update=self._in_place())

    # For replicas

    async def register(self, checkpoint_digest: str, spec: dict[str, Any]) -> dict[str, Any]:
        """A replica starts: which tensors its transformer has. Returns the control record to be in line with."""
        if checkpoint_digest != self._checkpoint_digest:
            logger.warning("the app serves another checkpoint now; its policies start anew")
            self._open(checkpoint_digest)
            await self._change(staged=None)
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
            await self._change(version=known.version, identity="")
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
    ) -> tuple[str | None, dict[str, str] | None]:
        """Start a publication. ``specs`` and ``num_bytes`` of all its tensors where they are known beforehand.

        Returns the ticket that its parts come under; or the digests of that version when it is in place already, and
        no ticket. Raises ValueError (a Problem) for what cannot be published; nothing was sent then.
        """
        version, newest = int(header["version"]), self._vault.newest()
        if newest is not None and version == newest.version == self._control.version:
            return None, newest.digests
        self._refuse_out_of_turn(version, header["update"])
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
            publication = await self._vault.complete(ticket, timeout_s)
            await self._stage(publication, timeout_s)
            await self._vault.put_in_place(ticket)
        except BaseException:
            self._vault.give_up(ticket)
            await self._change(staged=None)
            raise
        await self._change(**self._in_place(), staged=None, when=when)
        return await self.acknowledged(publication.version, end - time.monotonic())

    async def acknowledged(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Every replica's state once all sample from ``version`` or a newer one, or will when they wake. Raises
        TimeoutError (a Problem)."""

        def settled(state: ReplicaState) -> bool:
            is_ready = state.run == "asleep" and state.staged == self._control.identity
            return state.version >= version or is_ready

        return await self._acknowledged(settled, timeout_s)

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
            kept_versions=self._vault.versions,
            kept_bytes=self._vault.num_bytes,
        ).model_dump(mode="json")

    async def _stage(self, publication: Publication, timeout_s: float) -> None:
        """Have every replica fetch the publication and compare it with its own transformer."""
        identity = publication.identity
        await self._change(staged=Staged(version=publication.version, identity=identity))
        revision = self._control.revision
        try:
            states = await self._roster.wait(
                lambda state: state.staged == identity or state.revision >= revision, timeout_s
            )
        except TimeoutError:
            late = [state.replica_id for state in self._roster.states() if state.staged != identity]
            rule = f"had not fetched version {publication.version}; the one before it stays"
            raise _late(late, timeout_s, rule).exception() from None
        for state in states:
            if state.staged != identity:
                raise (Problem(**state.problem) if state.problem else _not_staged(state)).exception()

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

    def _refuse_out_of_turn(self, version: int, update: str) -> None:
        """Raise ValueError (a Problem) for a version that is no newer, or when it cannot be published now."""
        newest, on_its_way = self._control.version, self._vault.incoming_version
        field: str = "version"
        value: object = version
        if version <= newest:
            rule, remedy = (
                f"must be greater than the newest, {newest}: versions only grow",
                f"use {newest + 1}",
            )
        elif not self._spec:
            rule, remedy = "no denoiser has said yet which tensors it has", "publish when the app is running"
        elif on_its_way is not None:
            rule = f"cannot be published while version {on_its_way} is on its way"
            remedy = "one trainer publishes at a time; try again when that is done"
        elif self._vault.version < newest and update != "full":
            field, value = "update", update
            rule = f"must be full: version {newest}, on which it would lie, went with an earlier store"
            remedy = "publish the full weights, and set weights.folder to keep them"
        else:
            return
        raise Problem(code="weights_refused", field=field, value=value, rule=rule, remedy=remedy).exception()

    def _in_place(self) -> dict[str, Any]:
        """What the record says of the policy that is in place."""
        newest = self._vault.newest()
        return {"version": self._vault.version, "identity": newest.identity if newest else ""}

    async def _change(self, **changes: Any) -> None:
        async with self._changed:
            revision = self._control.revision + 1
            self._control = self._control.model_copy(update={**changes, "revision": revision})
            self._changed.notify_all()


def _read(specs: dict[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.model_validate(spec) for name, spec in specs.items()}


def _not_staged(state: ReplicaState) -> Problem:
    return Problem(
        code="internal",
        rule=f"replica {state.replica_id} neither took the publication nor said why",
        remedy="see its log, and publish again",
    )


def _late(replicas: list[str], timeout_s: float, rule: str) -> Problem:
    return Problem(
        code="deadline_exceeded",
        field="timeout_s",
        value=timeout_s,
        rule=f"{len(replicas)} replicas ({', '.join(replicas[:5])}) {rule}",
        remedy="allow more time, or look at the fleet's state for what holds them up",
    )
