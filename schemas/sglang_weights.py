"""Bodies of SGLang's weight routes, in its words; `version` is added.

This module knows no path and no weights.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.errors import invalid
from schemas.fields import Bool, Contract, Count
from schemas.request import Text

MODULE = "transformer"
"""The policy; other modules of a checkpoint are not published."""

MAX_NAMES, MAX_NAME_CHARS = 100, 100
"""Of modules; a checkpoint has about ten."""

Names = Annotated[
    list[Annotated[Text, Field(max_length=MAX_NAME_CHARS)]],
    Field(max_length=MAX_NAMES),
]


class UpdateFromDisk(Contract):
    """The body of `POST /update_weights_from_disk`."""

    model_path: Text = Field(min_length=1)
    """A checkpoint with a folder `transformer`, or that folder, or a safetensors file; under http.weights_root."""
    flush_cache: Bool = True
    """Taken, and without effect: nothing is cached from step to step."""
    target_modules: Names | None = None
    """null or ["transformer"]."""
    version: Count | None = None
    """Added: the policy's version from then on. null: one more than the present one."""

    @model_validator(mode="after")
    def _only_the_policy(self) -> Self:
        others = [name for name in self.target_modules or [] if name != MODULE]
        if others or self.target_modules == []:
            rule, remedy = f'must be ["{MODULE}"]: only the policy is published', "leave it out"
            raise invalid("target_modules", self.target_modules, rule, remedy).refusal()
        return self


class ChecksumRequest(Contract):
    """The body of `POST /get_weights_checksum`."""

    module_names: Names | None = None
    """null: all that are published, which is the transformer."""


class WeightsAnswer(Contract):
    """What the routes that change something answer."""

    success: bool
    message: str
    sleeping: bool | None = None
    """Whether the weights are off the device; null of an update."""
    policy_version: int | None = None
    """Added: the policy's version from then on."""
    weights_digest: str | None = None
    """Added: the digest of each replica's weights from then on."""


class WeightsRefusal(Contract):
    """What they answer when it was not done: a Problem, with that server's two fields."""

    success: Literal[False] = False
    message: str
    """The problem as a sentence."""
    code: str
    field: str | None
    value: object
    rule: str
    remedy: str
