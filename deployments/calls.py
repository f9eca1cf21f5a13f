"""Calls between deployments as object refs, and what went wrong in them as Problems.

The only module that touches what Ray does not call public. All refs here are owned by the calling process, so they
outlive the replica that made the value.
"""

import asyncio

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OwnerDiedError,
    RayError,
    WorkerCrashedError,
)
from ray.experimental.locations import get_local_object_locations
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentResponse

from schemas.errors import Problem

REPLICA_DEATHS = (ActorDiedError, ActorUnavailableError, ObjectLostError, OwnerDiedError, WorkerCrashedError)
"""Errors after which the same call on another replica gives the same sample."""

MAX_INLINED_BYTES = 100 * 2**10
"""Of a result that Ray hands over in the answer itself, and keeps in the caller's memory."""


async def finished_ref(response: DeploymentResponse) -> ray.ObjectRef:
    """The ref of a call's result once it is there; raises the call's error. The value is not fetched.

    Cancelling the wait cancels the call.
    """
    try:
        ref = await response._to_object_ref()
        await ref._ready()
    except asyncio.CancelledError:
        response.cancel()
        raise
    if not _in_object_store(ref):
        # Small values and all errors live in this process already: looking costs nothing.
        await ref
    return ref


def _in_object_store(ref: ray.ObjectRef) -> bool:
    return bool(get_local_object_locations([ref]).get(ref, {}).get("node_ids"))


def size_of(ref: ray.ObjectRef) -> int:
    """Bytes of a result that is there; where it is so small that this process holds it itself, the most that can be."""
    found = get_local_object_locations([ref]).get(ref, {}).get("object_size")
    return found if found and found > 0 else MAX_INLINED_BYTES


def problem_of(error: BaseException) -> Problem:
    """What a failed call means to the caller."""
    known = Problem.of(error)
    if known is not None:
        return known
    if isinstance(error, BackPressureError):
        return Problem(
            code="queue_full",
            rule="the deployment's queue is full (max_queued_requests)",
            remedy="send fewer requests at a time, or try again shortly",
        )
    if replica_died(error):
        return Problem(code="replica_died", rule="the replica died during the call", remedy="submit it again")
    return Problem(code="internal", rule=f"{type(error).__name__}: {error}", remedy="see the replica's log")


def replica_died(error: BaseException) -> bool:
    """Whether the call's replica or its data is gone, rather than the call refused."""
    problem = Problem.of(error)
    if problem is not None:
        return problem.code == "replica_died"
    if isinstance(error, REPLICA_DEATHS):
        return True
    return isinstance(error, RayServeException | RayError) and "died" in str(error).lower()
