"""The policy version that a group is sampled with, and whether all its samples have begun on it.

A group is bound to one version before its first sample is sent. A replica that has moved on when a sample gets there
says so, and the group is sampled again on the newer one. So that none of its samples is in a caller's hands by then, they
are handed over once every one has begun: what has begun ends on the version it began with. From then on the group stays on
its version, and a sample that must be made again when the version is gone fails. Confined to one event loop.
"""

import asyncio
from collections.abc import Iterable


class VersionGone(Exception):
    """A sample's replica has moved on from the version that its group is bound to."""


class Binding:
    """One attempt at a group, on one version."""

    def __init__(self, policy_version: int | None, sample_indices: Iterable[int]) -> None:
        self.policy_version = policy_version
        """None: each sample takes the version that its replica has."""
        self.is_gone = False
        """Whether the version was replaced before all samples had begun."""
        self._left = set(sample_indices)
        self._all_begun = asyncio.Event()
        if policy_version is None:
            self._all_begun.set()

    def note_begun(self, sample_index: int) -> None:
        """A sample has taken a step, is done, or will never be."""
        self._left.discard(sample_index)
        if not self._left:
            self._all_begun.set()

    @property
    def has_begun(self) -> bool:
        """Whether every sample has begun, so that some may be in a caller's hands."""
        return self._all_begun.is_set()

    async def all_begun(self) -> None:
        """Wait until every sample has begun."""
        await self._all_begun.wait()

    def gone(self) -> VersionGone:
        """To raise: the group is to be sampled again."""
        self.is_gone = True
        return VersionGone()
