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
from pipeline.side_work import Draws, HostCopies, OnHost, to_device
from pipeline.tensors import dtype_of
from pipeline.transitions import transition
from pipeline.velocity import Latents, Place, Row
from schemas.card import ModelCard
from schemas.checks import check_sigmas, geometry_of
from schemas.errors import invalid
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
    prefix: "Prefix | None" = None
    """Steps that were computed once for the whole group; the sample goes on from there."""
    until: int | None = None
    """Step whose state ends the sample, to make a prefix; None for the last."""
    policy_version: int | None = None
    """The version that the sample's group is bound to; None: any from ``min_policy_version`` on."""
    min_policy_version: int = 0
    """The oldest version that the sample may start on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A kept state."""

    step: int
    """Index of the step that starts from it; the number of steps for the last."""
    copies: Mapping[Modality, OnHost]
    """Each modality's latents on their way to the host."""

    @property
    def latents(self) -> Latents:
        """[L, C] per modality, in the state's dtype, on the host."""
        return {modality: copy.wait() for modality, copy in self.copies.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The deterministic steps before the first stochastic one, which a group with one initial state has in common."""

    states: tuple[State, ...]
    """The kept states, rising; the last one is that from which the branches start."""
    places: "tuple[Places, ...]"
    """Where its rows stood, step by step."""
    policy_versions: tuple[int, ...]
    """With which weights, step by step."""

    @property
    def step(self) -> int:
        return self.states[-1].step


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where a sample's rows stood in the main forward pass of one step."""

    positive: Place
    negative: Place | None


class Sample:
    """The running form of a job. ``advance`` either moves it by one whole step or leaves it as it was."""

    def __init__(self, job: Job, card: ModelCard, copies: HostCopies, draws: Draws) -> None:
        request, device = job.request, copies.device
        self.job = job
        self._copies, self._draws = copies, draws
        self.plan: Plan = plan_of(request)
        if self.plan.negative and job.conditioning.negative is None:
            rule = "must hold the negative prompt's contexts, since the request is guided"
            raise invalid(
                "conditioning", None, rule, "encode the prompt with its negative prompt"
            ).exception()
        self.geometry = geometry_of(request, card)
        self.sigmas = _sigmas(request, card, self.geometry)
        check_sigmas(request, self.sigmas.tolist())
        self._storage = dtype_of(request.state_dtype)
        self._stochastic = {m: frozenset(getattr(request.stochastic_steps, m)) for m in MODALITIES}
        self._kept_steps = [*(k for k in request.return_steps if k < self.last_step), self.last_step]
        self.kept: list[State] = []
        """The kept states so far, rising; each is a row of `stacked`."""
        self.stacked: Latents = {
            m: copies.room((len(self._kept_steps), *token_shape(self.geometry, m)), self._storage)
            for m in MODALITIES
        }
        self.places = list(job.prefix.places) if job.prefix else []
        self.policy_versions = list(job.prefix.policy_versions) if job.prefix else []
        """The version whose weights each step so far was made with."""
        if job.prefix is None:
            self.step = 0
            self._latents: Latents = {
                m: to_device(self._initial(m).to(self._storage), device) for m in MODALITIES
            }
            self._keep(self.step, self._latents)
        else:
            self.step = job.prefix.step
            for state in job.prefix.states:
                self._keep(state.step, state.latents)
            start = job.prefix.states[-1].latents
            self._latents = {m: to_device(start[m], device) for m in MODALITIES}
        self.log_probs: dict[Modality, list[Tensor | None]] = {m: [None] * self.step for m in MODALITIES}
        self._prepare_noise()

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def last_step(self) -> int:
        """The step whose state ends this sample."""
        return self.num_steps if self.job.until is None else self.job.until

    @property
    def done(self) -> bool:
        return self.step == self.last_step

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

    def advance(
        self, velocities: Mapping[Modality, Velocities], places: Places, policy_version: int = 0
    ) -> None:
        """Guide and move both modalities by one step; ``places`` is where its rows stood in the forward passes, and
        ``policy_version`` names the weights that were used."""
        moved: Latents = {}
        log_probs: dict[Modality, Tensor | None] = {}
        for modality in MODALITIES:
            moved[modality], log_probs[modality] = self._move(modality, velocities[modality])
        self._latents = moved
        for modality in MODALITIES:
            self.log_probs[modality].append(log_probs[modality])
        self.places.append(places)
        self.policy_versions.append(policy_version)
        self.step += 1
        self._keep(self.step, self._latents)
        self._prepare_noise()

    def _move(self, modality: Modality, velocities: Velocities) -> tuple[Tensor, Tensor | None]:
        request, step = self.job.request, self.step
        sample = self._latents[modality].float().unsqueeze(0)
        velocity = guide(request, self.plan, modality, velocities, sample, self.sigmas[step])
        how = getattr(request.transition, modality)
        stochastic = step in self._stochastic[modality]
        noise = None
        if stochastic:
            drawn = self._draws.take(self._noise_key(modality), token_shape(self.geometry, modality))
            noise = to_device(drawn, sample.device).unsqueeze(0)
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

    def _noise_key(self, modality: Modality) -> int:
        return noise_key(self.job.request.seed, self.job.sample_index, modality, self.step)

    def _prepare_noise(self) -> None:
        """Have the next step's noise drawn while the device is busy with something else."""
        if self.done:
            return
        for modality in MODALITIES:
            if self.step in self._stochastic[modality]:
                self._draws.prepare(self._noise_key(modality), token_shape(self.geometry, modality))

    def _keep(self, step: int, latents: Latents) -> None:
        """Copy a state into its row of the buffers, if it is one to keep."""
        row = len(self.kept)
        if row < len(self._kept_steps) and step == self._kept_steps[row]:
            copies = {m: self._copies.start(latents[m], into=self.stacked[m][row]) for m in MODALITIES}
            self.kept.append(State(step=step, copies=copies))


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
