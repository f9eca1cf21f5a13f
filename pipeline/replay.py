"""Replay: the log-probs of a stored trajectory under a transformer's current weights, differentiable.

Each modality is scored with the stored states of both, in batches of the shape that the rollout used, so that under
the rollout's weights and execution profile the log-probs come back bit for bit and a trainer's first ratio is 1.
It knows no optimizer and no loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.conditioning import Conditioning
from pipeline.guidance import Velocities, guide, plan_of
from pipeline.noise import MODALITIES, Modality
from pipeline.profile import profile_of
from pipeline.tensors import owned
from pipeline.transitions import transition
from pipeline.velocity import Latents, Row, VelocityModel
from schemas.geometry import Geometry
from schemas.resolved import ResolvedRequest
from schemas.trajectory import SCHEMA_VERSION, TrajectoryView


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLogProbs:
    """Log-probs of one step, float32 scalars with a graph to the transformer; None where a modality moved by ode."""

    step: int
    video: Tensor | None
    audio: Tensor | None


def log_probs(
    transformer: LTX2VideoTransformer3DModel,
    trajectory: TrajectoryView,
    conditioning: Conditioning,
    steps: Iterable[int] | None = None,
) -> list[StepLogProbs]:
    """Score the stored moves of ``steps`` (default: every stochastic step).

    Raises ValueError for a step whose two states were not kept or that moved by ode, for another schema version, for
    a mode that has no log-probs, for an execution profile that this process does not run under, and for a conditioning
    that is not the rollout's.
    """
    manifest = trajectory.manifest
    _check(transformer, manifest)
    request = ResolvedRequest.model_validate(manifest["request"])
    if request.mode != "rollout":
        raise ValueError(
            f"mode of the trajectory must be 'rollout', got {request.mode!r}, which moves by ode and has no log-probs; "
            "sample it again in mode rollout"
        )
    if conditioning.digest != manifest["conditioning_digest"]:
        raise ValueError(
            f"conditioning must be the one that the trajectory was sampled with, digest "
            f"{manifest['conditioning_digest']}, got {conditioning.digest}; fetch the group's conditioning table"
        )
    stochastic = sorted({*request.stochastic_steps.video, *request.stochastic_steps.audio})
    model = VelocityModel(transformer)
    geometry = Geometry(**manifest["geometry"])
    return [
        _score(model, trajectory, conditioning, request, geometry, _checked(step, stochastic))
        for step in (stochastic if steps is None else steps)
    ]


def _score(
    model: VelocityModel,
    trajectory: TrajectoryView,
    conditioning: Conditioning,
    request: ResolvedRequest,
    geometry: Geometry,
    step: int,
) -> StepLogProbs:
    manifest, device = trajectory.manifest, model.device
    sigmas = torch.tensor(manifest["sigmas"], dtype=torch.float32)
    state, moved = (_state(trajectory, at, device) for at in (step, step + 1))
    plan = plan_of(request)
    places = manifest["places"][step]
    contexts = {"positive": conditioning.positive}
    if plan.negative:
        assert conditioning.negative is not None, "its digest says that it is the rollout's"
        contexts["negative"] = conditioning.negative
    velocities = {
        name: _velocity(
            model, Row(latents=state, sigma=sigmas[step], context=context), geometry, places[name]
        )
        for name, context in contexts.items()
    }
    scored: dict[Modality, Tensor | None] = {}
    for modality in MODALITIES:
        how = getattr(request.transition, modality)
        if step not in getattr(request.stochastic_steps, modality):
            scored[modality] = None
            continue
        sample = state[modality].float().unsqueeze(0)
        own = Velocities(
            positive=velocities["positive"][modality],
            negative=velocities["negative"][modality] if plan.negative else None,
            perturbed=(),
        )
        move = transition(
            how.kind,
            sample,
            guide(request, plan, modality, own, sample, sigmas[step]),
            sigma=sigmas[step],
            sigma_next=sigmas[step + 1],
            sigma_1=sigmas[1],
            noise_level=how.noise_level,
            next_sample=moved[modality].unsqueeze(0),
            log_prob_kind=how.log_prob_kind,
        )
        assert move.log_prob is not None
        scored[modality] = move.log_prob[0]
    return StepLogProbs(step=step, video=scored["video"], audio=scored["audio"])


def _velocity(model: VelocityModel, row: Row, geometry: Geometry, place: dict[str, int]) -> Latents:
    """Velocity [1, L, C] of a row at the place where it stood in the rollout; what the other rows hold is no matter."""
    index = place["index"]
    velocities = model([row] * place["num_rows"], geometry)
    return {modality: velocities[modality][index : index + 1] for modality in MODALITIES}


def _state(trajectory: TrajectoryView, step: int, device: torch.device) -> Latents:
    """Both modalities' stored state at ``step``, copied to the device, [L, C]."""
    index, dtype = trajectory.row_of(step), trajectory.state_dtype
    return {
        "video": owned(trajectory.video_latents[index], device, dtype),
        "audio": owned(trajectory.audio_latents[index], device, dtype),
    }


def _check(transformer: LTX2VideoTransformer3DModel, manifest: dict[str, object]) -> None:
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version of the trajectory must be {SCHEMA_VERSION}, got {manifest['schema_version']}; "
            "replay it with the release that sampled it"
        )
    recorded = manifest["execution_profile"]
    assert isinstance(recorded, dict)
    different = profile_of(transformer).differences(recorded)
    if different:
        lines = "; ".join(
            f"{key}: here {here!r}, rollout {there!r}" for key, (here, there) in different.items()
        )
        raise ValueError(
            f"the execution profile differs from the rollout's, so log-probs would not be comparable ({lines}); "
            "set these alike, for example torch.set_num_threads or the model's dtype"
        )


def _checked(step: int, stochastic: list[int]) -> int:
    if step not in stochastic:
        raise ValueError(
            f"step {step} has no log-prob, it moved by ode; the stochastic steps are {stochastic}"
        )
    return step
