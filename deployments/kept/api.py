"""What the HTTP side asks of the archive of rollouts, and nothing of how it does it.

`deployments.archive` is the archive; `deployments.kept.client` reaches it by handle; tests put a fake here.
"""

from typing import Any, Protocol, TypedDict


class Submitted(TypedDict):
    """A rollout that is under way, or was already there under its request_id."""

    id: str
    """The request_id; drawn where none was given."""
    group_id: str
    """Tells it from another rollout under the same id, earlier or later."""
    request: dict[str, Any]
    """The request as it is sampled, every default filled in."""


class SettledSample(TypedDict):
    """One sample, done or failed. Refs are awaited for their value, any number of times."""

    sample_index: int
    attempt: int
    trajectory: Any
    """Ref of the trajectory table; None when it failed or none was asked for."""
    media: Any
    """Ref of the media tables, {"video": table, "audio": table}; None likewise."""
    problem: dict[str, Any] | None
    """Payload of a `schemas.errors.Problem`; None when it was done."""


class Settled(TypedDict):
    """A rollout whose samples are all done or have failed."""

    id: str
    group_id: str
    """As in `Submitted`."""
    request: dict[str, Any]
    policy_version: int | None
    """None where the samples may be of different versions, and where none was begun."""
    conditioning: Any
    """Ref of the conditioning table; None where the prompt was not encoded."""
    samples: list[SettledSample]
    """By sample_index."""


class SampleProgress(TypedDict):
    """How far one sample has come."""

    sample_index: int
    attempt: int
    steps_done: int
    num_steps: int
    state: str
    """running (or not begun), done or failed."""
    problem: dict[str, Any] | None
    """Payload of a Problem where it failed."""


class Archive(Protocol):
    """Samples rollouts, and keeps them under their request_id.

    All methods raise a builtin exception whose text is a Problem (`Problem.of`) when they cannot: code `not_found` for an
    id that is not known, `gone` for one that was kept once.
    """

    async def submit(self, request: dict[str, Any], *, from_http: bool = True) -> Submitted:
        """Start a rollout, or find the one that is there: the same request under the same request_id is one rollout.

        Raises ``invalid_request`` for what cannot be sampled, ``conflict`` for another request under a request_id that
        is taken, and ``queue_full`` where ``from_http`` says that the limits of HTTP hold. A rollout that failed as a
        whole does not take its request_id. Wait for it soon: one that nobody waits for is given up.
        """
        ...

    async def find(self, id: str) -> Submitted:
        """The rollout that is under way or kept under an id."""
        ...

    async def wait(self, id: str, group_id: str | None = None) -> Settled:
        """The rollout, once it is settled. When the last of those who wait is cancelled, the rollout is, unless another
        caller was told of it a moment ago.

        ``group_id``: of the rollout that was submitted or found; another one under its id is ``gone``. None: the one that
        is there.
        """
        ...

    async def progress(
        self, id: str, group_id: str, seen: list[SampleProgress] | None
    ) -> list[SampleProgress]:
        """How far its samples are, as soon as that differs from ``seen``, or after a while. Does not count as waiting."""
        ...

    async def cancel(self, id: str) -> None:
        """Stop what runs of it and forget it: it is gone from then on."""
        ...
