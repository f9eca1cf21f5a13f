"""The order for one sample, as the client sends it to a denoiser: the unit of work of the graph."""

from typing import Annotated

from pydantic import Field

from schemas.fields import Contract, Count, Float
from schemas.resolved import ResolvedRequest


class SampleOrder(Contract):
    """One sample of a resolved request."""

    checkpoint: str
    """Of the card that the request was resolved with."""
    checkpoint_digest: str
    """Likewise."""
    sample_id: str
    """Unique among all samples in flight; cancels and progress name it."""
    request: ResolvedRequest
    sample_index: Annotated[int, Field(ge=0)]
    """Which sample of its group this is, from 0."""
    until: Annotated[int, Field(ge=1)] | None = None
    """Step whose state ends the sample, for the prefix that a group shares; None: the last."""
    policy_version: Annotated[int, Field(ge=0)] | None = None
    """The version that the group is bound to; None: any that the request takes."""
    attempt: Count
    """1, or more when an earlier replica died with the sample."""
    lease_id: str
    """The client's lease; the sample is dropped when it runs out."""
    seconds_left: Annotated[Float, Field(ge=0)]
    """Seconds until the group's deadline, when the order was sent."""
    encode_s: Annotated[Float, Field(ge=0)]
    """Seconds that the client waited for the conditioning."""
