"""Guidance: from the velocities of several forward passes to the one that a sample moves along.

A rollout uses plain classifier-free guidance in velocity space. ``generate`` uses LTX-2.3's native guider in x0
space, in the order of diffusers' LTX2Pipeline, whose bits it reproduces. All arithmetic is float32, one modality at a
time, and knows nothing of batches: tensors are those of one sample.
"""

from dataclasses import dataclass

from diffusers.pipelines.ltx2.pipeline_ltx2 import rescale_noise_cfg
from torch import Tensor

from pipeline.noise import MODALITIES, Modality
from pipeline.velocity import Perturbation
from schemas.resolved import ResolvedRequest, needs_negative_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """The native guider's weights for one modality; 1, 0 and 1 switch the three terms off."""

    guidance: float
    spatio_temporal: float
    modality: float
    rescale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which forward passes a sample needs at each step. Samples of one batch have equal plans."""

    negative: bool
    """The main pass has a row for the negative prompt beside the positive one."""
    perturbations: tuple[Perturbation, ...]
    """Further passes over the positive row."""

    @property
    def num_rows(self) -> int:
        """Rows of one sample in the main pass, the widest of them."""
        return 2 if self.negative else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Velocities:
    """What the passes gave for one sample and one modality, each [1, L, C]."""

    positive: Tensor
    negative: Tensor | None
    perturbed: tuple[Tensor, ...]
    """One per entry of the plan's perturbations."""


def plan_of(request: ResolvedRequest) -> Plan:
    """The forward passes that the request's guidance needs."""
    if request.guider is None:
        return Plan(negative=needs_negative_prompt(request), perturbations=())
    scales = [_scales(request, modality) for modality in MODALITIES]
    perturbations = []
    if any(s.spatio_temporal > 0 for s in scales):
        perturbations.append(
            Perturbation(skip_attention_blocks=request.guider.spatio_temporal_guidance_blocks)
        )
    if any(s.modality > 1 for s in scales):
        perturbations.append(Perturbation(isolate_modalities=True))
    return Plan(negative=needs_negative_prompt(request), perturbations=tuple(perturbations))


def guide(
    request: ResolvedRequest,
    plan: Plan,
    modality: Modality,
    velocities: Velocities,
    sample: Tensor,
    sigma: Tensor,
) -> Tensor:
    """The guided velocity of one modality, float32 [1, L, C], for a state ``sample`` [1, L, C] at ``sigma``."""
    if request.guider is not None:
        return native(velocities, plan, _scales(request, modality), sample, sigma)
    if velocities.negative is None:
        return velocities.positive
    return classifier_free(velocities.positive, velocities.negative, getattr(request.guidance, modality))


def classifier_free(positive: Tensor, negative: Tensor, scale: float) -> Tensor:
    """v_neg + g (v_pos - v_neg) (arXiv 2207.12598); exactly ``positive`` at g = 1."""
    return positive if scale == 1 else negative + scale * (positive - negative)


def native(velocities: Velocities, plan: Plan, scales: Scales, sample: Tensor, sigma: Tensor) -> Tensor:
    """LTX-2.3's guider: every term is a difference of x0 predictions, the sum is rescaled to the positive's std.

    x0 = x - sigma v, and back at the end. Terms that the plan has no pass for are left out, as in diffusers.
    """
    clean = sample - velocities.positive * sigma
    guided = clean
    if velocities.negative is not None:
        guided = guided + (scales.guidance - 1) * (clean - (sample - velocities.negative * sigma))
    for perturbation, velocity in zip(plan.perturbations, velocities.perturbed, strict=True):
        scale = scales.modality - 1 if perturbation.isolate_modalities else scales.spatio_temporal
        guided = guided + scale * (clean - (sample - velocity * sigma))
    if scales.rescale > 0:
        guided = rescale_noise_cfg(guided, clean, guidance_rescale=scales.rescale)
    return (sample - guided) / sigma


def _scales(request: ResolvedRequest, modality: Modality) -> Scales:
    guider = request.guider
    assert guider is not None
    if modality == "video":
        return Scales(
            guidance=guider.guidance_scale,
            spatio_temporal=guider.stg_scale,
            modality=guider.modality_scale,
            rescale=guider.guidance_rescale,
        )
    return Scales(
        guidance=guider.audio_guidance_scale,
        spatio_temporal=guider.audio_stg_scale,
        modality=guider.audio_modality_scale,
        rescale=guider.audio_guidance_rescale,
    )
