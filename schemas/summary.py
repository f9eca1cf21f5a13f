"""What an HTTP caller gets back about a group: numbers and links, no tensors."""

from typing import Any

from schemas.fields import Contract


class SampleLinks(Contract):
    """Where the parts of a sample are, as paths; null for what was not asked for or not made."""

    trajectory: str | None = None
    """The trajectory table, as an Arrow IPC stream."""
    mp4: str | None = None
    """Picture and sound, H.264 and AAC."""
    wav: str | None = None
    """The sound as it was made: 32-bit float."""
    frames: str | None = None
    """A frame as PNG; put its number, from 0, in place of {frame}."""


class RolloutLinks(Contract):
    """Where the rollout is, as paths. They lead somewhere for `http.keep_s`, and until `http.keep_bytes` are kept."""

    self: str
    """This summary again; DELETE it to forget the rollout."""
    conditioning: str | None = None
    """The prompt's contexts, as an Arrow IPC stream."""


class SampleSummary(Contract):
    """One sample, done or failed."""

    sample_index: int
    """Which sample of its group, from 0; its noise is keyed by (seed, sample_index)."""
    seed: int
    """The group's seed."""
    attempt: int
    """How often the sample was started."""
    policy_version: int | None = None
    """Version of the weights that it was sampled with; null when it failed."""
    log_probs_video: list[float | None] | None = None
    """Mean log-prob over the elements of the video state, per step; null where video moved by ode."""
    log_probs_audio: list[float | None] | None = None
    """The same for audio."""
    n_video: int | None = None
    """Elements of the video state, to weigh the means by."""
    n_audio: int | None = None
    """Elements of the audio state."""
    trajectory_bytes: int | None = None
    """Size of the trajectory table; null when none was asked for."""
    media_bytes: int | None = None
    """Size of the media tables; null when none was asked for."""
    num_frames: int | None = None
    """Frames of the video; null when no media was asked for."""
    timings: dict[str, float] | None = None
    """Seconds per stage; null when it failed."""
    links: SampleLinks = SampleLinks()
    problem: dict[str, Any] | None = None
    """Code, field, value, rule and remedy of a failed sample."""


class RolloutSummary(Contract):
    """One group."""

    request_id: str
    request: dict[str, Any]
    """The request as it was sampled, every default filled in."""
    sigmas: list[float] | None
    """Noise level before each step, and the terminal 0; null when no sample was done."""
    conditioning_digest: str | None
    """Hash of the prompt's contexts; null when no sample was done."""
    samples: list[SampleSummary]
    links: RolloutLinks
