"""What a caller may ask for: one prompt, and a group of samples of it.

A dict is accepted wherever a `RolloutRequest` is. It holds the rules that need no checkpoint;
`schemas.resolve` adds those that need the model card, and fills in what was left out. None means "left out",
so a request survives `model_dump` and back.

This module does not know which checkpoint is served, nor its limits.

Invariant: a field of the other mode, or that contradicts another, is refused, never ignored.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from schemas.card import MAX_METADATA_BYTES, StateDtype
from schemas.errors import invalid
from schemas.fields import Bool, Contract, Count, Floats, Index, Indices, Positive
from schemas.sampling import Guidance, Guider, Transition, Transitions
from schemas.validation import validated

__all__ = ["Guidance", "Guider", "RolloutRequest", "Transition", "Transitions"]

Mode = Literal["rollout", "generate"]
SigmaShift = Literal["constant", "tokens"]

MAX_SEED = 2**63 - 1
MAX_FRAME_RATE = 1000.0
MAX_METADATA_DEPTH = 32
"""Nested lists and objects; JSON parsers give up somewhere past 100."""


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(
            None, text, "must be Unicode text without lone surrogates", "take them out"
        ).refusal() from None
    if "\0" in text:
        raise invalid(None, text, "must not hold a NUL character", "take it out").refusal()
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise invalid(None, text, "must not be empty", "say what is to be seen and heard").refusal()
    return text


def _sigmas(sigmas: tuple[float, ...]) -> tuple[float, ...]:
    """Checked as the float32 numbers they are used as: closer neighbours would make a step of no length."""
    if not sigmas:
        remedy = "leave it out for the checkpoint's own grid"
        raise invalid(None, sigmas, "must hold at least one sigma", remedy).refusal()
    before = float("inf")
    with np.errstate(over="ignore"):  # what leaves float32 is above 1, and told so
        used: list[float] = np.asarray(sigmas, np.float32).tolist()
    for step, sigma in enumerate(used):
        if not 0 < sigma <= 1:
            remedy = "leave the terminal 0 out, it is added" if sigma == 0 else ""
            raise invalid(str(step), sigmas[step], "must be greater than 0 and at most 1", remedy).refusal()
        if sigma >= before:
            rule = f"must be less than the sigma before it, {sigmas[step - 1]!r}, in float32"
            raise invalid(str(step), sigmas[step], rule, "order them from high to low, each once").refusal()
        before = sigma
    return sigmas


def _each_once(steps: tuple[int, ...]) -> tuple[int, ...]:
    before: set[int] = set()
    for position, step in enumerate(steps):
        if step in before:
            raise invalid(str(position), step, "must not be named before", "name each step once").refusal()
        before.add(step)
    return steps


def _request_id(text: str) -> str:
    # It is a segment of links: "." and ".." lead elsewhere.
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}", text):
        rule = "must be 1 to 128 characters of A-Z, a-z, 0-9, '_', '-' and, but for the first, '.'"
        raise invalid(None, text, rule, "leave it out to have one drawn").refusal()
    return text


def _metadata(given: object) -> object:
    """As plain JSON values. Anything that JSON would change on its way is refused, so what is echoed is
    equal."""
    remedy = "keep it with the trainer, and send a key to it"
    if _nests_deeper(given, MAX_METADATA_DEPTH):
        rule = f"must nest at most {MAX_METADATA_DEPTH} deep"
        raise invalid(None, None, rule, remedy).refusal()
    try:
        plain: object = json.loads(json.dumps(given, allow_nan=False))
        size = metadata_bytes(plain)
    except (TypeError, ValueError):
        plain, size = None, 0
    if given is not None and plain != given:
        rule = "must be JSON: objects with text keys, lists, text, finite numbers, true, false and null"
        raise invalid(None, given, rule, "turn tuples into lists and other objects into text").refusal()
    if size > MAX_METADATA_BYTES:
        rule = f"must be at most {MAX_METADATA_BYTES} bytes of JSON, but has {size}"
        raise invalid(None, None, rule, remedy).refusal()
    return plain


def _nests_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, Mapping | list | tuple):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return levels == 0 or any(_nests_deeper(item, levels - 1) for item in inner)


def metadata_bytes(metadata: object) -> int:
    """Size of `metadata` as compact JSON in UTF-8."""
    return len(json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode())


Text = Annotated[str, Field(strict=True), AfterValidator(_text)]
Prompt = Annotated[Text, AfterValidator(_not_blank)]
RequestId = Annotated[str, Field(strict=True), AfterValidator(_request_id)]
Metadata = Annotated[dict[str, Any], BeforeValidator(_metadata)]
Seed = Annotated[Index, Field(le=MAX_SEED)]
FrameRate = Annotated[Positive, Field(le=MAX_FRAME_RATE)]
Sigmas = Annotated[Floats, AfterValidator(_sigmas)]
Steps = Annotated[Indices, AfterValidator(_each_once)]
ReturnSteps = Annotated[
    Annotated[Literal["transitions", "all"], Tag("[word]")] | Annotated[Steps, Tag("[list]")],
    Discriminator(lambda given: "[word]" if isinstance(given, str) else "[list]"),
]


class RolloutRequest(Contract):
    """One prompt, and how to sample a group of it. `schemas.resolve` says what each None becomes."""

    prompt: Prompt
    """What is to be seen and heard. White space around it is taken off."""
    negative_prompt: Text | None = None
    """What guidance leads away from; None: the empty text. Refused where no guidance is above 1."""
    mode: Mode = "rollout"
    """rollout: stochastic, with log-probs; generate: the native guider, deterministic, what a user would
    watch."""
    num_samples: Count = 1
    """Samples in the group."""
    seed: Seed | None = None
    """Of all noise: sample k's keys are (seed, k, modality, step). None: drawn, and echoed in each
    manifest."""

    height: Count | None = None
    """Pixels, a whole number of tokens (for LTX-2.3, a multiple of 32)."""
    width: Count | None = None
    """Pixels, a whole number of tokens (for LTX-2.3, a multiple of 32)."""
    num_frames: Count | None = None
    """Frames of video (for LTX-2.3, 8k + 1). The audio lasts as long."""
    frame_rate: FrameRate | None = None
    """Frames per second."""

    num_inference_steps: Count | None = None
    """Denoising steps on the checkpoint's own sigma grid."""
    sigmas: Sigmas | None = None
    """The grid itself, used as it is: falling strictly in (0, 1], without the terminal 0. In place of
    num_inference_steps and sigma_shift."""
    sigma_shift: SigmaShift | None = None
    """constant: the official shift, mu = 2.05; tokens: diffusers' shift, by the number of video tokens. None:
    constant in a rollout, tokens in generate."""

    guidance: Guidance | None = None
    """Rollout only. None: off for both."""
    guider: Guider | None = None
    """Generate only. None: diffusers' defaults."""
    transition: Transitions | None = None
    """Rollout only. None: sde at 0.7 with density, for both."""
    stochastic_steps: Steps | None = None
    """Rollout only: the steps that move by the transition; the others move by ode. One list for the whole
    group. None: all that can be, in each modality."""
    shared_initial_noise: Bool = False
    """Whether all samples of the group start from the same state."""
    shared_prefix: Bool = False
    """Rollout only, with shared_initial_noise: compute the steps before the first stochastic one, which are
    then the same for the whole group, once instead of once per sample."""

    return_steps: ReturnSteps = "transitions"
    """States to keep, where state k is the one before step k: transitions (before and after each stochastic
    step), all, or a list. The last state is always kept."""
    state_dtype: StateDtype = "float32"
    """What the state is stored in between steps, and so what it is computed from."""
    trajectory: Bool = True
    """Whether a trajectory is wanted; without one only the last state is kept, for the decoder."""
    media: Bool = True
    """Whether video and audio are wanted."""

    min_policy_version: Index | None = None
    """The oldest version of the policy to sample from; one that is not published yet is waited for. None: any."""
    allow_mixed_versions: Bool = False
    """Whether samples of the group may be of different versions. If not, a group that was begun when a newer version
    came is sampled again as a whole, and its samples are handed over once all of them have begun."""

    request_id: RequestId | None = None
    """Names the rollout in its manifests and answers. None: one is drawn."""
    metadata: Metadata | None = None
    """Up to 4 KiB of JSON, echoed in each manifest."""
    deadline_s: Positive | None = None
    """Seconds from submission until samples that are not done are given up."""

    @classmethod
    def of(cls, given: "RolloutRequest | Mapping[str, Any]") -> "RolloutRequest":
        """The request that `given` is or describes. Raises ValueError (a Problem)."""
        return given if isinstance(given, RolloutRequest) else validated(cls, given)

    @model_validator(mode="before")
    @classmethod
    def _no_image_inputs(cls, given: object) -> object:
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name not in cls.model_fields and _IMAGE_INPUT.search(str(name)):
                rule = "image inputs cannot be sampled: a sample starts from a prompt and noise alone"
                raise invalid(str(name), value, rule, "leave it out").refusal()
        return given

    @model_validator(mode="after")
    def _every_field_has_an_effect(self) -> Self:
        if self.sigmas is not None:
            self._refuse(
                "num_inference_steps", "cannot be given together with sigmas", "leave one of the two out"
            )
            self._refuse("sigma_shift", "cannot be given together with sigmas", "leave one of the two out")
        if self.mode == "rollout":
            self._refuse("guider", "cannot be given in mode rollout", "use guidance, or mode generate")
            guided = (self.guidance or Guidance()).needs_negative_prompt
        else:
            self._refuse("guidance", "cannot be given in mode generate", "use guider, or mode rollout")
            self._refuse(
                "transition", "cannot be given in mode generate", "leave it out, or use mode rollout"
            )
            self._refuse(
                "stochastic_steps", "cannot be given in mode generate", "leave it out, or use mode rollout"
            )
            guided = (self.guider or Guider()).needs_negative_prompt
        if not guided:
            remedy = "set guidance above 1 or leave negative_prompt out"
            self._refuse("negative_prompt", "has no effect without guidance", remedy)
        if not self.trajectory:
            if not self.media:
                raise invalid(
                    "trajectory", False, "cannot be false when media is", "ask for one of the two"
                ).refusal()
            if self.return_steps != "transitions":
                self._refuse(
                    "return_steps", "cannot be given when trajectory is false", "leave one of the two out"
                )
        return self

    def _refuse(self, field: str, rule: str, remedy: str) -> None:
        """Refuse `field` if it was given."""
        value = getattr(self, field)
        if value is not None:
            shown = value.model_dump(exclude_unset=True) if isinstance(value, Contract) else value
            raise invalid(field, shown, rule, remedy).refusal()


_IMAGE_INPUT = re.compile(r"image|^(videos?|conditions?|conditioning|keyframes?|(first|last)_frame)$")
"""What callers of other pipelines call an image, or a video to start from."""
