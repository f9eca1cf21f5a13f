"""A Problem as an HTTP answer: RFC 9457's problem details, with the Problem's own fields as extension members."""

from typing import Any

from schemas.errors import Code, Problem
from schemas.fields import Contract

TYPE_PREFIX = "urn:ltx-rollout:problem:"
TITLES: dict[Code, str] = {
    "invalid_request": "The request cannot be answered as it is",
    "weights_refused": "The weights do not fit",
    "deadline_exceeded": "Not done by its deadline",
    "cancelled": "Cancelled",
    "lease_expired": "The client fell silent",
    "non_finite": "The state became NaN or infinite",
    "out_of_memory": "Out of memory at this size",
    "queue_full": "Full at the moment",
    "replica_died": "A replica died",
    "policy_version_gone": "The policy was replaced meanwhile",
    "checkpoint_replaced": "The app serves another checkpoint now",
    "halted": "Sampling is halted",
    "conflict": "The request_id is taken",
    "not_found": "Not there",
    "gone": "Not there any more",
    "internal": "Something went wrong here",
}


class ProblemDetails(Contract):
    """What every answer that is no success holds, as application/problem+json."""

    type: str
    """urn:ltx-rollout:problem: and the code."""
    title: str
    """The kind of problem, in words."""
    status: int
    """The HTTP status."""
    detail: str
    """The whole of it in one sentence: field, rule, value, remedy."""
    code: Code
    """The kind of problem."""
    field: str | None
    """Dotted name of the wrong field, as the caller wrote it; null: no single field."""
    value: Any
    """What was found there, cut where it is long."""
    rule: str
    """What should have held."""
    remedy: str
    """What to do instead."""

    @classmethod
    def of(cls, problem: Problem, status: int) -> "ProblemDetails":
        """The details of a problem that is answered with ``status``."""
        return cls(
            type=f"{TYPE_PREFIX}{problem.code}",
            title=TITLES[problem.code],
            status=status,
            detail=str(problem),
            code=problem.code,
            field=problem.field,
            value=problem.value,
            rule=problem.rule,
            remedy=problem.remedy,
        )
