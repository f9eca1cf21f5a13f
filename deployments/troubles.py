"""What can go wrong between a client and the stages, in words."""

from deployments.group import RolloutGroup
from schemas.errors import Problem


def out_of_time(group: RolloutGroup) -> Problem:
    """The group was not done by its deadline."""
    return Problem(
        code="deadline_exceeded",
        field="deadline_s",
        value=group.request.deadline_s,
        rule="the group was not done in time",
        remedy="allow more time, ask for fewer steps or samples, or add replicas of the slowest stage",
    )


def never_published(group: RolloutGroup) -> Problem:
    """The version that a group asks for did not come in time."""
    return Problem(
        code="deadline_exceeded",
        field="min_policy_version",
        value=group.request.min_policy_version,
        rule="was not published before the group's deadline, or the weight store did not answer",
        remedy="publish it first, or allow more time with deadline_s",
    )


def cancelled() -> Problem:
    """Somebody cancelled the group."""
    return Problem(code="cancelled", rule="the group was cancelled by its caller", remedy="submit it again")


def halted() -> Problem:
    """A denoiser that stands still takes no orders."""
    return Problem(
        code="halted",
        rule="sampling is paused, or the weights are asleep (denoiser.when_halted: refuse)",
        remedy="try again when it was resumed, or set denoiser.when_halted to wait",
    )
