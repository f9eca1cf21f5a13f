"""From what was asked to what will be sampled: every default filled in, every rule applied.

It runs once, in the client, before anything is sent, and again in the replica on what arrives: a request that
is resolved already comes back equal, or is refused by the card of the replica.

This module holds no rule of its own (`schemas.request`, `schemas.checks`), and knows nothing of tensors.

Invariants:
* `resolve(resolve(request, card), card) == resolve(request, card)`, also through JSON;
* all that is drawn (seed, request_id) is drawn here, and stands in the result.
"""

import math
import secrets
import uuid
from collections.abc import Mapping
from typing import Any

from schemas.card import ModelCard
from schemas.checks import check, check_num_steps, geometry_of
from schemas.errors import invalid
from schemas.request import RolloutRequest
from schemas.resolved import (
    ResolvedGuider,
    ResolvedRequest,
    StepLists,
    needs_negative_prompt,
    num_rows,
)
from schemas.sampling import Guidance, Guider, Transition, Transitions
from schemas.validation import validated

__all__ = [
    "ResolvedGuider",
    "ResolvedRequest",
    "StepLists",
    "check",
    "geometry_of",
    "media_bytes",
    "needs_negative_prompt",
    "num_rows",
    "resolve",
    "trajectory_bytes",
]

STG_BLOCK = 28
"""The block that diffusers' `LTX2Pipeline` perturbs by default, LTX-2.3's."""
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""


def resolve(
    request: RolloutRequest | ResolvedRequest | Mapping[str, Any], card: ModelCard
) -> ResolvedRequest:
    """The request with the card's defaults filled in. Raises ValueError (a Problem) where it cannot be
    sampled.

    A dict is read as a `ResolvedRequest` where it is one's, else as a `RolloutRequest`.
    """
    if isinstance(request, Mapping) and _is_resolved(request):
        request = validated(ResolvedRequest, request)
    resolved = (
        request if isinstance(request, ResolvedRequest) else _filled_in(RolloutRequest.of(request), card)
    )
    check(resolved, card)
    return resolved


def trajectory_bytes(resolved: ResolvedRequest, card: ModelCard) -> int:
    """Bytes of one sample's trajectory table, its manifest left out."""
    sizes = geometry_of(resolved, card)
    elements = sizes.num_video_tokens * sizes.video_channels + sizes.audio_frames * sizes.audio_channels
    scalars = 4 * 4  # step, sigma and two log-probs
    return len(resolved.return_steps) * (elements * STATE_BYTES[resolved.state_dtype] + scalars)


def media_bytes(resolved: ResolvedRequest, card: ModelCard) -> int:
    """Bytes of one sample's uint8 frames and float32 waveform at most; 0 where no media are wanted.

    At most, since every audio latent frame is counted as a full audio_temporal_ratio of mel frames, and the
    causal audio VAE makes fewer of the first.
    """
    if not resolved.media:
        return 0
    sizes = geometry_of(resolved, card)
    mel_samples = sizes.audio_frames * card.audio_temporal_ratio * card.audio_hop_length
    waveform_samples = math.ceil(mel_samples * card.waveform_sample_rate / card.audio_sample_rate)
    return sizes.num_frames * sizes.height * sizes.width * 3 + waveform_samples * card.waveform_channels * 4


def _is_resolved(given: Mapping[str, Any]) -> bool:
    """Only a resolved request has its steps per modality, and all of its fields."""
    return set(given) == set(ResolvedRequest.model_fields) and isinstance(given["stochastic_steps"], Mapping)


def _filled_in(asked: RolloutRequest, card: ModelCard) -> ResolvedRequest:
    default = card.defaults
    num_steps = asked.num_inference_steps or default.num_inference_steps
    if asked.sigmas is not None:
        num_steps = len(asked.sigmas)
    check_num_steps(num_steps, "num_inference_steps" if asked.sigmas is None else "sigmas", card)
    guidance = asked.guidance or Guidance()
    guider = _guider(asked.guider or Guider(), card) if asked.mode == "generate" else None
    guided = (guider or guidance).needs_negative_prompt
    transition = _transition(asked)
    stochastic_steps = StepLists(
        video=_stochastic_steps(asked, transition.video, num_steps),
        audio=_stochastic_steps(asked, transition.audio, num_steps),
    )
    return ResolvedRequest(
        prompt=asked.prompt.strip(),
        negative_prompt=(asked.negative_prompt or "").strip() if guided else None,
        mode=asked.mode,
        num_samples=asked.num_samples,
        seed=secrets.randbelow(2**31) if asked.seed is None else asked.seed,
        height=asked.height or default.height,
        width=asked.width or default.width,
        num_frames=asked.num_frames or default.num_frames,
        frame_rate=asked.frame_rate or default.frame_rate,
        num_inference_steps=num_steps,
        sigmas=asked.sigmas,
        sigma_shift=asked.sigma_shift or ("tokens" if asked.mode == "generate" else "constant"),
        guidance=guidance,
        guider=guider,
        transition=transition,
        stochastic_steps=stochastic_steps,
        shared_initial_noise=asked.shared_initial_noise,
        shared_prefix=asked.shared_prefix,
        return_steps=_return_steps(asked, stochastic_steps, num_steps),
        state_dtype=asked.state_dtype,
        trajectory=asked.trajectory,
        media=asked.media,
        min_policy_version=asked.min_policy_version or 0,
        allow_mixed_versions=asked.allow_mixed_versions,
        request_id=asked.request_id or uuid.uuid4().hex,
        metadata=asked.metadata,
        deadline_s=asked.deadline_s or default.deadline_s,
    )


def _guider(guider: Guider, card: ModelCard) -> ResolvedGuider:
    blocks = guider.spatio_temporal_guidance_blocks
    return ResolvedGuider(
        guidance_scale=guider.guidance_scale,
        stg_scale=guider.stg_scale,
        modality_scale=guider.modality_scale,
        guidance_rescale=guider.guidance_rescale,
        audio_guidance_scale=guider.audio_guidance_scale or guider.guidance_scale,
        audio_stg_scale=guider.audio_stg_scale or guider.stg_scale,
        audio_modality_scale=guider.audio_modality_scale or guider.modality_scale,
        audio_guidance_rescale=guider.audio_guidance_rescale or guider.guidance_rescale,
        spatio_temporal_guidance_blocks=(min(STG_BLOCK, card.num_layers - 1),) if blocks is None else blocks,
    )


def _transition(asked: RolloutRequest) -> Transitions:
    if asked.mode == "generate":
        ode = Transition(kind="ode", noise_level=0.0)
        return Transitions(video=ode, audio=ode)
    transition = asked.transition or Transitions()
    if asked.stochastic_steps and not (transition.video.is_stochastic or transition.audio.is_stochastic):
        rule = "cannot be named where both modalities are deterministic"
        remedy = "leave it out, or use a kind other than ode and a noise_level above 0"
        raise invalid("stochastic_steps", asked.stochastic_steps, rule, remedy).exception()
    return transition


def _stochastic_steps(asked: RolloutRequest, transition: Transition, num_steps: int) -> tuple[int, ...]:
    """Those asked for, else all that can be: with cps all but the last, whose noise would be 0."""
    if not transition.is_stochastic:
        return ()
    if asked.stochastic_steps is not None:
        return tuple(sorted(asked.stochastic_steps))
    return tuple(range(num_steps - 1 if transition.kind == "cps" else num_steps))


def _return_steps(asked: RolloutRequest, stochastic_steps: StepLists, num_steps: int) -> tuple[int, ...]:
    if not asked.trajectory:
        return (num_steps,)
    if asked.return_steps == "all":
        return tuple(range(num_steps + 1))
    if asked.return_steps == "transitions":
        before = {*stochastic_steps.video, *stochastic_steps.audio}
        return tuple(sorted({*before, *(step + 1 for step in before), num_steps}))
    return tuple(sorted({*asked.return_steps, num_steps}))
