"""Why a fleet is not where it should be or takes no publication, in words that its trainer can act on."""

from dataclasses import replace

from schemas.control import ReplicaState, RunState
from schemas.errors import Problem


def nobody_yet(timeout_s: float) -> Problem:
    """No replica has registered."""
    return Problem(
        code="deadline_exceeded",
        field="timeout_s",
        value=timeout_s,
        rule="no denoiser has told the weight store yet which weights it serves",
        remedy="wait until the app is running, or allow more time",
    )


def late(replicas: list[str], timeout_s: float, rule: str) -> Problem:
    """Replicas that were waited for too long."""
    if not replicas:
        rule = "passed while the weight store, which has just started, waited for replicas to be heard of"
    else:
        rule = f"{len(replicas)} replicas ({', '.join(replicas[:5])}) {rule}"
    return Problem(
        code="deadline_exceeded",
        field="timeout_s",
        value=timeout_s,
        rule=rule,
        remedy="allow more time, or look at the fleet's state for what holds them up",
    )


def not_staged(state: ReplicaState) -> Problem:
    """A replica that has not taken a publication."""
    if state.problem is not None:
        return Problem(**state.problem)
    return Problem(
        code="internal",
        rule=f"replica {state.replica_id} neither took the publication nor said why",
        remedy="see its log, and publish again",
    )


def not_followed(state: ReplicaState, wanted: RunState, now_wanted: RunState) -> Problem:
    """A replica that does not stand as it was told to."""
    if now_wanted != wanted:
        rule = f"the fleet was told to be {now_wanted} while it was on its way to be {wanted}"
        return Problem(code="internal", rule=rule, remedy="let one trainer at a time halt the fleet")
    rule = f"replica {state.replica_id} is {state.run} and not {wanted}"
    if state.problem is None:
        return Problem(code="internal", rule=rule, remedy="see its log; it goes on trying")
    said = Problem(**state.problem)
    return replace(said, field=None, value=None, rule=f"{rule}: {said}", remedy="it goes on trying")


def other_folder(folder: str | None, wanted: str | None, version: int) -> Problem:
    """Settings that would lose the policy that is in place."""
    return Problem(
        code="internal",
        field="weights.folder",
        value=wanted,
        rule=f"cannot change while the weight store keeps version {version} under {folder}",
        remedy="leave it as it is, or end the store first (docs/weights.md) and publish again",
    )


def not_newer(version: int, newest: int) -> Problem:
    """A version that was there before."""
    rule = f"must be greater than the newest, {newest}: versions only grow"
    return _refused("version", version, rule, f"use {newest + 1}")


def nothing_served(version: int) -> Problem:
    """No replica has registered."""
    rule = "no denoiser has said yet which tensors it has"
    return _refused("version", version, rule, "publish when the app is running")


def on_its_way(version: int, other: int) -> Problem:
    """Another publication has begun."""
    rule = f"cannot be published while version {other} is on its way"
    return _refused("version", version, rule, "one trainer publishes at a time; try again when that is done")


def nothing_below(update: str, newest: int) -> Problem:
    """The version that an update would lie on is not here any more."""
    rule = f"must be full: version {newest}, on which it would lie, went with an earlier store"
    remedy = "publish the full weights, and set weights.folder to keep them"
    return _refused("update", update, rule, remedy)


def _refused(field: str, value: object, rule: str, remedy: str) -> Problem:
    return Problem(code="weights_refused", field=field, value=value, rule=rule, remedy=remedy)
