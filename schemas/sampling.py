"""How a sample moves: guidance, and the transition of each modality.

These are the parts of a request that the mathematics of a step reads. They know no steps, no sizes and no
checkpoint.

Invariant: video and audio are set apart from each other everywhere, and neither is a default for the other,
except in `Guider`, which reads as diffusers' does.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.errors import invalid
from schemas.fields import Contract, Float, Indices

TransitionKind = Literal["sde", "cps", "dance", "ode"]
LogProbKind = Literal["density", "squared_error"]

MAX_SCALE = 100.0
"""Of any guidance; scales in use are 1 to 15."""
MIN_NOISE_LEVEL, MAX_NOISE_LEVEL = 1e-4, 100.0
"""Levels in use are 0.1 to 1.5. Below the first the noise drowns in the rounding of the state; above the
second the squares in a transition come near the end of float32."""

Scale = Annotated[Float, Field(ge=0, le=MAX_SCALE)]
Rescale = Annotated[Float, Field(ge=0, le=1)]


class Guidance(Contract):
    """Plain classifier-free guidance in velocity space, v = v_neg + g (v_pos - v_neg); g = 1 is off."""

    video: Annotated[Scale, Field(ge=1)] = 1.0
    """g of the video velocity."""
    audio: Annotated[Scale, Field(ge=1)] = 1.0
    """g of the audio velocity."""

    @property
    def needs_negative_prompt(self) -> bool:
        """Whether it is on, for either modality."""
        return self.video > 1 or self.audio > 1


class Guider(Contract):
    """LTX-2.3's native guider, with the names, defaults and reading of diffusers' `LTX2Pipeline`.

    An audio value of None or 0 means "as for video", as it does there.
    """

    guidance_scale: Scale = 3.0
    """Classifier-free guidance of video; 1 is off."""
    stg_scale: Scale = 1.0
    """Spatio-temporal guidance of video; 0 is off."""
    modality_scale: Scale = 3.0
    """Modality isolation guidance of video; 1 is off."""
    guidance_rescale: Rescale = 0.7
    """How far guided video is brought back to the standard deviation of unguided video; 0 is off."""
    audio_guidance_scale: Scale | None = 7.0
    """Classifier-free guidance of audio."""
    audio_stg_scale: Scale | None = 1.0
    """Spatio-temporal guidance of audio."""
    audio_modality_scale: Scale | None = 3.0
    """Modality isolation guidance of audio."""
    audio_guidance_rescale: Rescale | None = 0.7
    """How far guided audio is brought back."""
    spatio_temporal_guidance_blocks: Indices | None = None
    """Transformer blocks that spatio-temporal guidance perturbs. None: block 28, the last where there are
    fewer."""

    @property
    def needs_negative_prompt(self) -> bool:
        """Whether classifier-free guidance is on, for either modality."""
        return self.guidance_scale > 1 or (self.audio_guidance_scale or self.guidance_scale) > 1


class Transition(Contract):
    """How one modality moves in its stochastic steps."""

    kind: TransitionKind = "sde"
    """sde (Flow-GRPO), cps (coefficient-preserving), dance (DanceGRPO), or ode (Euler, deterministic)."""
    noise_level: Annotated[Float, Field(ge=0, le=MAX_NOISE_LEVEL)] = 0.7
    """eta; 0 makes any kind an ode. At most 1 for cps. Left out, it is 0.7, and 0 for ode."""
    log_prob_kind: LogProbKind = "density"
    """density: the Gaussian log-density; squared_error: -(x' - mean)^2. Clip ranges mean nothing without
    it."""

    @property
    def is_stochastic(self) -> bool:
        """Whether any step can move with noise."""
        return self.kind != "ode" and self.noise_level > 0

    @model_validator(mode="before")
    @classmethod
    def _ode_has_no_noise(cls, given: object) -> object:
        if isinstance(given, Mapping) and given.get("kind") == "ode":
            return {"noise_level": 0.0, **given}
        return given

    @model_validator(mode="after")
    def _noise_level_suits_the_kind(self) -> Self:
        level = self.noise_level
        if self.kind == "ode" and level != 0:
            remedy = "leave it out, or use kind sde, cps or dance"
            raise invalid("noise_level", level, "must be 0 for ode", remedy).refusal()
        if self.kind == "cps" and level > 1:
            raise invalid("noise_level", level, "must be at most 1 for cps", "use 1").refusal()
        if 0 < level < MIN_NOISE_LEVEL:
            rule = f"must be 0 or at least {MIN_NOISE_LEVEL:g}"
            raise invalid("noise_level", level, rule, f"use 0 or {MIN_NOISE_LEVEL:g}").refusal()
        return self


class Transitions(Contract):
    """One transition per modality."""

    video: Transition = Transition()
    """Of the video latents."""
    audio: Transition = Transition()
    """Of the audio latents."""
