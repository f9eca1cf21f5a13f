"""A request with nothing left to default: what is sent to the replicas, and what each manifest records.

It knows nothing of how it came about (`schemas.resolve`), and only the rules of its fields; `schemas.checks`
holds those between them.

Invariant: its JSON reads back equal.
"""

from schemas.card import StateDtype
from schemas.fields import Bool, Contract, Count, Index, Indices, Positive
from schemas.request import FrameRate, Metadata, Mode, Prompt, RequestId, Seed, Sigmas, SigmaShift, Text
from schemas.sampling import Guidance, Guider, Rescale, Scale, Transitions


class ResolvedGuider(Guider):
    """A guider whose audio values and blocks are all said."""

    audio_guidance_scale: Scale
    audio_stg_scale: Scale
    audio_modality_scale: Scale
    audio_guidance_rescale: Rescale
    spatio_temporal_guidance_blocks: Indices


class StepLists(Contract):
    """Step indices of each modality, rising."""

    video: Indices
    """Steps in which the video latents move with noise, and have a log-prob."""
    audio: Indices
    """Steps in which the audio latents move with noise, and have a log-prob."""


class ResolvedRequest(Contract):
    """As `RolloutRequest`, field by field, where not said otherwise."""

    prompt: Prompt
    """Without white space around it."""
    negative_prompt: Text | None
    """None where no guidance needs one."""
    mode: Mode
    num_samples: Count
    seed: Seed

    height: Count
    width: Count
    num_frames: Count
    frame_rate: FrameRate

    num_inference_steps: Count
    """Number of steps, also where sigmas were given."""
    sigmas: Sigmas | None
    """The grid that was given, without the terminal 0; None: the checkpoint's own."""
    sigma_shift: SigmaShift
    """Without effect where sigmas were given."""

    guidance: Guidance
    """Off in mode generate."""
    guider: ResolvedGuider | None
    """None in mode rollout."""
    transition: Transitions
    """ode for both in mode generate."""
    stochastic_steps: StepLists
    """Of 0 .. num_inference_steps - 1, what each modality's transition can do."""
    shared_initial_noise: Bool
    shared_prefix: Bool

    return_steps: Indices
    """States to keep, of 0 .. num_inference_steps, rising, the last one always among them."""
    state_dtype: StateDtype
    trajectory: Bool
    media: Bool

    min_policy_version: Index
    """0: any."""
    allow_mixed_versions: Bool

    request_id: RequestId
    metadata: Metadata | None
    deadline_s: Positive


def first_stochastic_step(resolved: ResolvedRequest) -> int:
    """The first step in which either modality moves stochastically; the number of steps where none does."""
    return min(
        (*resolved.stochastic_steps.video, *resolved.stochastic_steps.audio, resolved.num_inference_steps)
    )


def needs_negative_prompt(resolved: ResolvedRequest) -> bool:
    """Whether classifier-free guidance is on, for either modality."""
    return (resolved.guider or resolved.guidance).needs_negative_prompt


def num_rows(resolved: ResolvedRequest) -> int:
    """Rows of one sample in a forward pass: 2 with classifier-free guidance, else 1."""
    return 2 if needs_negative_prompt(resolved) else 1
