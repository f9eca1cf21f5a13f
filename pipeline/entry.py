"""A sample inside the engine, from its submission to its result."""

from concurrent.futures import Future
from dataclasses import dataclass

from pipeline.profile import ExecutionProfile
from pipeline.sample import Job, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStamp:
    """Which weights an engine samples from, and how."""

    version: int = 0
    """0 for the checkpoint's own."""
    digest: str = ""
    """Hash of all of them (`schemas.weights`); empty where nobody asked for it."""
    profile: ExecutionProfile | None = None
    """What the model computes with under them, an adapter's form among it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A sample at its last step, with what was measured on the way."""

    sample: Sample
    stamp: PolicyStamp
    """The weights of the last step."""
    wait_s: float
    """From submission to the first step."""
    denoise_s: float
    """From the first step to the last, shared forward passes counted whole."""


class Entry:
    """A job in the engine, from submission to its result."""

    def __init__(self, job: Job, sample: Sample, submitted_at: float, number: int) -> None:
        self.job, self.sample = job, sample
        self.number = number
        """Of the submission, rising."""
        self.future: Future[Finished] = Future()
        self.submitted_at = submitted_at
        self.started_at: float | None = None
        self.batch_key = (sample.geometry, sample.plan, job.conditioning.masked)
        self.num_rows = sample.plan.num_rows
        self.num_tokens = sample.geometry.num_video_tokens + sample.geometry.audio_frames

    def may_start_on(self, version: int) -> bool:
        """Whether the sample may start on these weights."""
        bound, least = self.job.policy_version, self.job.min_policy_version
        return self.is_bound_to(version) if bound is not None else least <= version

    def is_bound_to(self, version: int) -> bool:
        """Whether the sample may start on these weights and no others."""
        return self.job.policy_version == version

    def missed(self, version: int) -> bool:
        """Whether the weights that the sample needs are no more, now that ``version`` is there."""
        bound = self.job.policy_version
        return bound is not None and bound < version
