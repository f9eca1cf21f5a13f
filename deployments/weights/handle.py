"""Finding an app's weight store, a named actor since it outlives the deployments that use it, and asking it."""

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from schemas.errors import Problem

NAMESPACE = "ltx_rollout"


def store_name(app_name: str) -> str:
    """Name of an app's store in `NAMESPACE`."""
    return f"weights of {app_name}"


def find_store(app_name: str) -> ActorHandle:
    """The store of a running app. Raises RuntimeError (a Problem) when there is none."""
    try:
        return ray.get_actor(store_name(app_name), namespace=NAMESPACE)
    except ValueError:
        raise Problem(
            code="internal",
            field="app_name",
            value=app_name,
            rule="has no weight store: no denoiser of it has started yet",
            remedy="wait until the app is running",
        ).exception() from None


def answer(call: ray.ObjectRef, timeout_s: float) -> Any:
    """What the store answers. What it refuses is raised here as it was there: a builtin exception whose text is a Problem."""
    try:
        return ray.get(call, timeout=timeout_s)
    except RayTaskError as error:
        problem = Problem.of(error)
        if problem is None:
            raise
        raise problem.exception() from None
