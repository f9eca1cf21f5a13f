"""What `submit` returns: a group of samples that fill in as they are done. Read from any thread.

Errors are values here: a failed sample carries its Problem, and its neighbours are what they are. A group refers to its
samples and nothing refers back, so that what it holds in the object store is freed at the moment when it is dropped.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from uuid import uuid4

import ray

from deployments.binding import Binding
from schemas.errors import Problem
from schemas.resolved import ResolvedRequest


class RolloutSample:
    """One sample. ``trajectory`` and ``media`` are refs that this process owns, set when the sample is done."""

    def __init__(self, request: ResolvedRequest, group_id: str, sample_index: int) -> None:
        self.request = request
        """Its group's request."""
        self.group_id = group_id
        self.sample_index = sample_index
        self.attempt = 1
        """How often the sample was started; more than 1 after a replica's death."""
        self.sample_id = ""
        """Names the attempt that is under way, as the sample's manifest does."""
        self.steps_done = 0
        """Steps that the denoiser last reported."""
        self.trajectory: ray.ObjectRef | None = None
        """Trajectory table (`schemas.trajectory`); None until done, or when it was not asked for."""
        self.media: ray.ObjectRef | None = None
        """Media tables (`schemas.media`); None until done, or when none was asked for."""
        self.problem: Problem | None = None
        """Why the sample failed; None otherwise."""
        self.settled: Future[None] = Future()
        """Is done when the sample is done or has failed; never has an exception."""

    @property
    def key(self) -> str:
        """Unique among samples in flight; an attempt at the sample adds its number and the policy version."""
        return f"{self.group_id}/{self.sample_index}"

    @property
    def done(self) -> bool:
        """Whether the sample is done, and not failed."""
        return self.settled.done() and self.problem is None

    def raise_if_failed(self) -> None:
        """Raise the sample's problem as a builtin exception, if it has one."""
        if self.problem is not None:
            raise self.problem.exception()

    def finish(self, trajectory: ray.ObjectRef | None, media: ray.ObjectRef | None) -> None:
        self.trajectory, self.media = trajectory, media
        self.steps_done = self.request.num_inference_steps
        self.settled.set_result(None)

    def fail(self, problem: Problem) -> None:
        if not self.settled.done():
            self.problem = problem
            self.settled.set_result(None)


class RolloutGroup:
    """The samples of one request."""

    def __init__(self, request: ResolvedRequest, cancel: Callable[["RolloutGroup"], None]) -> None:
        self.request = request
        """The request as it is sampled: every default filled in, the seed drawn."""
        self.group_id = uuid4().hex
        """Tells this submission from another of the same request."""
        self.samples = [RolloutSample(request, self.group_id, index) for index in range(request.num_samples)]
        self.conditioning: ray.ObjectRef | None = None
        """Conditioning table of the group (`schemas.conditioning`), set when the prompt is encoded."""
        self.policy_version: int | None = None
        """The version that all samples are of; None until the group is bound to one, and with allow_mixed_versions."""
        self.binding: Binding | None = None
        """Which samples have begun; for the client's own use."""
        self.settled: Future[None] = Future()
        """Is done when every sample is done or has failed; never has an exception."""
        self.collecting = threading.Event()
        """Set when somebody waits for the group: its samples are then handed over as soon as they are done."""
        self._cancel = cancel

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def problems(self) -> list[Problem]:
        """The problems of the samples that failed."""
        return [sample.problem for sample in self.samples if sample.problem is not None]

    def cancel(self) -> None:
        """Give up what is not done; running samples stop within one step. Returns at once."""
        self._cancel(self)

    def raise_if_failed(self) -> None:
        """Raise the first failed sample's problem as a builtin exception, if any failed."""
        for sample in self.samples:
            sample.raise_if_failed()
