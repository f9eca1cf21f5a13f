"""One sample on its way from noise to its last state: what it is to do, where it is, and what it keeps.

It moves alone: guidance, transition and reductions run on this sample's tensors only, so its numbers never depend on
who shares its forward pass. It knows no batch, no thread and no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.conditioning import Conditioning
from pipeline.guidance import Plan, Velocities, guide, plan_of
from pipeline.noise import MODALITIES, Modality, draw, noise_key
from pipeline.schedule import explicit_grid, sigma_grid
from pipeline.tensors import dtype_of
from pipeline.transitions import transition
from pipeline.velocity import Latents, Place, Row
from schemas.card import ModelCard
from schemas.checks import check_sigmas, geometry_of
from schemas.geometry import Geometry
from schemas.resolved import ResolvedRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The order for one sample."""

    sample_id: str
    """Unique among the samples that an engine holds."""
    request: ResolvedRequest
    sample_index: int
    """Which sample of its group this is, from 0."""
    conditioning: Conditioning
    attempt: int = 1
    """1, or more when an earlier replica died with the sample."""
    lease_id: str | None = None
    """The caller's lease; the sample is dropped when it runs out."""
    expires_at: float = float("inf")
    """Moment of ``time.monotonic`` after which the sample is given up."""
    initial: Mapping[Modality, Tensor] | None = None
    """Initial latents [L, C] in place of the keyed draw; for parity with another sampler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A kept state, on the host."""

    step: int
    """Index of the step that starts from it; the number of steps for the last."""
    latents: Latents
    """[L, C] per modality, in the state's dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where a sample's rows stood in the main forward pass of one step."""

    positive: Place
    negative: Place | None


class Sample:
    """The running form of a job. ``advance`` either moves it by one whole step or leaves it as it was."""

    def __init__(self, job: Job, card: ModelCard, device: torch.device) -> None:
        request = job.request
        self.job = job
        self.plan: Plan = plan_of(request)
        self.geometry = geometry_of(request, card)
        self.sigmas = _sigmas(request, card, self.geometry).to(device)
        check_sigmas(request, self.sigmas.tolist())
        self.step = 0
        self.places: list[Places] = []
        self.log_probs: dict[Modality, list[Tensor | None]] = {modality: [] for modality in MODALITIES}
        self.kept: list[State] = []
        self._storage = dtype_of(request.state_dtype)
        self._kept_steps = frozenset(request.return_steps)
        self._latents: Latents = {m: self._initial(m).to(device, self._storage) for m in MODALITIES}
        self._keep()

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def done(self) -> bool:
        return self.step == self.num_steps

    @property
    def latents(self) -> Latents:
        """The current state per modality, [L, C]."""
        return self._latents

    def positive_row(self) -> Row:
        return Row(
            latents=self._latents, sigma=self.sigmas[self.step], context=self.job.conditioning.positive
        )

    def negative_row(self) -> Row:
        context = self.job.conditioning.negative
        assert context is not None
        return Row(latents=self._latents, sigma=self.sigmas[self.step], context=context)

    def advance(self, velocities: Mapping[Modality, Velocities], places: Places) -> None:
        """Guide and move both modalities by one step; ``places`` is where its rows stood in the forward passes."""
        moved: Latents = {}
        log_probs: dict[Modality, Tensor | None] = {}
        for modality in MODALITIES:
            moved[modality], log_probs[modality] = self._move(modality, velocities[modality])
        self._latents = moved
        for modality in MODALITIES:
            self.log_probs[modality].append(log_probs[modality])
        self.places.append(places)
        self.step += 1
        self._keep()

    def _move(self, modality: Modality, velocities: Velocities) -> tuple[Tensor, Tensor | None]:
        request, step = self.job.request, self.step
        sample = self._latents[modality].float().unsqueeze(0)
        velocity = guide(request, self.plan, modality, velocities, sample, self.sigmas[step])
        how = getattr(request.transition, modality)
        stochastic = step in getattr(request.stochastic_steps, modality)
        noise = None
        if stochastic:
            key = noise_key(request.seed, self.job.sample_index, modality, step)
            noise = draw(key, tuple(sample.shape[1:])).unsqueeze(0)
        move = transition(
            how.kind if stochastic else "ode",
            sample,
            velocity,
            sigma=self.sigmas[step],
            sigma_next=self.sigmas[step + 1],
            sigma_1=self.sigmas[1],
            noise_level=how.noise_level,
            noise=noise,
            log_prob_kind=how.log_prob_kind,
            storage_dtype=self._storage,
        )
        return move.next_sample[0], None if move.log_prob is None else move.log_prob[0]

    def _initial(self, modality: Modality) -> Tensor:
        if self.job.initial is not None:
            return self.job.initial[modality]
        request = self.job.request
        index = "shared" if request.shared_initial_noise else self.job.sample_index
        shape = token_shape(self.geometry, modality)
        return draw(noise_key(request.seed, index, modality, "init"), shape)  # type: ignore[arg-type]

    def _keep(self) -> None:
        if self.step in self._kept_steps:
            self.kept.append(
                State(step=self.step, latents={m: latents.cpu() for m, latents in self._latents.items()})
            )


def token_shape(of: Geometry, modality: Modality) -> tuple[int, int]:
    """Tokens and channels of one modality's packed latents."""
    if modality == "video":
        return of.num_video_tokens, of.video_channels
    return of.audio_frames, of.audio_channels


def _sigmas(request: ResolvedRequest, card: ModelCard, of: Geometry) -> Tensor:
    if request.sigmas is not None:
        return explicit_grid(request.sigmas)
    return sigma_grid(
        request.num_inference_steps,
        shift=request.sigma_shift,
        num_tokens=of.num_video_tokens,
        scheduler_config=card.scheduler,
    )


def host_floats(values: Sequence[Tensor | None]) -> list[float | None]:
    """Log-probs as Python floats, fetched from the device together; None stays None."""
    present = [value for value in values if value is not None]
    floats = iter(torch.stack(present).tolist() if present else [])
    return [None if value is None else next(floats) for value in values]
